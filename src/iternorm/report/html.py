"""The one home of HTML and of figures on a page: every report of the project is built from these four functions.

A page is one file that needs nothing else: the style sheet and the figures are inside it, there is no script, and
nothing is fetched.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2430; --soft: #5b6675; --rule: #d9dee5; --tint: #f5f7fa;
  --link: #00664a; }
@media (prefers-color-scheme: dark) { :root { --page: #131416; --ink: #cfd0d0; --soft: #9ca0a5; --rule: #303335;
  --tint: #1a1c1e; --link: #5fd3ae; }
  /* Figures are drawn on white. */
  svg, main img { padding: 0.5rem; border-radius: 6px; background: #fff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
a { color: var(--link); }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { margin: 0; font-size: clamp(1.4rem, 6vw, 2rem); line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.75rem 0 0.75rem; padding-top: 1.25rem; border-top: 1px solid var(--rule); font-size: 1.35rem; }
h3 { margin: 1.5rem 0 0.5rem; font-size: 1.05rem; }
p, ul, ol { max-width: 46rem; }
.subtitle { margin: 0.5rem 0 0; color: var(--soft); font-size: 1.1rem; overflow-wrap: anywhere; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.95rem; font-variant-numeric: tabular-nums; }
caption { padding-bottom: 0.5rem; text-align: left; color: var(--soft); }
th, td { padding: 0.45rem 1rem 0.45rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; }
th.number, td.number { text-align: right; }
td.number { white-space: nowrap; }
li { overflow-wrap: anywhere; }
tbody tr:hover { background: var(--tint); }
figure { margin: 1.25rem 0; }
figcaption { max-width: 46rem; margin-top: 0.25rem; color: var(--soft); font-size: 0.93rem; }
svg { display: block; width: 100%; height: auto; }
code { padding: 0.1em 0.3em; border-radius: 4px; background: var(--tint); font-size: 0.92em; overflow-wrap: anywhere; }
pre { padding: 0.9rem 1rem; border-radius: 6px; background: var(--tint); overflow-x: auto; }
pre code { padding: 0; }
@media print { main { max-width: none; padding: 0; } figure, table { break-inside: avoid; } }
"""

# A number as our tables print it: sign, digits, exponent, then perhaps its error and a unit. A dash stands for "not
# measured", and what was not run says so.
_DIGITS = r"(?:inf|[-+−±]?\d[\d.,]*(?:e[-+]?\d+)?)"
_UNIT = r"(?:%|×|x|s|ms|µs|MiB|GiB|points)?"
_NUMBER = re.compile(rf"\s*(?:{_DIGITS}(?:\s*±\s*{_DIGITS})?\s*{_UNIT}|[–—∞-]|not run)\s*", re.IGNORECASE)


def figure_svg(figure: "Figure", *, label: str = "") -> str:
    """Draw a matplotlib figure as an SVG element to be put into a page.

    The same figure gives the same text, and no two different figures on a page share an id. Text is drawn as outlines,
    so the figure looks the same where matplotlib's font is missing.

    Args:
        figure: The figure. Build it as `matplotlib.figure.Figure(...)`: pyplot keeps global state.
        label: What the figure shows, for those who cannot see it.
    """
    import matplotlib as mpl

    buffer = StringIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "iternorm"}):
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    viewbox = re.search(r'viewBox="([^"]*)"', text)
    width = re.search(r'<svg[^>]*?\swidth="([\d.]+)pt"', text)
    if viewbox is None or width is None:
        raise RuntimeError("matplotlib wrote an SVG without viewBox or width in pt: report.figure_svg cannot place it")
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # A style element inside one SVG would style the whole page: its only rule goes onto the root element below.
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href=", "href=").strip()

    # Some of matplotlib's ids come from object addresses: number them as they appear, then mark them with the content.
    names = {name: f"n{index}" for index, name in enumerate(dict.fromkeys(re.findall(r'\sid="([^"]+)"', body)))}

    def rename(prefix: str, found: "re.Match[str]") -> str:
        return f"{found[1]}{prefix}{names.get(found[2], found[2])}{found[3]}"

    reference = re.compile(r'(\sid="|href="#|url\(#)([^")]+)("|\))')
    digest = hashlib.sha256(reference.sub(lambda found: rename("", found), body).encode()).hexdigest()[:8]
    body = reference.sub(lambda found: rename(f"f{digest}-", found), body)
    # Matplotlib's 72 points are an inch, CSS's 96 pixels are: the figure is never scaled up.
    pixels = float(width[1]) * 96 / 72
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{viewbox[1]}" role="img" aria-label="{escape(label)}" '
        f'style="max-width: {pixels:.0f}px; stroke-linejoin: round; stroke-linecap: butt">{body}</svg>'
    )


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str | None = None) -> str:
    """A table of plain values, escaped. A column whose every cell reads as a number is aligned to the right.

    A value with a method `__html__` is put in as what that returns.
    """
    cells = [list(row) for row in rows]
    for index, row in enumerate(cells):
        if len(row) != len(columns):
            raise ValueError(f"row {index} has {len(row)} cells for {len(columns)} columns: {row}")
    numeric = [bool(cells) and all(_NUMBER.fullmatch(str(row[i])) for row in cells) for i in range(len(columns))]
    kinds = [' class="number"' if number else "" for number in numeric]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{_html(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in cells
    )
    title = "" if caption is None else f"<caption>{escape(caption)}</caption>\n"
    # A wide table scrolls, and a keyboard must be able to scroll it too.
    content = f"{title}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="table" tabindex="0"><table>\n{content}</table></div>'


def _html(value: object) -> str:
    own = getattr(value, "__html__", None)
    return escape(str(value)) if own is None else own()


def html_page(title: str, sections: Iterable[tuple[str, str]], *, subtitle: str = "", style: str = "") -> str:
    """A whole page in one file.

    Args:
        title: The page's title, plain text.
        sections: Pairs of a heading (plain text) and its content (HTML, put in as it is).
        subtitle: One line below the title, plain text.
        style: Rules of its own, behind those of every page.
    """
    below = f'\n<p class="subtitle">{escape(subtitle)}</p>' if subtitle else ""
    content = "\n".join(f"<section>\n<h2>{escape(heading)}</h2>\n{html}\n</section>" for heading, html in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header>\n<h1>{escape(title)}</h1>{below}\n</header>\n{content}\n</main>\n</body>\n</html>\n"
    )
