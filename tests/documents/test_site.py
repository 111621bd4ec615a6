"""The check of the built site finds what leads nowhere. The site itself is built by `make docs`."""

import runpy
from pathlib import Path

import pytest

check = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "check_links.py"))["check"]


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
