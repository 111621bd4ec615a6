"""The check of the built site, and the tables that the site has. The site itself is built by `make docs`."""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[2]
check = runpy.run_path(str(ROOT / "docs" / "check_links.py"))["check"]


@pytest.fixture
def site(tmp_path):
    (tmp_path / "guide").mkdir()
    (tmp_path / "style.css").touch()
    (tmp_path / "index.html").write_text(
        '<link href="style.css"><a href="guide/">g</a><a href="#here">h</a><p id="here"><a href="https://x.org/y">x</a>'
    )
    (tmp_path / "guide" / "index.html").write_text('<img src="../style.css?v=1"><a href="../index.html#here">up</a>')
    return tmp_path


def test_links_to_pages_places_files_and_folders_are_followed(site):
    assert check(site) == []


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ('<a href="missing.html">', "missing.html is not there"),
        ('<img src="missing.png">', "missing.png is not there"),
        ('<a href="#nowhere">', "#nowhere has no such place"),
        ('<a href="guide/index.html#nowhere">', "guide/index.html#nowhere has no such place"),
    ],
)
def test_what_leads_nowhere_is_named_with_its_page(site, link, wrong):
    page = site / "index.html"
    page.write_text(page.read_text() + link)
    assert check(site) == [f"index.html: {wrong}"]


@pytest.fixture
def tables(monkeypatch):
    """docs/_ext/results.py without Sphinx, which comes with the docs extra: its tables are text."""
    for name in ("docutils", "docutils.parsers.rst", "docutils.statemachine", "sphinx.application"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, "sphinx.util.docutils", MagicMock(SphinxDirective=object))
    return runpy.run_path(str(ROOT / "docs" / "_ext" / "results.py"))


def test_a_cost_is_a_share_of_the_batch_norm_of_its_own_run(tables):
    result = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text(encoding="utf-8"))
    settings = [(setting, {row["name"]: row for row in setting["networks"]}) for setting in result["training"]]
    found = {line.split(" | ")[0]: line for line in tables["cost"]("DBN").splitlines()}
    timed = [(setting, rows["DBN d=16 kernels"]) for setting, rows in settings if "DBN d=16 kernels" in rows]
    assert timed
    for setting, row in timed:
        # Those of DBN are of an earlier run than the others.
        line = found[f"| VGG, batch {setting['batch_size']}, {setting['dtype']} {setting['layout']}, H200"]
        assert f"({row['ratio_to_batch_norm']:.2f}×)" in line
