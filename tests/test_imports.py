"""The arrows of the house point one way, and importing the package is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import iternorm

PACKAGE = Path(iternorm.__file__).parent

# A room may import the rooms of earlier lines, itself, and no other room of its own line. A name with a dot is a part
# of a room that has a place of its own.
ORDER = [
    ["whitening.groups", "whitening.modes"],
    ["solvers"],
    ["backends", "reference"],
    ["whitening"],
    ["functional", "linalg", "whitener"],
    ["layers"],
    ["models"],
    ["report"],
    ["analysis"],
    ["networks"],
    ["timing"],
    ["bench", "experiments.jobs"],
    ["experiments.recipe"],
    ["experiments.data"],
    ["experiments.training", "experiments.evidence"],
    ["experiments.families", "experiments.demo"],
    ["experiments.paper"],
    ["experiments"],
    ["cli"],
    ["__main__"],
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
# Who may make pages.
PAGES = {"report", "analysis", "experiments.evidence", "experiments.demo", "cli"}
LIGHT = {"torch", "iternorm"}
# Where each heavy module may be imported, and then inside a function unless the room is named as itself.
HEAVY = {"numpy", "triton", "typer", "rich", "matplotlib", "sklearn", "onnx", "transformers", "accelerate", "PIL"}
HEAVY |= {"safetensors", "pooch", "tensorboard", "ray"}


def sources():
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    """The longest name in ORDER that this module is, or is inside of."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in RANK), None)


def imported_modules(path):
    """The modules of the package that a file imports, anywhere in it, absolutely or relatively."""
    package = ["iternorm", *path.relative_to(PACKAGE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("iternorm.") for name in names if name.startswith("iternorm.")}
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_one_way(path):
    room = room_of(module_of(path))
    assert room is not None, f"{path} has no place in the house: add its room to ORDER and to DESIGN.md"
    for module in imported_modules(path):
        other = room_of(module)
        if other is None or other == room:
            # A public name of the package, or a neighbour.
            continue
        assert RANK[other] < RANK[room], f"{module_of(path)} imports {module}"


def test_a_relative_import_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    path = tmp_path / "experiments" / "jobs" / "sweep.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .locks import claim\nfrom ..demo import page\nfrom ... import bench\n")
    assert imported_modules(path) == {"experiments.jobs.locks.claim", "experiments.demo.page", "bench"}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_benchmarks_and_experiments_stay_apart_and_only_reports_make_pages(path):
    room = module_of(path).split(".")[0]
    others = {module.split(".")[0] for module in imported_modules(path)}
    assert not (room == "bench" and "experiments" in others)
    assert not (room == "experiments" and "bench" in others)
    if any(module.startswith("report.html") for module in imported_modules(path)):
        assert room_of(module_of(path)) in PAGES


def test_the_fast_path_does_not_import_the_reference():
    for path in sources():
        module = module_of(path)
        # The reference as a backend of its own is no fast path.
        if module.split(".")[0] in ("backends", "whitening", "solvers") and module != "whitening.by_reference":
            assert "reference" not in {name.split(".")[0] for name in imported_modules(path)}, path


def test_only_its_backend_imports_triton():
    for path in sources():
        tree = ast.parse(path.read_text())
        names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level]
        names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
        if any(name.split(".")[0] == "triton" for name in names):
            assert module_of(path).startswith("backends.triton"), path


def test_no_folder_is_crowded():
    for folder in [PACKAGE, *(p for p in PACKAGE.rglob("*") if p.is_dir() and p.name != "__pycache__")]:
        entries = [
            p for p in folder.iterdir() if p.name not in ("__init__.py", "__main__.py", "__pycache__", "py.typed")
        ]
        # The paper has fourteen figures and tables, a file each.
        # The package has a door for each kind of user: layers, matrix roots, a whitener, models, analysis.
        most = 16 if folder.name == "paper" or folder == PACKAGE else 14
        assert len(entries) <= most, folder


def test_importing_the_package_imports_torch_and_nothing_heavier():
    code = (
        "import sys, torch; before = set(sys.modules); import iternorm;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) <= LIGHT
    # Parts of torch that cost time of their own must not be pulled in by us.
    code = (
        "import sys, torch; before = set(sys.modules); import iternorm;"
        "new = set(sys.modules) - before; print(*sorted(m for m in new if m.startswith('torch._inductor')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not result.stdout.split()


def test_the_package_works_where_heavy_modules_are_missing():
    code = (
        "import sys\n"
        f"for name in {sorted(HEAVY)!r}: sys.modules[name] = None\n"
        "import torch, iternorm\n"
        "layer = iternorm.IterNorm2d(8)\n"
        "layer(torch.randn(4, 8, 2, 2)).sum().backward()\n"
        "assert layer.eval()(torch.randn(4, 8, 2, 2)).isfinite().all()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_every_public_name_exists_and_is_listed_once():
    assert len(set(iternorm.__all__)) == len(iternorm.__all__)
    for name in iternorm.__all__:
        assert hasattr(iternorm, name)
