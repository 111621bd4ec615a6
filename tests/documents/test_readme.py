"""The documents tell the truth: the README's code runs, its commands exist, and files that are named exist."""

import json
import re
import runpy
import shlex
import warnings
from pathlib import Path

import pytest

from iternorm import SmallBatchWarning
from iternorm.bench.gpu import put_between_markers

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
DOCUMENTS += sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "methods/*.md", "api/*.md", "decisions/*.md")
    for path in (ROOT / "docs").glob(pattern)
)


def text_of(name):
    return (ROOT / name).read_text()


def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", text_of(name), re.DOTALL)


def test_the_readmes_code_runs():
    code = blocks("README.md", "python")
    assert len(code) >= 3
    namespace = {}
    with warnings.catch_warnings():
        # The one about small batches too: an example shows how it should be done.
        warnings.simplefilter("error", SmallBatchWarning)
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
        elif words[0] == "iternorm" and words[1] != "--install-completion":
            # Raises where an argument or an option is missing or unknown.
            verbs[words[1]].make_context(words[1], words[2:])
        elif words[0] != "iternorm":
            assert words[:2] == ["pip", "install"], words


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text_of(name)):
        # The site's build writes the gallery's figures; those of plot_1_points.py are numbered.
        script = re.sub(r"auto_gallery/images/sphx_glr_(plot_\w+?)_\d{3}\.png$", r"gallery/\1.py", target)
        assert ((ROOT / name).parent / script).exists(), target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_have_a_text(name):
    """The site fills in a page's title; a reader of the repository sees nothing there."""
    assert re.findall(r"(?<!!)\[\]\([^)]*\)", text_of(name)) == []


def entries(folder):
    """What a map of the folder should name: its modules, and its folders with a slash."""
    found = {p.name if p.is_file() else f"{p.name}/" for p in folder.iterdir()}
    return {name for name in found if name.endswith((".py", "/"))} - {"__main__.py", "__pycache__/"}


def test_the_house_of_the_design_is_the_house_that_stands():
    house = text_of("DESIGN.md").partition("## The house")[2].partition("## Contracts")[0]
    package = ROOT / "src" / "iternorm"
    # A room stands six spaces in, a room inside it eight, each with a line of its own.
    rooms, inner, room = [], {}, ""
    for indent, name in re.findall(r"^( {6}| {8})(\w+(?:\.py|/)) ", house, re.MULTILINE):
        if len(indent) == 6:
            room = name
            rooms.append(name)
        else:
            inner.setdefault(room, []).append(name)
    assert sorted(rooms) == sorted(entries(package)), "each room of the package has one line in The house of DESIGN.md"
    assert set(inner) == {"backends/", "experiments/"}
    for room, names in inner.items():
        folders = {name for name in entries(package / room) if name.endswith("/")}
        assert sorted(names) == sorted(folders), f"each folder of {room} has one line in The house of DESIGN.md"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_documents_name_exist(name):
    """A path in backticks leads from the repository, the package or the document; a lone module is somewhere in it."""
    text = text_of(name)
    places = (ROOT, ROOT / "src" / "iternorm", (ROOT / name).parent)
    for path in re.findall(r"`((?:[\w.-]+/)+(?:[\w-]+\.\w+)?)`", text):
        # The first is made by a command.
        assert path.startswith("iternorm-demo/") or any((place / path).exists() for place in places), path
    known = {
        path.name for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.*")
    }
    # nets.py is the reader's own.
    for module in set(re.findall(r"`(\w+\.(?:py|c))`", text)) - {"nets.py"}:
        assert module in known, module


def test_files_in_the_drawing_of_a_step_exist():
    drawing = text_of("DESIGN.md").partition("## A training step")[2].partition("The backward enters")[0]
    files = re.findall(r"[\w/]+\.py", drawing)
    assert len(files) >= 6
    package = ROOT / "src" / "iternorm"
    for name in files:
        # A name alone is a neighbour of the one before, in whitening/.
        assert (package / name).is_file() or (package / "whitening" / name).is_file(), name


def test_every_decision_is_a_dated_record_in_the_index():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+)\]\((\S+\.md)\) \| (\d{4}-\d\d-\d\d) \|$", index, re.MULTILINE)
    assert sorted(name for _, name, _ in rows) == sorted(p.name for p in folder.glob("*.md") if p.name != "README.md")
    for title, name, date in rows:
        text = (folder / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n\n{date}"), name
        parts = re.findall(r"^\*\*(Context|Decision|Consequences)\.\*\*", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequences"], name


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


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("networks-h200-short", "README.md"),
        ("spectrum", "docs/choosing.md"),
    ],
)
def test_tables_are_made_from_the_committed_results(name, document):
    markdown = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))["markdown"]
    text, short = text_of(document), name.endswith("-short")
    file = name.removesuffix("-short")
    assert put_between_markers(text, name, markdown(result(file), short=short)) == text, (
        f"run: PYTHONPATH=src python benchmarks/table.py benchmarks/results/{file}.json --write {document}"
        + " --short" * short
    )


def spectra(found):
    return {row["output of"]: row for row in found["spectrum"]}


def test_what_the_page_says_of_five_steps_is_what_was_measured():
    rows = spectra(result("spectrum"))
    five, nine = rows["IterNorm T=5"], rows["IterNorm T=9"]
    text = " ".join(text_of("docs/methods/iternorm.md").split())
    assert f"range from {five['smallest']:.3f} to {five['largest']:.2f}, with median {five['median']:.2f}" in text
    assert f"bring the median to {nine['median']:.2f}, and the smallest to {nine['smallest']:.2f}" in text


def test_what_was_measured_of_five_steps_holds():
    measured = spectra(runpy.run_path(str(ROOT / "benchmarks" / "spectrum.py"))["measure"]())
    for name, row in spectra(result("spectrum")).items():
        # Another machine may draw other random numbers in the last digits.
        assert list(measured[name].values())[1:] == pytest.approx(list(row.values())[1:], rel=0.02, abs=1e-4), name
