"""The C kernels, compiled by the machine's C compiler when they are first used, and kept for other processes.

Where there is no compiler, or it fails, `library` raises a `BuildError` that says why, and the torch path is taken. The
library is one small file in `cache_folder()`, named after everything that decides what is in it.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

REALS = {torch.float32: ("float", 4), torch.float64: ("double", 8)}
# No link with OpenMP: torch has brought its own, and a second one in the process would have its own threads. What it
# lacks must show when the library is loaded, not when it is called.
_COMPILE = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
_COMPILE += ("-fPIC", "-fopenmp", "-std=gnu11", "-c")
_LINK = ("-shared", "-Wl,-z,now")
_SECONDS = 120

_lock = threading.Lock()
_libraries: "dict[torch.dtype, ctypes.CDLL | BuildError]" = {}


class BuildError(RuntimeError):
    """Why the C kernels cannot be compiled or loaded here."""


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for fp32 or fp64, compiled at the first call; raises a `BuildError`, the same one each time."""
    found = _libraries.get(dtype)
    if found is None:
        with _lock:
            found = _libraries.get(dtype)
            if found is None:
                try:
                    found = _find_or_build(dtype)
                except BuildError as error:
                    found = error
                _libraries[dtype] = found
    if isinstance(found, BuildError):
        raise found
    return found


def failure(dtype: torch.dtype) -> str | None:
    """Why there are no kernels for fp32 or fp64 here, or None; compiles them at the first call."""
    try:
        library(dtype)
    except BuildError as error:
        return str(error)
    return None


def cache_folder() -> Path:
    """`ITERNORM_CACHE`, else `iternorm` in the user's cache folder."""
    if named := os.environ.get("ITERNORM_CACHE"):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "iternorm"


def _find_or_build(dtype: torch.dtype) -> ctypes.CDLL:
    if sys.platform != "linux":
        raise BuildError(f"the C kernels are for Linux, this is {sys.platform}")
    reasons = []
    for compiler in _compilers():
        try:
            return _with_compiler(compiler, dtype)
        except (BuildError, OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{shlex.join(compiler)}: {error}")
    raise BuildError("; ".join(reasons) or "no C compiler: install gcc, or name one in the environment variable CC")


def _compilers() -> list[list[str]]:
    """The commands to try: $CC alone where it is set."""
    if named := shlex.split(os.environ.get("CC", "")):
        return [named]
    return [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]


def _with_compiler(compiler: list[str], dtype: torch.dtype) -> ctypes.CDLL:
    source = Path(__file__).with_name("kernels.c")
    real, size = REALS[dtype]
    flags = (*_COMPILE, f"-DREAL={real}", f"-DREAL_BYTES={size}")
    version = _run([*compiler, "--version"])
    decisive = [source.read_bytes(), version.encode(), _cpu().encode(), repr((compiler, flags, _LINK)).encode()]
    key = hashlib.sha256(b"\0".join(decisive)).hexdigest()[:32]
    name = f"{key}-{real}.so"
    try:
        return _load(cache_folder() / name)
    except (OSError, RuntimeError):
        # Not built yet; or cut short, or of a machine with another system library; or a user without a home.
        pass
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
            built = _build(compiler, flags, source, Path(scratch))
            library = _load(built)
            # Whole, and seen to load, before it has its name; two processes may do this at once.
            built.replace(folder / name)
            return library
    except BuildError:
        raise
    except (OSError, RuntimeError):
        # A cache that cannot be written: the library stays in memory when its file is gone.
        with tempfile.TemporaryDirectory(prefix="iternorm-") as scratch:
            return _load(_build(compiler, flags, source, Path(scratch)))


def _build(compiler: list[str], flags: tuple[str, ...], source: Path, scratch: Path) -> Path:
    compiled, linked = scratch / "kernels.o", scratch / "kernels.so"
    _run([*compiler, *flags, str(source), "-o", str(compiled)])
    _run([*compiler, *_LINK, str(compiled), "-o", str(linked)])
    return linked


def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"{shlex.join(command)} failed ({done.returncode}): {' '.join(said[-3:])}")
    return done.stdout


def _cpu() -> str:
    """The processor and what it can do, which -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(wanted)})])
