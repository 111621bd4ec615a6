"""What a result was computed on: the machine, the versions and the commit; nothing that names a person or a host."""

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch


def provenance(device: str = "cpu") -> dict:
    """Collect what a reader needs to repeat or to doubt a measurement.

    Args:
        device: The device the computation ran on, as `torch.device` reads it. A CUDA device adds the GPU.

    Returns:
        A dictionary that `json.dumps` takes: `machine`, `os`, `python`, `torch`, `iternorm`, `commit` (what the
        environment variable ``ITERNORM_COMMIT`` says; otherwise that of the checkout, with ``-dirty`` where tracked
        files differ from it, or None) and `time` (UTC).

    Raises:
        ValueError: `device` is a CUDA device and this machine has none.

    Example:
        >>> sorted(provenance())
        ['commit', 'device', 'iternorm', 'machine', 'os', 'python', 'time', 'torch']
    """
    from iternorm import __version__

    target = torch.device(device)
    machine = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
    }
    libraries: dict[str, str | None] = {"version": str(torch.__version__), "triton": _installed_version("triton")}
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={device!r} needs a CUDA device and torch sees none: use device='cpu'")
        properties = torch.cuda.get_device_properties(target)
        machine["gpu"] = properties.name
        machine["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        libraries["cuda"] = torch.version.cuda
        cudnn = torch.backends.cudnn.version()
        libraries["cudnn"] = None if cudnn is None else str(cudnn)
    return {
        "device": str(target),
        "machine": machine,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": libraries,
        "iternorm": __version__,
        "commit": os.environ.get("ITERNORM_COMMIT") or _source_commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _source_commit() -> str | None:
    source = Path(__file__).resolve().parent
    # An installed package can lie inside somebody else's checkout, a virtual environment for one: only a tree that
    # tracks this very file is the project's.
    if _git(source, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git(source, "rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}-dirty" if _git(source, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None
