"""What the kernels need to know of a GPU, and of what torch's user allows on it."""

from typing import NamedTuple

import torch


class Device(NamedTuple):
    """What a GPU is and has."""

    name: str
    capability: tuple[int, int]
    num_sms: int

    @property
    def follows_early(self) -> bool:
        """Whether a launch may be brought up while the one before is at work: programmatic dependent launch."""
        return self.capability >= (9, 0)


# The interpreter has no multiprocessors; a few programs show that their partials are joined.
_INTERPRETER = Device("Triton's interpreter", (0, 0), 3)
# The first with products of bfloat16 and TF32, Ampere.
_LEAST_CAPABILITY = (8, 0)
_known: dict[int, Device] = {}
_lacking: dict[int, str | None] = {}


def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return _INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    known = _known.get(index)
    if known is None:
        found = torch.cuda.get_device_properties(index)
        capability = found.major, found.minor
        known = _known[index] = Device(found.name, capability, found.multi_processor_count)
    return known


def tf32_allowed() -> bool:
    """Whether the user lets products of fp32 matrices on a GPU be TF32.

    There are two ways to say so since torch 2.9, and after the newer the older one's getter fails.
    """
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def lacking(index: int) -> str | None:
    """Why the kernels cannot run on a GPU, or None."""
    if index not in _lacking:
        _lacking[index] = _find_lacking(device_of(torch.device("cuda", index)))
    return _lacking[index]


# A graph that is recorded is for one GPU: see `iternorm.whitening.collective`.
lacking._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _find_lacking(device: Device) -> str | None:
    if torch.version.hip is not None:
        return f"they are for NVIDIA's GPUs, not for {device.name}"
    if device.capability < _LEAST_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (device.capability, _LEAST_CAPABILITY))
        return f"they need a GPU of compute capability {need} or above, and {device.name} has {have}"
    return None
