"""The core's tests with other versions of Python and torch, each in an environment of its own: `make test-versions`.

    python tests/helpers/versions.py python3.10=2.6 python3.12=newest
    python tests/helpers/versions.py --here      # the interpreter that runs this, with the torch that it has

An environment is made once, in .versions, with nothing but torch, pytest and hypothesis. With a CUDA build of torch it
takes 5 to 7 GB. To get CPU builds, name PyTorch's index of them in the environment variable PIP_EXTRA_INDEX_URL.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What needs more than torch, or only reads the repository.
OTHERS = ("experiments", "analysis", "networks", "bench", "report", "backends/triton", "cli", "documents", "helpers")
OTHERS += ("linalg/test_kernels*", "whitener/test_kernels*", "layers/test_per_sample_kernels*")
# What torch 2.6 says of itself: numpy is no dependency of torch, and is not installed.
IGNORED = ("ignore:Failed to initialize NumPy", "ignore:Skipping serialization of skipfiles")
# What torch.compile says of the first release of Python 3.13.
IGNORED += ("ignore:Guards may run slower on Python 3.13.0",)
COUNTED = ("passed", "failed", "error", "skipped")


def environment(python: str, torch: str) -> Path:
    """The interpreter of an environment with these versions, made where it is not there yet."""
    folder = ROOT / ".versions" / f"{Path(python).name}-torch{torch}"
    inside, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        if shutil.which(python) is None:
            sys.exit(f"{python} is not on the PATH; install it, or choose others: make test-versions VERSIONS=...")
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        wanted = "torch" if torch == "newest" else f"torch=={torch}.*"
        install = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        subprocess.run([*install, wanted, "pytest>=8", "hypothesis>=6.100"], check=True)
        made.touch()
    return inside


def run(python: Path, arguments: list[str]) -> dict[str, int]:
    """How many tests passed and how many did not."""
    ignored = [f"--ignore-glob={ROOT}/tests/{name}" for name in OTHERS]
    ignored += [f"-W{filter}" for filter in IGNORED]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *ignored, *arguments, "tests"]
    # Triton's interpreter needs numpy; the kernels are not among these tests.
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "0"}
    if python != Path(sys.executable):
        variables["ITERNORM_CACHE"] = str(python.parent.parent / "cache")
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+?)s?\b(?=[, ])", lines[-1] if lines else "")}
    if process.returncode != 0 and not counts.get("failed"):
        counts["error"] = max(counts.get("error", 0), 1)
    return counts


def versions(python: Path) -> str:
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    return subprocess.check_output([str(python), "-W", "ignore", "-c", code], text=True).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="The tests of the core with other versions of Python and torch.")
    parser.add_argument("pairs", nargs="*", metavar="PYTHON=TORCH", help='an interpreter, and 2.6 or "newest"')
    parser.add_argument("--here", action="store_true", help="this interpreter, as it is")
    # What is not known, such as `-k` and its text, goes to pytest.
    options, arguments = parser.parse_known_args()
    if not options.pairs and not options.here:
        parser.error("name an interpreter and a torch, python3.10=2.6, or --here")
    rows = []
    for pair in [*options.pairs, *["here"] * options.here]:
        name, _, torch = pair.partition("=")
        python = Path(sys.executable) if pair == "here" else environment(name, torch)
        begun = time.monotonic()
        counts = run(python, arguments)
        seconds = f"{time.monotonic() - begun:.0f}"
        rows.append((*versions(python).split(), *(str(counts.get(word, 0)) for word in COUNTED), seconds))
    print()
    for row in (("Python", "torch", *COUNTED, "seconds"), *rows):
        print("".join(cell.ljust(14) for cell in row))
    return any(row[3] != "0" or row[4] != "0" or row[2] == "0" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
