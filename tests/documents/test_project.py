"""What is said in several files of the project is the same in all of them."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import yaml

import iternorm

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_is_the_installed_ones():
    assert iternorm.__version__ == importlib.metadata.version("iternorm")


def test_a_tree_that_is_not_installed_has_a_version():
    code = "import importlib.metadata as m; m.version = lambda n: (_ for _ in ()).throw(m.PackageNotFoundError(n)); "
    code += "import iternorm; print(iternorm.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0+unknown"


def test_pre_commit_and_the_dev_extra_have_the_same_ruff():
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (revision,) = (entry["rev"] for entry in repositories if entry["repo"].endswith("ruff-pre-commit"))
    assert f'"ruff=={revision.removeprefix("v")}"' in PROJECT


def test_the_matrix_begins_with_the_least_versions_that_are_supported():
    jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["versions"]["strategy"]["matrix"]
    assert f'requires-python = ">={matrix["python"][0]}"' in PROJECT
    assert f'"torch>={matrix["torch"][0]}"' in PROJECT
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert matrix["python"] == classified


def test_workflows_run_what_exists():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for path in WORKFLOWS.glob("*.yml"):
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            for step in job["steps"]:
                for words in map(str.split, step.get("run", "").splitlines()):
                    if words[0] == "make":
                        assert words[1] in targets
                    elif words[0] == "python" and words[1].endswith(".py"):
                        assert (ROOT / words[1]).is_file(), words[1]
                    elif words[0].startswith(".ci/"):
                        assert (ROOT / words[0]).is_file(), words[0]
