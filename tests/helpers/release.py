"""Build the wheel and the sdist, and use them as somebody would who has never seen the source: `make release-check`.

    python tests/helpers/release.py              # takes build and twine; downloads torch for the clean environment
    python tests/helpers/release.py --keep DIR   # leaves the archives and the environment there

In a clean environment outside of the source: torch alone is enough to import the package, the C kernels compile, the
README's code runs, the command line is there with its extra, `iternorm demo` writes its page, and every extra can be
resolved. The sdist holds every file of the repository, and the wheel that is made from it is the same.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

KERNELS = """
import torch, iternorm
layer = iternorm.IterNorm2d(64, impl="native")
layer(torch.randn(16, 64, 16, 16, requires_grad=True)).sum().backward()
print("the C kernels are compiled")
"""
README = """
import re, importlib.metadata
text = importlib.metadata.metadata("iternorm").get_payload()
blocks = re.findall(r"^```python\\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
assert len(blocks) > 3, "the long description is the README"
namespace = {}
for block in blocks:
    exec(block, namespace)
print(f"{len(blocks)} blocks of the README ran")
"""
EXTRAS = """
import importlib.metadata
print(*importlib.metadata.metadata("iternorm").get_all("Provides-Extra"))
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """What the command prints; what it says on its way out, if it fails."""
    words = [str(word) for word in command]
    print("$", *(word for word in words if "\n" not in word), flush=True)
    # Nothing of the source may be found by chance.
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | environment
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(words)[:300]}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it; their descriptions render."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    print(run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=folder).strip())
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """The sdist has every tracked file, the wheel every one of the package and nothing else."""
    tracked = set(run("git", "ls-files", cwd=ROOT).split("\n")) - {""}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    if missing := tracked - inside:
        sys.exit(f"{sdist.name} lacks {sorted(missing)[:9]}")
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if package != found:
        sys.exit(f"{wheel.name} and src differ in {sorted(package ^ found)[:9]}")
    print(f"{sdist.name} and {wheel.name} are complete")


def try_wheel(wheel: Path, folder: Path, torch: str) -> None:
    """Use the package as it was installed."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=folder)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*install, torch, wheel, cwd=folder)
    print(run(python, "-c", "import iternorm; print(iternorm.__version__, iternorm.__file__)", cwd=folder).strip())
    print(run(python, "-c", KERNELS, cwd=folder, ITERNORM_CACHE=str(folder / "cache")).strip())
    run(*install, f"{wheel}[demo]", cwd=folder)
    print(run(python, "-c", README, cwd=folder).strip().splitlines()[-1])
    print(run(scripts / "iternorm", "--version", cwd=folder).strip())
    print(run(scripts / "iternorm", "demo", cwd=folder).strip().splitlines()[-1])
    if not (folder / "iternorm-demo" / "report.html").is_file():
        sys.exit("iternorm demo wrote no report")
    for extra in run(python, "-c", EXTRAS, cwd=folder).split():
        run(*install, "--dry-run", f"{wheel}[{extra}]", cwd=folder)
    print("every extra can be resolved")


def main() -> None:
    """Build, look, install, use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch==2.13.*", help="what pip is asked for, as in the dev extra")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder outside of the source")
    options = parser.parse_args()
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="iternorm-release-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        archives = folder / "dist"
        archives.mkdir()
        sdist, wheel = build(archives)
        check_contents(sdist, wheel)
        try_wheel(wheel, folder, options.torch)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
