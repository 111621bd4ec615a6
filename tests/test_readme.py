"""The documents tell the truth: the README's code runs, its commands exist, and files that are named exist."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/math.md", "docs/reproduction.md"]
DOCUMENTS += ["docs/using.md", "docs/tools.md", "docs/decisions/2026-11-16-layers-are-batchnorms.md"]
DOCUMENTS += ["benchmarks/README.md"]


def text_of(name):
    return (ROOT / name).read_text()


def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", text_of(name), re.DOTALL)


def test_the_readmes_code_runs():
    code = blocks("README.md", "python")
    assert len(code) >= 3
    namespace = {}
    for block in code:
        exec(block, namespace)


def commands(name):
    for block in blocks(name, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_commands_exist(name):
    typer = pytest.importorskip("typer")
    from iternorm.cli import app

    targets = re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE)
    verbs = typer.main.get_command(app).commands
    for words in commands(name):
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "iternorm":
            assert words[1] in verbs
        else:
            assert words[:2] == ["pip", "install"], words


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text_of(name)):
        assert ((ROOT / name).parent / target).exists(), target


def test_the_house_of_the_design_is_the_house_that_stands():
    house = text_of("DESIGN.md").partition("## The house")[2].partition("## Contracts")[0]
    package = ROOT / "src" / "iternorm"
    named = set(re.findall(r"^      (\w+(?:\.py|/)) ", house, re.MULTILINE))
    standing = {p.name if p.is_file() else f"{p.name}/" for p in package.iterdir()}
    standing = {name for name in standing if name.endswith((".py", "/"))} - {"__main__.py", "__pycache__/"}
    assert named == standing, "each file of the package has one line in The house of DESIGN.md"


def test_equations_are_numbered_in_order_and_cited_ones_exist():
    numbers = [int(n) for n in re.findall(r"\\tag\{(\d+)\}", text_of("docs/math.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
    # "the paper's Eq. 2" is the paper's; every other number is ours.
    pattern = re.compile(r"(the paper's )?\bEq\. (\d+)(?:-(\d+))?")
    for path in (ROOT / "src").rglob("*.py"):
        for paper, first, last in pattern.findall(path.read_text()):
            if not paper:
                assert int(first) in numbers, path
                assert int(last or first) in numbers, path
