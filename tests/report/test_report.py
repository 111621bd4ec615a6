"""Pages, tables and figures of the reports."""

import errno
import os
import re

import pytest
from page_checks import assert_self_contained

from iternorm.report.files import write_text_atomically
from iternorm.report.html import figure_svg, html_page, html_table


def a_figure(values=(1, 3, 2), **kwargs):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 3))
    axes = figure.add_subplot()
    axes.plot(values, marker="o", label="a <b>", **kwargs)
    axes.set_yscale("log")
    axes.legend()
    return figure


def test_figure_is_the_same_text_every_time():
    assert figure_svg(a_figure()) == figure_svg(a_figure())


def test_figures_on_one_page_share_no_id():
    first, second = figure_svg(a_figure()), figure_svg(a_figure((3, 1, 2)))
    ids = [set(re.findall(r'\sid="([^"]+)"', text)) for text in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert_self_contained(html_page("t", [("h", first + second)]))


def test_figure_has_no_style_element_and_carries_its_label():
    text = figure_svg(a_figure(), label='loss "and" error')
    assert "<style" not in text
    assert 'aria-label="loss &quot;and&quot; error"' in text


def test_table_is_escaped_and_aligns_numbers():
    html = html_table(["name", "ms"], [["<b>", "1.5"], ["&", "–"]], caption="a < b")
    assert "&lt;b&gt;" in html
    assert "<caption>a &lt; b</caption>" in html
    assert '<th scope="col" class="number">ms</th>' in html
    assert '<th scope="col">name</th>' in html


@pytest.mark.parametrize(
    ("cells", "are_numbers"),
    [
        (["7.42 ± 0.13 %", "7.46 %", "not run"], True),
        (["0.46 ± 0.09 points", "+1.93 ± 0.17"], True),
        (["7.42 ± 0.13 %", "7.46 % or so"], False),
    ],
)
def test_numbers_with_errors_are_numbers(cells, are_numbers):
    html = html_table(["error"], [[cell] for cell in cells])
    assert (html.count('class="number"') == len(cells) + 1) is are_numbers


def test_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match="row 1 has 1 cells for 2 columns"):
        html_table(["a", "b"], [[1, 2], [3]])


def test_page_is_balanced_and_escapes_titles():
    page = html_page("a & b", [("x < y", "<p>kept</p>")], subtitle="<i>")
    assert_self_contained(page)
    assert "<title>a &amp; b</title>" in page
    assert "<h2>x &lt; y</h2>" in page
    assert "<p>kept</p>" in page
    assert "&lt;i&gt;" in page


def test_write_makes_folders_and_replaces(tmp_path):
    path = tmp_path / "new" / "page.html"
    assert write_text_atomically(path, "one") == path
    write_text_atomically(path, "zwei ×")
    assert path.read_text(encoding="utf-8") == "zwei ×"
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=f"^{re.escape(str(path))} cannot be written: No space left on device: make room"):
        write_text_atomically(path, "text")
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "page.html"
    write_text_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
