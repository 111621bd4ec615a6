"""Kernels handed to the CUDA driver with their arguments in place, so that a launch costs little more than its own.

Triton's launcher takes every argument as a Python object, each time. Here the arguments of several launches lie in one
block of memory, of which a call rewrites the addresses and floats, in one go.
"""

import ctypes
import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# How an argument of a compiled kernel is stored, by the type that Triton gives it.
_FORMATS = {"fp32": "f", "i32": "i", "i64": "q"}
_SERIALIZE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_INVALID_CONTEXT = 201


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Prepared(NamedTuple):
    """A compiled kernel with its grid and integers."""

    function: int
    grid: tuple[int, int]
    threads: int
    shared: int
    formats: tuple[str | None, ...]  # of its arguments in order, None for those that were compiled in
    num_values: int  # the first so many, pointers and floats, come with each launch
    integers: tuple[int, ...]  # the others


def formats_of(compiled) -> tuple[str | None, ...] | None:
    """How the driver wants the arguments of a kernel that Triton compiled, or None if that is not what we know.

    The driver says itself where it expects what; another version of Triton may have other ideas of its arguments.
    """
    metadata, types = compiled.metadata, tuple(compiled.src.signature.values())
    known = all(isinstance(t, str) and (t == "constexpr" or t[0] == "*" or t in _FORMATS) for t in types)
    scratch = getattr(metadata, "global_scratch_size", 1) or getattr(metadata, "profile_scratch_size", 0)
    if not known or scratch or metadata.num_ctas != 1 or getattr(metadata, "launch_cooperative_grid", False):
        return None
    formats = tuple(None if t == "constexpr" else _FORMATS.get(t, "Q") for t in types)
    # Two addresses of scratch memory follow, which are not used.
    sizes = [struct.calcsize(f) for f in formats if f] + [8, 8]
    return formats if _sizes_of(compiled.function, len(sizes) + 1) == sizes else None


def _sizes_of(function: int, most: int) -> list[int] | None:
    """The sizes of a kernel's arguments, of `most` at most; None where the driver is too old to tell."""
    query = getattr(_driver(), "cuFuncGetParamInfo", None)
    if query is None:
        return None
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), []
    while len(sizes) < most:
        if query(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
            break
        sizes.append(size.value)
    return sizes


class Chain:
    """Launches that follow each other, made by one call.

    Args:
        kernels: in their order.
        device: where they run.
    """

    def __init__(self, kernels: Sequence[Prepared], device: torch.device):
        self._kernels = kernels
        self._device = device
        # Blocks that no call is using: calls from several threads have one each.
        self._idle: list[_Block] = []

    def __call__(self, stream: int, arguments: tuple[tuple, ...]) -> None:
        """Launch all on `stream`, each with its pointers and floats; an absent pointer is 0."""
        try:
            block = self._idle.pop()
        except IndexError:
            block = _Block(self._kernels)
        block.fill(stream, arguments)
        launch = block.launch
        for config, function, arguments in block.calls:
            code = launch(config, function, arguments, None)
            if code:
                self._failed(code, launch, config, function, arguments)
        self._idle.append(block)

    def _failed(self, code: int, launch, *call) -> None:
        if code == _INVALID_CONTEXT:
            # A new thread has no context until it has used torch's.
            torch.cuda.synchronize(self._device)
            code = launch(*call, None)
        if code:
            text = ctypes.c_char_p()
            _driver().cuGetErrorString(code, ctypes.byref(text))
            message = (text.value or b"unknown error").decode()
            raise RuntimeError(f"a kernel could not be launched on {self._device}: {message} (CUDA error {code})")


class _Block:
    """The arguments of a chain's launches, in memory that the driver reads."""

    def __init__(self, kernels: Sequence[Prepared]):
        # Every argument gets eight bytes, so that each is aligned: first what comes with each launch, then the
        # integers, then a zero for the scratch memory that is not there.
        values = sum(k.num_values for k in kernels)
        numbers = sum(len(k.integers) for k in kernels)
        self._memory = ctypes.create_string_buffer(8 * (values + numbers + 1))
        nothing = ctypes.addressof(self._memory) + 8 * (values + numbers)
        attribute = _Attribute(id=_SERIALIZE, value=1)
        value, number, slots = 0, values, []
        self.calls, self._configs = [], []
        for kernel in kernels:
            slots += kernel.formats[: kernel.num_values]
            places = [*range(value, value + kernel.num_values), *range(number, number + len(kernel.integers))]
            for place, integer in zip(places[kernel.num_values :], kernel.integers, strict=True):
                # Little-endian: the first four bytes are the number in 32 bits.
                struct.pack_into("<q", self._memory, 8 * place, integer)
            value, number = value + kernel.num_values, number + len(kernel.integers)
            wanted = [p for p, kind in zip(places, kernel.formats, strict=False) if kind is not None]
            addresses = [ctypes.addressof(self._memory) + 8 * p for p in wanted] + [nothing, nothing]
            config = _Config(
                grid=(*kernel.grid, 1),
                block=(kernel.threads, 1, 1),
                shared=kernel.shared,
                attributes=ctypes.pointer(attribute),
                num_attributes=1,
            )
            self._configs.append(config)
            arguments = (ctypes.c_void_p * len(addresses))(*addresses)
            self.calls.append((ctypes.byref(config), ctypes.c_void_p(kernel.function), arguments))
        # A float takes four of its eight bytes.
        self._pack = struct.Struct("=" + "".join("f4x" if f == "f" else "Q" for f in slots)).pack_into
        self.launch: Any = _driver().cuLaunchKernelEx
        self._stream = None

    def fill(self, stream: int, arguments: tuple[tuple, ...]) -> None:
        self._pack(self._memory, 0, *itertools.chain.from_iterable(arguments))
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
