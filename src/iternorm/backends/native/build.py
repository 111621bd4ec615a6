"""The C kernels, compiled by the machine's C compiler when they are first used, and kept for other processes.

Where there is no compiler, or it fails, `library` raises a `BuildError` that says why, and the torch path is taken. The
library is one small file in the cache, named after everything that decides what is in it. A failure is kept there too,
for a day, so that not every process tries again. `find_or_build` does the same for any `Source`.
"""

import contextlib
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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from iternorm.backends.native import cache

REALS = {torch.float32: ("float", 4), torch.float64: ("double", 8)}
# No link with OpenMP: torch has brought its own, and a second one in the process would have its own threads. What it
# lacks must show when the library is loaded, not when it is called.
_COMPILE = (
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
_COMPILE += ("-fPIC", "-std=gnu11", "-c")
_LINK = ("-shared", "-Wl,-z,now")
_FUNCTIONS = ("moments", "cross_moments", "map", "sums_workspace", "map_workspace")
_FUNCTIONS += ("newton", "newton_backward", "newton_workspace")
_SECONDS = 120
_SECONDS_REMEMBERED = 24 * 60 * 60

_lock = threading.Lock()
_libraries: "dict[torch.dtype, ctypes.CDLL | BuildError]" = {}
_unsaid: list[str] = []


def _after_fork() -> None:
    """A thread that compiled when its process forked is not in the child, which would wait for it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class BuildError(RuntimeError):
    """Why the C kernels cannot be compiled or loaded here; `is_news` where nobody has been told yet."""

    def __init__(self, reason: str, is_news: bool = True):
        super().__init__(reason)
        self.is_news = is_news


class Source(NamedTuple):
    """A file to be compiled into a library.

    Attributes:
        path: The file.
        kind: Part of the library's name.
        flags: Of the compiler.
        link: Of the linker.
        load: What makes something to use of the library's path; raises a `BuildError`.
        language: Of the file.
        variable: The environment variable that names a compiler.
        compilers: Those to try where it does not.
    """

    path: Path
    kind: str
    flags: tuple[str, ...]
    link: tuple[str, ...]
    load: Callable[[Path], Any]
    language: str = "C"
    variable: str = "CC"
    compilers: tuple[str, ...] = ("cc", "gcc", "clang")


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for fp32 or fp64, compiled at the first call; raises a `BuildError`, the same one each time."""
    found = _libraries.get(dtype)
    if found is None:
        with _lock:
            found = _libraries.get(dtype)
            if found is None:
                try:
                    found = find_or_build(_source(dtype))
                except BuildError as error:
                    found = error
                _libraries[dtype] = found
        while _unsaid:
            warnings.warn(_unsaid.pop(), stacklevel=2)
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


def is_available(dtype: torch.dtype) -> bool:
    """Whether there are kernels for fp32 or fp64 here; where this process has tried in vain, a warning says so once."""
    try:
        library(dtype)
    except BuildError as error:
        if error.is_news:
            error.is_news = False
            warnings.warn(
                f"the C kernels cannot be built, so the torch path is used: {error}; name another compiler in the "
                "environment variable CC, or set ITERNORM_NATIVE=0 to do without them",
                stacklevel=2,
            )
        return False
    return True


def _source(dtype: torch.dtype) -> Source:
    real, size = REALS[dtype]
    flags = (*_COMPILE, f"-DREAL={real}", f"-DREAL_BYTES={size}")
    return Source(Path(__file__).with_name("kernels.c"), real, flags, _LINK, _load)


def find_or_build(source: Source) -> Any:
    """What `source` is loaded to, compiled unless it is in the cache."""
    if sys.platform != "linux":
        raise BuildError(f"the C kernels are for Linux, this is {sys.platform}", is_news=False)
    compilers = _compilers(source)
    if not compilers:
        remedy = f"install {source.compilers[1]}, or name one in the environment variable {source.variable}"
        raise BuildError(f"no {source.language} compiler: {remedy}", is_news=False)
    reasons, is_news = [], False
    with _cache() as folder:
        for compiler in compilers:
            try:
                return _with_compiler(compiler, source, folder)
            except (BuildError, OSError) as error:
                reasons.append(f"{shlex.join(compiler)}: {error}")
                is_news |= getattr(error, "is_news", True)
    raise BuildError("; ".join(reasons), is_news)


def _compilers(source: Source) -> list[list[str]]:
    """The commands to try: $CC alone where it is set, or what the source has in its place."""
    named = os.environ.get(source.variable, "")
    try:
        if command := shlex.split(named):
            return [command]
    except ValueError as error:
        what = f"the environment variable {source.variable}={named!r}"
        raise BuildError(f"{what} cannot be read as a command: {error}") from None
    return [[path] for name in source.compilers if (path := shutil.which(name))]


@contextlib.contextmanager
def _cache() -> Iterator[Path | None]:
    """The folder to keep libraries in, or None: not one to trust, or it cannot be made, or a user without a home."""
    with contextlib.ExitStack() as stack:
        folder = None
        try:
            folder = stack.enter_context(cache.opened())
        except cache.Refused as error:
            _unsaid.append(
                f"the C kernels are compiled for this process only: {error}; give it to this user with mode 0700, or "
                "name another folder in the environment variable ITERNORM_CACHE"
            )
        except (OSError, RuntimeError):
            pass
        yield folder


def _with_compiler(compiler: list[str], source: Source, folder: Path | None) -> Any:
    version = _run([*compiler, "--version"])
    # With the OpenMP that torch brings, on which it depends whether the library can be loaded.
    command = repr((compiler, source.flags, source.link, torch.__version__))
    decisive = [source.path.read_bytes(), version.encode(), _cpu().encode(), command.encode()]
    key = hashlib.sha256(b"\0".join(decisive)).hexdigest()[:32]
    name, failed = f"{key}-{source.kind}.so", f"{key}-{source.kind}.failed"
    if folder is not None:
        # Not built yet; or cut short, or another user's, or of a machine with another system library.
        with contextlib.suppress(OSError, BuildError):
            cache.get(folder, name)
            return source.load(folder / name)
        with contextlib.suppress(OSError):
            reason = cache.get(folder, failed, _SECONDS_REMEMBERED).decode()
            raise BuildError(f"{reason} (delete {cache.folder() / failed} to try again)", is_news=False)
        if not os.access(folder, os.W_OK):
            folder = None
    # Without a folder to keep it in, the library stays in memory when its file is gone.
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch, cache.held(Path(scratch)) as place:
        try:
            # By its own name: the loader takes a library of the same path to be the one that it has loaded before.
            built = _build(compiler, source, place / name)
            library = source.load(built)
        except BuildError as error:
            _keep(folder, failed, str(error).encode())
            raise
        _keep(folder, name, built.read_bytes())
        return library


def _keep(folder: Path | None, name: str, content: bytes) -> None:
    if folder is not None:
        # What cannot be kept is made again by the next process.
        with contextlib.suppress(OSError):
            cache.put(folder, name, content)


def _build(compiler: list[str], source: Source, linked: Path) -> Path:
    compiled = linked.with_suffix(".o")
    # Some versions of clang know the machine's own processor as -mcpu=native on ARM, and others not at all.
    for native in (("-march=native",), ("-mcpu=native",), ()):
        try:
            _run([*compiler, *native, *source.flags, str(source.path), "-o", str(compiled)])
            break
        except BuildError as error:
            if not native or "native" not in str(error):
                raise
    _run([*compiler, str(compiled), *source.link, "-o", str(linked)])
    return linked


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"what it made cannot be loaded: {error}") from None
    for function in _FUNCTIONS:
        if not hasattr(library, function):
            raise BuildError(f"what it made lacks the function {function}")
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"failed ({done.returncode}): {' '.join(said[-3:])}")
    return done.stdout


def _cpu() -> str:
    """The processor and what it can do, which -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(wanted)})])
