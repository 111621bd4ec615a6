"""What the kernels need to know of a GPU, and of what torch's user allows on it."""

from typing import NamedTuple

import torch


class Device(NamedTuple):
    """What a GPU is and has."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_bytes: int  # that a program can have

    @property
    def follows_early(self) -> bool:
        """Whether a launch may be brought up while the one before is at work: programmatic dependent launch."""
        return self.capability >= (9, 0)


# The interpreter has no multiprocessors; a few programs show that their partials are joined.
_INTERPRETER = Device("Triton's interpreter", (0, 0), 3, 0)
# The first with products of bfloat16 and TF32, Ampere.
_LEAST_CAPABILITY = (8, 0)
# Of a matrix of 128x128 in three parts, and the samples that it meets.
_WIDE_BYTES = 104 * 1024
_known: dict[int, Device] = {}
_lacking: dict[int, str | None] = {}


def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return _INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    known = _known.get(index)
    if known is None:
        found = torch.cuda.get_device_properties(index)
        # Not every version of torch tells.
        shared_bytes = getattr(found, "shared_memory_per_block_optin", _WIDE_BYTES)
        capability = found.major, found.minor
        known = _known[index] = Device(found.name, capability, found.multi_processor_count, shared_bytes)
    return known


def tf32_allowed() -> bool:
    """Whether the user lets products of fp32 matrices on a GPU be TF32.

    There are two ways to say so since torch 2.9, and after the newer the older one's getter fails.
    """
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def lacking(index: int, wide: bool) -> str | None:
    """Why the kernels cannot run on a GPU, or None. `wide` is for fp32 in groups of more than 64 channels."""
    if index not in _lacking:
        _lacking[index] = _find_lacking(device_of(torch.device("cuda", index)))
    reason = _lacking[index]
    if reason is None and wide and not tf32_allowed():
        device = device_of(torch.device("cuda", index))
        if device.shared_bytes < _WIDE_BYTES:
            reason = (
                f"exact fp32 in groups of more than 64 channels takes {_WIDE_BYTES // 1024} KiB of shared memory, and "
                f"{device.name} has {device.shared_bytes // 1024}"
            )
    return reason


# A graph that is recorded is for one GPU: see `iternorm.collective`.
lacking._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _find_lacking(device: Device) -> str | None:
    if torch.version.hip is not None:
        return f"they are for NVIDIA's GPUs, not for {device.name}"
    if device.capability < _LEAST_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (device.capability, _LEAST_CAPABILITY))
        return f"they need a GPU of compute capability {need} or above, and {device.name} has {have}"
    return None
