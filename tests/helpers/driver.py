"""CUDA's driver without a GPU: launches of `step.cpp` run in Triton's interpreter, on CPU tensors."""

import ctypes
from typing import Any

import torch

from iternorm.backends.triton import runtime
from iternorm.backends.triton.eager import library
from iternorm.backends.triton.runtime import ForDriver

_REALS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int64": "i64", "int32": "i32"}
_INTEGERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


class Config(ctypes.Structure):
    """The beginning of CUDA's CUlaunchConfig."""

    _fields_ = [(name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")]


class Driver:
    """Stands in for libcuda. `launched` are the names of the kernels, and `failing` the error of the next launches."""

    def __init__(self, monkeypatch):
        self.launches: list[Any] = []
        self.launched: list[str] = []
        self.failing = 0
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._callback = kind(self._launch)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        built = library.build.find_or_build(library.source())
        driver = self
        make = runtime.Launch.__init__

        def remember(launch, kernel, grid, pointers, floats, integers, specialized, *rest, **words):
            make(launch, kernel, grid, pointers, floats, integers, specialized, *rest, **words)
            kinds = ["constexpr" if t is None else f"*{_REALS[str(t).removeprefix('torch.')]}" for t in pointers]
            kinds += ["fp32"] * len(floats)
            # As Triton does with a one that it may look at.
            kinds += [
                "constexpr" if n == 1 and i in specialized else "i32" if n < 2**31 else "i64"
                for i, n in enumerate(integers)
            ]
            launch.kinds = (*kinds, *("constexpr",) * (1 + len(launch.constants)))
            driver.launches.append(launch)

        def for_driver(launch):
            return ForDriver(driver.launches.index(launch) + 1, 32 * launch.warps, 0, False, False, launch.kinds, 2)

        monkeypatch.setattr(runtime.Launch, "__init__", remember)
        monkeypatch.setattr(runtime.Launch, "for_driver", for_driver)
        monkeypatch.setattr(runtime, "driver_launcher", lambda: address)
        monkeypatch.setattr(library, "_found", built)
        # Launches that were made before are not known here.
        monkeypatch.setattr("iternorm.backends.triton.plan._plans", {})
        monkeypatch.setattr("iternorm.backends.triton.items._plans", {})
        monkeypatch.setattr("iternorm.backends.triton.eager.record._passes", {})

    def _launch(self, config, function, parameters, _extra) -> int:
        if self.failing:
            return self.failing
        launch = self.launches[function - 1]
        self.launched.append(launch.kernel.__name__)
        assert (config.contents.x, config.contents.y) == tuple(launch.grid)
        places = iter(ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p)))
        values = []
        for kind, integer in zip(launch.kinds, (*(None,) * self._before(launch), *launch.integers), strict=False):
            values.append(integer if kind == "constexpr" else _value(kind, next(places)))
        # Two pointers to scratch memory follow, both of them null.
        assert [_value("i64", next(places)) for _ in range(2)] == [0, 0]
        options = {**launch.constants, "PDL": False, "num_warps": launch.warps}
        launch.kernel[launch.grid](*values, **options)
        return 0

    @staticmethod
    def _before(launch) -> int:
        """How many arguments come before the integers."""
        return len(launch.kinds) - 1 - len(launch.constants) - len(launch.integers)


def _value(kind: str, place: int):
    if kind.startswith("*"):
        address = ctypes.c_uint64.from_address(place).value
        dtype = next(getattr(torch, name) for name, short in _REALS.items() if f"*{short}" == kind)
        # The interpreter asks a tensor for its address and nothing else.
        return torch.frombuffer((ctypes.c_byte * 16).from_address(address), dtype=dtype)
    if kind == "fp32":
        return ctypes.c_float.from_address(place).value
    return _INTEGERS[kind].from_address(place).value
