"""The arrows of the house point one way, and importing the package is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import iternorm

PACKAGE = Path(iternorm.__file__).parent

# Each room may import rooms that stand before it, and rooms on its own line.
ORDER = [
    ["groups", "modes", "running", "collective", "replace"],
    ["reference", "plain", "native", "solvers", "kernels", "checkpoints", "flops", "batchnorm"],
    ["ops"],
    ["fused"],
    ["functional"],
    ["modules"],
    ["sync", "lazy", "features", "dataflow"],
    ["followed", "fold_layers"],
    ["convert", "calibrate", "fold", "analysis", "provenance", "threads"],
    ["experiments", "bench"],
    ["cli"],
    ["__main__"],
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
LIGHT = {"torch", "iternorm"}
# Where each heavy module may be imported, and then inside a function unless the room is named as itself.
HEAVY = {"numpy", "triton", "typer", "rich", "matplotlib", "sklearn", "onnx", "transformers", "accelerate", "PIL"}
HEAVY |= {"safetensors", "pooch", "tensorboard", "ray"}


def sources():
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path):
    """The rooms of the package that a file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("iternorm.")}
    return {room for room in rooms if room in RANK or (PACKAGE / f"{room}.py").exists() or (PACKAGE / room).is_dir()}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_one_way(path):
    room = room_of(path)
    assert room in RANK, f"{room} has no place in the house: add it to ORDER and to DESIGN.md"
    for other in imported_rooms(path):
        assert RANK[other] <= RANK[room], f"{room} imports {other}"


def test_the_fast_path_does_not_import_the_reference():
    for room in ("groups", "plain", "native", "solvers", "ops", "fused", "kernels"):
        for path in sources():
            if room_of(path) == room:
                assert "reference" not in imported_rooms(path)


def test_only_kernels_import_triton():
    for path in sources():
        tree = ast.parse(path.read_text())
        names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
        if any(name.split(".")[0] == "triton" for name in names):
            assert room_of(path) == "kernels", path


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
