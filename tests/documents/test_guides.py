"""Every code block of the site runs, and prints what the page says it prints."""

import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import iternorm
from iternorm import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDE = DOCS / "choosing.md"
PAGES = sorted(str(path.relative_to(DOCS)) for path in [*DOCS.glob("*.md"), *DOCS.glob("methods/*.md")])


def blocks_of(path: Path, language: str) -> list[str]:
    """The page's blocks, those in a list without its indentation."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in found]


def run_page(name: str) -> dict[str, Any]:
    """What the page's code leaves behind."""
    namespace: dict[str, Any] = {}
    with warnings.catch_warnings():
        # The one about small batches too: an example shows how it should be done.
        warnings.simplefilter("error", iternorm.SmallBatchWarning)
        for block in blocks_of(DOCS / name, "python"):
            exec(compile(block, name, "exec"), namespace)
    return namespace


# choosing.md has a file of its own in its first block, and the others are looked at more closely.
CLOSELY = ("choosing.md", "whitener.md", "tools.md", "deploying.md")


@pytest.mark.parametrize("name", [page for page in PAGES if page not in CLOSELY])
def test_python_of_the_page_runs(name):
    run_page(name)


def test_python_of_whitener_whitens():
    found = run_page("whitener.md")
    assert found["white"].shape == (2000, 32)
    for piece in found["z"]:
        torch.testing.assert_close(piece.T.cov(), torch.eye(64), atol=1e-3, rtol=0)


def test_python_of_tools_counts_and_synchronizes(capsys):
    found = run_page("tools.md")
    assert int(capsys.readouterr().out) > 0
    assert isinstance(found["synchronized"][1], iternorm.SyncIterNorm)
    layer: Any = iternorm.IterNorm2d(16, group_size=4).eval()
    # What thop puts on every layer.
    layer.total_ops = 0
    found["for_thop"](layer, (torch.randn(2, 16, 3, 3),), None)
    assert layer.total_ops == 2 * 16 * 9 * 4


def test_deploying_says_where_a_layer_went(capsys):
    run_page("deploying.md")
    assert "previous" in capsys.readouterr().out


@pytest.mark.parametrize("name", PAGES)
def test_commands_of_the_page_exist(name):
    verbs: Any = typer.main.get_command(cli.app)
    for block in blocks_of(DOCS / name, "sh"):
        for line in re.sub(r"\s&&\s", "\n", block).splitlines():
            words = [word for word in shlex.split(line, comments=True) if not re.match(r"\w+=", word)]
            if not words:
                continue
            if words[0] == "iternorm":
                # Raises where an argument or an option is missing or unknown.
                verbs.commands[words[1]].make_context(words[1], words[2:])
            elif words[0] == "python":
                assert (ROOT / words[1]).is_file(), words
            else:
                assert words[:2] == ["pip", "install"], words


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """The blocks of choosing.md by language, in a folder that holds its nets.py."""
    python = blocks_of(GUIDE, "python")
    (tmp_path / "nets.py").write_text(python[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # A file of that name may have been imported from another folder before.
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return {"python": python, "console": blocks_of(GUIDE, "console")}


def test_python_of_choosing_runs(blocks, tmp_path, capsys):
    exec(compile(blocks["python"][1], "choosing.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "BN: " in printed
    assert "DBN-16: " in printed
    assert (tmp_path / "analysis.json").exists()


def test_command_of_choosing_prints_what_the_guide_shows(blocks, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command, *shown = blocks["console"][0].splitlines()
    result = CliRunner().invoke(cli.app, command.split()[2:])
    assert result.exit_code == 0, result.output
    printed = result.stdout.splitlines()
    assert len(printed) == len(shown)
    for line, expected in zip(printed, shown, strict=True):
        # Another machine may differ in the last digit.
        for word, known in zip(line.split(), expected.split(), strict=True):
            if re.fullmatch(r"\d[\d.]*", known):
                assert float(word) == pytest.approx(float(known), rel=0.05)
            else:
                assert word == known


def test_every_public_name_is_in_the_reference():
    reference = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.rst"))
    for name in iternorm.__all__:
        assert re.search(rf"^\.\. auto(class|function|module):: (iternorm\.)?{name}$", reference, re.MULTILINE), name
