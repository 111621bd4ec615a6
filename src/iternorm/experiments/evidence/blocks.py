"""The blocks of a report, which is written twice: as Markdown and as a page.

A block is a paragraph, a table, a command or a figure. A table's cells are plain text, links to sections, or verdicts,
which a page shows in colour.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from iternorm.experiments.jobs.findings import Verdict
from iternorm.report.html import figure_svg, html_page, html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
.verdict { display: inline-block; margin: 0 0.2rem 0.2rem 0; padding: 0 0.5em; border-radius: 0.7em; }
.holds { color: #11602a; background: #dff3e4; }
.does-not-hold { color: #99201a; background: #fbe3e1; }
.undecided { color: #6f4a00; background: #fdf0cf; }
.one-seed-only { color: #174a86; background: #e3edfa; }
.not-run { color: #4d5766; background: #eceff3; }
td.wide { min-width: 15rem; }
td.middle { min-width: 10rem; }
td.short { white-space: nowrap; }
@media (max-width: 40rem) {
  main { padding: 1.25rem 0.9rem 3rem; }
  h1 { font-size: 1.5rem; }
  h2 { font-size: 1.15rem; }
  /* Columns keep a readable width, and the table scrolls. */
  .table table { width: max-content; max-width: 54rem; }
  .table td { max-width: 19rem; }
  figure { overflow-x: auto; }
  figure svg { min-width: 34rem; }
}
"""


@dataclass(frozen=True)
class Link:
    """A cell that leads to the section of an id."""

    id: str

    def __str__(self) -> str:
        return self.id

    def __html__(self) -> str:
        return f'<a href="#{escape(self.id)}">{escape(self.id)}</a>'


@dataclass(frozen=True)
class Verdicts:
    """A cell of verdicts, each with what is said of it."""

    said: tuple[tuple[Verdict, str], ...]

    def __str__(self) -> str:
        return ", ".join(text for _, text in self.said)

    def __html__(self) -> str:
        return " ".join(f'<span class="verdict {_css(verdict)}">{escape(text)}</span>' for verdict, text in self.said)


def _css(verdict: Verdict) -> str:
    return verdict.value.replace(" ", "-")


Cell = str | Link | Verdicts


@dataclass(frozen=True)
class Table:
    """A table of cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Command:
    """What is typed into a shell."""

    text: str


@dataclass(frozen=True)
class Drawing:
    """A figure, the file it is saved in, and what it shows."""

    figure: "Figure"
    path: Path
    label: str


# A paragraph may have `code`, **strong** words and *emphasis*.
Block = str | Table | Command | Drawing


@dataclass(frozen=True)
class Section:
    """Blocks under an id and a title."""

    id: str
    title: str
    blocks: list[Block]


def markdown(title: str, summary: Sequence[Block], sections: Sequence[Section], folder: Path) -> str:
    """The report as Markdown, for a file in `folder`."""

    def rendered(block: Block) -> str:
        if isinstance(block, Drawing):
            return f"![{block.label}]({quote(Path(os.path.relpath(block.path, folder)).as_posix())})"
        if isinstance(block, Command):
            return f"```sh\n{block.text}\n```"
        return markdown_table(block) if isinstance(block, Table) else block

    parts = [f"# {title}", "Written by `iternorm report`: do not edit.", *map(rendered, summary)]
    for section in sections:
        parts += [f'<a id="{section.id}"></a>', f"## {section.id}: {section.title}", *map(rendered, section.blocks)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """One table as Markdown."""
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)


def _markdown_cell(cell: Cell) -> str:
    if isinstance(cell, Link):
        return f"[{cell.id}](#{cell.id})"
    text = str(cell)
    # Stars and underscores in a name such as Baseline* are not emphasis.
    return re.sub(r"([|*_~<])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")


def page(title: str, subtitle: str, summary: Sequence[Block], sections: Sequence[Section]) -> str:
    """The report as one HTML page."""

    def rendered(block: Block) -> str:
        if isinstance(block, Drawing):
            return f"<figure>{figure_svg(block.figure, label=block.label)}</figure>"
        if isinstance(block, Command):
            return f"<pre><code>{escape(block.text, quote=False)}</code></pre>"
        if isinstance(block, Table):
            return _with_widths(html_table(block.columns, block.rows), block)
        return f"<p>{html_text(block)}</p>"

    parts, top = [], []
    # One study without claims has nothing to sum up.
    if summary:
        parts.append(("Summary", '<span id="summary"></span>\n' + "\n".join(map(rendered, summary))))
        top.append('<p><a href="#summary">back to the summary</a></p>')
    for section in sections:
        content = [f'<span id="{section.id}"></span>', *map(rendered, section.blocks), *top]
        parts.append((f"{section.id}: {section.title}", "\n".join(content)))
    return html_page(title, parts, subtitle=subtitle, style=_STYLE)


def _with_widths(table: str, block: Table) -> str:
    """The table with the widths of its columns: a narrow screen squeezes no sentences, and no words break."""
    longest = [max((len(str(row[place])) for row in block.rows), default=0) for place in range(len(block.columns))]
    classes = ["wide" if most > 60 else "middle" if most > 24 else "short" if most <= 14 else "" for most in longest]

    def mark(line: str) -> str:
        names = iter(classes)

        def open_cell(found: "re.Match[str]") -> str:
            own = " ".join(filter(None, (found[1] or "", next(names))))
            return f'<td class="{own}">' if own else "<td>"

        return re.sub(r'<td(?: class="(\w+)")?>', open_cell, line)

    return "\n".join(mark(line) if line.startswith("<tr><td") else line for line in table.split("\n"))


def html_text(text: str) -> str:
    """A paragraph's marks as HTML.

    Example:
        >>> html_text("**a** < `b*`")
        '<strong>a</strong> &lt; <code>b*</code>'
    """
    parts = escape(text, quote=False).split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", parts[index])
        parts[index] = re.sub(r"\*(.+?)\*", r"<em>\1</em>", parts[index])
    for index in range(1, len(parts), 2):
        parts[index] = f"<code>{parts[index]}</code>"
    return "".join(parts)
