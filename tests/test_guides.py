"""The guides' code runs, and prints what they say it prints."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from iternorm import cli

GUIDE = Path(__file__).parents[1] / "docs" / "choosing.md"


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """The guide's code blocks by language, in a folder that holds its nets.py."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    python = [code for language, code in found if language == "python"]
    (tmp_path / "nets.py").write_text(python[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # A file of that name may have been imported from another folder before.
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return {"python": python, "console": [code for language, code in found if language == "console"]}


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


def test_every_image_and_page_of_the_guide_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text(encoding="utf-8")):
        assert (GUIDE.parent / target).is_file(), target
