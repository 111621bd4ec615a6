"""The C++ functions of `step.cpp`, compiled in the background when they are first wanted, and kept for other processes.

A layer goes on in Python until they are there, and for good where they cannot be compiled: the kernels are the same.
"""

import functools
import importlib.machinery
import importlib.util
import os
import sysconfig
import threading
from pathlib import Path
from typing import Any

import torch
import triton.backends.nvidia

from iternorm.backends.native import build
from iternorm.backends.triton.runtime import INTERPRETED

_COMPILE = ("-O2", "-std=c++20", "-fvisibility=hidden", "-fPIC", "-w", "-c")
# Libraries that torch has loaded into this process already.
_LINK = ("-shared", "-Wl,-z,now", "-lc10", "-ltorch_cpu", "-ltorch_python")


def functions() -> Any:
    """The module with `prepare` and `whiten`, or None where it is not compiled yet, or cannot be."""
    if _thread is None:
        _start()
    return _found


def wait() -> Any:
    """`functions` when the compiler is done; raises a `BuildError` that says why there are none."""
    _start().join()
    if _found is None:
        raise build.BuildError(_failure or "ITERNORM_NATIVE=0 turns it off, and Triton's interpreter has no use for it")
    return _found


_found: Any = None
_failure: str | None = None
_thread: threading.Thread | None = None
_lock = threading.Lock()


def _after_fork() -> None:
    """The thread that compiled is not in a forked child, which begins anew."""
    global _thread, _lock
    _lock = threading.Lock()
    if _found is None and _failure is None:
        _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _start() -> threading.Thread:
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_compile, name="iternorm-compiler", daemon=True)
            _thread.start()
    return _thread


def _compile() -> None:
    global _found, _failure
    if os.environ.get("ITERNORM_NATIVE") == "0" or INTERPRETED:
        return
    try:
        _found = build.find_or_build(source())
    except build.BuildError as error:
        _failure = str(error)


@functools.cache
def source(path: Path = Path(__file__).with_name("step.cpp")) -> build.Source:  # noqa: B008
    """A file of C++ as it is compiled, for the Python, torch and Triton that run: the module iternorm_ and its name."""
    home = Path(torch.__file__).parent
    # Triton brings CUDA's headers; a CPU build of torch has none.
    places = [home / "include", Path(triton.backends.nvidia.__file__).parent / "include"]
    includes = [*map(str, places), sysconfig.get_path("include")]
    flags = (*_COMPILE, *(word for place in includes for word in ("-isystem", place)))
    if torch.distributed.is_available():
        flags += ("-DWITH_PROCESS_GROUPS",)
    return build.Source(
        path,
        path.stem,
        flags,
        (*_LINK, f"-L{home / 'lib'}"),
        functools.partial(_load, f"iternorm_{path.stem}"),
        language="C++",
        variable="CXX",
        compilers=("c++", "g++", "clang++"),
    )


def _load(name: str, path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise build.BuildError(f"what it made cannot be loaded: {error}") from None
    return module
