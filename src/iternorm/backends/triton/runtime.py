"""What the kernels run on: the GPU, its stream, and launches. Every private name of Triton that is used is used here.

Triton's own launch binds, types and hashes every argument each time. Here a kernel is compiled once for its constants
and the types of its arguments, and launched from then on with plain addresses and numbers.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from iternorm.whitening import modes

# Triton decides when a kernel is defined whether it will be interpreted.
INTERPRETED: bool = knobs.runtime.interpret
_NO_CHANGE = nullcontext()


class Device(NamedTuple):
    """What a GPU is and has."""

    name: str
    capability: tuple[int, int]
    num_sms: int

    @property
    def launches_dependents(self) -> bool:
        """Whether a launch may start while the one before is at work: programmatic dependent launch."""
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


# A graph that is recorded is for one GPU.
@modes.constant_in_graphs
def lacking(index: int) -> str | None:
    """Why the kernels cannot run on a GPU, or None."""
    if index not in _lacking:
        _lacking[index] = _find_lacking(device_of(torch.device("cuda", index)))
    return _lacking[index]


def _find_lacking(device: Device) -> str | None:
    if torch.version.hip is not None:
        return f"they are for NVIDIA's GPUs, not for {device.name}"
    if device.capability < _LEAST_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (device.capability, _LEAST_CAPABILITY))
        return f"they need a GPU of compute capability {need} or above, and {device.name} has {have}"
    return None


def on_device(device: torch.device):
    """Kernels are launched on the current device: make it this one where it is another."""
    same = device.type != "cuda" or device.index == torch._C._cuda_getDevice()
    return _NO_CHANGE if same else torch.cuda.device(device)


def stream_of(device: torch.device) -> int | None:
    """The current stream, or None where kernels are launched by Triton itself."""
    if device.type != "cuda" or INTERPRETED:
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)


def given_to(device: torch.device, *tensors: Tensor | None) -> tuple[int | None, Any]:
    """The stream, and the tensors as kernels launched on it take them: addresses, 0 for an absent one.

    Without a stream, where one is not aligned to 16 bytes or there is no GPU, the tensors themselves, for Triton.
    """
    stream = stream_of(device)
    if stream is not None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        if not together & 15:
            return stream, addresses
    return None, tensors


class Launch:
    """A kernel with its grid, integers and constants, to be launched with pointers and floats.

    Args:
        kernel: a `triton.jit` function; its arguments are pointers, floats, integers, constants, in that order.
        grid: of its programs.
        pointers: the dtype each points to, or None for one that is absent. They are aligned to 16 bytes.
        floats: examples of its float arguments.
        integers: its integer arguments.
        specialized: which of the integers the kernel is compiled for; the others change with the batch.
        constants: its constexpr arguments.
        warps: of a program.
        device: where it runs.
        dependent: whether it is a dependent launch, where the GPU has them: its programs start while the launch before
            is at work, and wait. They crowd on the multiprocessors that fall free first, if more of them fit there than
            should share one.
        cooperative: whether all programs run at once and may wait for each other. The grid is then cut to as many as
            fit, of which each does the work of several.

    Raises:
        triton.OutOfResources: the kernel asks for more shared memory than the device has.
    """

    def __init__(
        self,
        kernel,
        grid: tuple[int, int],
        pointers: tuple,
        floats: tuple,
        integers: tuple[int, ...],
        specialized: tuple[int, ...],
        constants: dict[str, Any],
        warps: int,
        device: torch.device,
        dependent: bool = True,
        cooperative: bool = False,
    ):
        self.kernel = kernel
        # The interpreter runs one program after the other: only one can wait for all.
        self.grid = (1, 1) if INTERPRETED and cooperative else grid
        self.integers = integers
        self.constants = constants
        self.warps = warps
        self.dependent = dependent
        self._options = {"num_warps": warps}
        if device.type == "cuda" and not INTERPRETED:
            # Of the others only the width matters: 2 stands for 32 bits, 2^31 for 64. A loop may go a step too far.
            typical = (n if i in specialized else (2 if n < 2**31 - 2**20 else 2**31) for i, n in enumerate(integers))
            types = (*pointers, *floats, *typical)
            able = device_of(device).launches_dependents
            fixed = (*constants.items(), ("PDL", able))
            options = (kernel, types, fixed, warps, device.index, dependent and able, cooperative)
            self._compiled, call, before, after, at_once = _compiled(*options)
            if cooperative:
                self.grid = (min(grid[0], at_once), 1)
                self._options["launch_cooperative_grid"] = True
            # What is called, and with what: the grid, then the stream, then this, the values, and this.
            self.prepared = call, (*self.grid, 1), before, (*integers, *after)

    def __call__(self, stream: int | None, values: tuple) -> None:
        """Launch on `stream` with addresses and floats, or with None through Triton with tensors."""
        if stream is None:
            self.kernel[self.grid](*values, *self.integers, **self.constants, PDL=False, **self._options)
        else:
            call, grid, before, after = self.prepared
            call(*grid, stream, *before, *values, *after)

    def for_driver(self) -> "ForDriver | None":
        """What the driver wants to know of the launch; None if this version of Triton is not known well enough."""
        return _for_driver(self._compiled)


class ForDriver(NamedTuple):
    """A compiled kernel as CUDA's driver launches it, without Triton.

    Attributes:
        function: The driver's handle.
        threads: Of a program.
        shared: Bytes of shared memory.
        dependent: Whether it is a dependent launch.
        cooperative: Whether all programs run at once.
        types: Of every argument, as Triton names them: "*" and a dtype, "fp32", "i32", "i64". A "constexpr" is not
            passed.
        trailing: Pointers that follow the arguments, all zero.
    """

    function: int
    threads: int
    shared: int
    dependent: bool
    cooperative: bool
    types: tuple
    trailing: int


class Launches:
    """Launches by name, each made, and its kernel compiled, when it is first wanted.

    Args:
        makers: what makes the launch of each name.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Launch]]):
        self._makers = makers
        self._made: dict[str, Launch] = {}
        self._chains: dict[tuple[str, ...], tuple[tuple, ...]] = {}

    def __getitem__(self, name: str) -> Launch:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._makers[name]()
        return found

    def run(self, stream: int | None, names: tuple[str, ...], arguments: tuple[tuple, ...]) -> None:
        """Make the named launches one after the other, each with its pointers and floats.

        On a stream a pointer is an address, and 0 where it is absent; without one a tensor or None, for Triton.
        """
        if stream is None:
            for name, values in zip(names, arguments, strict=True):
                self[name](None, values)
            return
        chain = self._chains.get(names)
        if chain is None:
            chain = self._chains[names] = tuple(self[name].prepared for name in names)
        # Not by `Launch.__call__`: that is a Python function more for every launch.
        for (call, grid, before, after), values in zip(chain, arguments, strict=True):
            call(*grid, stream, *before, *values, *after)


