"""`benchmarks/trees.py`: two trees in turns, without a GPU."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trees.py"


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def test_a_folder_without_the_package_is_refused(tmp_path):
    found = run("--old", tmp_path, "--new", SCRIPT.parents[1] / "src")
    assert found.returncode == 2
    assert f"--old must be a folder with the package iternorm in it, such as src; got {tmp_path}" in found.stderr


def test_a_pattern_that_suits_no_row_is_refused():
    source = SCRIPT.parents[1] / "src"
    found = run("--old", source, "--new", source, "--only", "float8")
    assert found.returncode == 2
    assert "--only 'float8' suits no row; their names are such as '64x64x32x32 float32 NCHW" in found.stderr


def test_an_error_of_a_tree_ends_the_run(tmp_path):
    package = tmp_path / "iternorm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not today')\n")
    found = run("--old", tmp_path, "--new", tmp_path, "--only", "256x512x4x4 bfloat16 NCHW", "--processes", 2)
    assert found.returncode == 1
    assert "not today" in found.stderr
    assert "A process that timed rows ended with 1" in found.stderr
