"""`iternorm plot` and `iternorm report`: the files that they write, and where they cannot."""

import pytest
from terminal import words


@pytest.mark.parametrize("verb", [("plot", "tiny", "--out", "file/a.png"), ("report", "--out", "file/docs")])
def test_an_output_that_cannot_be_written_is_named_with_a_remedy(invoke, tiny, tmp_path, verb):
    invoke("run", "tiny", "--only", "dbn")
    (tmp_path / "file").touch()
    result = invoke(*verb)
    assert result.exit_code == 2
    assert words(result.stderr).startswith("error: file/")
    assert "cannot be written: file is not a folder: make room, change permissions" in words(result.stderr)
    assert result.stdout == ""


def test_a_figure_that_cannot_be_written_is_named_with_a_remedy(invoke, tiny, tmp_path):
    invoke("run", "tiny", "--only", "dbn")
    (tmp_path / "results" / "tiny" / "tiny.png").mkdir()
    for verb in (("plot", "tiny"), ("report", "--out", "docs")):
        result = invoke(*verb)
        assert result.exit_code == 2
        assert "results/tiny/tiny.png cannot be written: Is a directory: make room" in words(result.stderr)


@pytest.mark.parametrize("suffix", ["png", "svg", "PDF"])
def test_a_figure_has_the_format_of_its_suffix(invoke, tiny, tmp_path, suffix):
    invoke("run", "tiny", "--only", "dbn")
    assert invoke("plot", "tiny", "--out", f"a.{suffix}").stdout == f"Written: a.{suffix}  (1 of 4)\n"
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "PDF": b"%PDF"}
    assert (tmp_path / f"a.{suffix}").read_bytes().startswith(starts[suffix])


def test_a_report_that_cannot_be_written_is_named_as_it_would_be(invoke, tiny, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "file").touch()
    result = invoke("report", "tiny", "--out", "file/docs")
    assert "error: file/docs/tiny.md cannot be written" in words(result.stderr)


def test_report_writes_two_files_and_the_figures(invoke, tiny, tmp_path):
    invoke("run", "tiny")
    result = invoke("report", "--out", "d")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Written: d/reproduction.md\nWritten: d/reproduction.html\n"
    assert "4 of 4" in (tmp_path / "d" / "reproduction.md").read_text().replace("\u00a0", " ")
    assert (tmp_path / "results" / "tiny" / "tiny.png").exists()