@functools.cache
def _compiled(
    kernel, types: tuple, constants: tuple, warps: int, device: int, dependent: bool, cooperative: bool
) -> tuple[Any, Any, tuple, tuple, int]:
    """A kernel, what to call, what goes before and after its arguments, and how many programs can run at once."""
    with torch.cuda.device(device):
        # Programmatic dependent launch: the kernels wait for the launch before them by themselves.
        words = {"num_warps": warps, "launch_pdl": dependent, "launch_cooperative_grid": cooperative}
        compiled = kernel.warmup(*types, grid=(1,), **dict(constants), **words)
        compiled._init_handles()
        at_once = _at_once(compiled, device) if cooperative else 0
    return compiled, *_call_of(compiled), tuple(value for _, value in constants), at_once


def _at_once(compiled, device: int) -> int:
    """How many programs of a kernel a GPU can run at once: a question that only its driver answers."""
    found = ctypes.c_int()
    function, threads, shared = compiled.function, 32 * compiled.metadata.num_warps, compiled.metadata.shared
    ask = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor
    error = ask(ctypes.byref(found), ctypes.c_void_p(function), ctypes.c_int(threads), ctypes.c_size_t(shared))
    if error:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor returned {error}")
    return found.value * device_of(torch.device("cuda", device)).num_sms


def _call_of(compiled) -> tuple[Any, tuple]:
    """What launches a compiled kernel, and what it takes between the stream and the kernel's arguments."""
    run, metadata = compiled.run, (compiled.packed_metadata, None, None, None)
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if scratch or not hasattr(run, "launch_pdl") or hasattr(run, "kernel_signature"):
        return run, (compiled.function, *metadata)
    # In Triton 3.5 and 3.6 the Python around this only allocates scratch memory, of which there is none. Since 3.7 it
    # also knows the signature.
    return run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *metadata)


# Whose kernels take two pointers to scratch memory after their own arguments: read in its source, run with 3.6.
_KNOWN_TRITONS = ("3.5.", "3.6.", "3.7.", "3.8.", "3.9.")


def _for_driver(compiled) -> ForDriver | None:
    run, metadata = compiled.run, compiled.metadata
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if scratch or metadata.num_ctas != 1 or not triton.__version__.startswith(_KNOWN_TRITONS):
        return None
    dependent, cooperative = bool(run.launch_pdl), bool(run.launch_cooperative_grid)
    types = tuple(compiled.src.signature.values())
    return ForDriver(compiled.function, 32 * metadata.num_warps, metadata.shared, dependent, cooperative, types, 2)


@functools.cache
def driver_launcher() -> int:
    """The address of the driver's function that launches a kernel."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
