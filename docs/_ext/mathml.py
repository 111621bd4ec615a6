"""Formulas become MathML when the site is built: browsers draw it themselves, without a script or a font."""

import re
from html import escape
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(latex: str, *, display: bool, place: Any = None) -> str:
    """The formula as an element, with its source for those who cannot see it. One that is not understood warns."""
    # latex2mathml has no fraction of fixed size. Its parentheses stretch if they are a pair, its text is upright.
    simple = re.sub(r"\\[td]frac\b", r"\\frac", latex)
    simple = re.sub(r"\\[Bb]ig *(\(|\[|\\lceil)", r"\\left\1", simple)
    simple = re.sub(r"\\[Bb]ig *(\)|\]|\\rceil)", r"\\right\1", simple)
    simple = re.sub(r"\\[Bb]ig(?![a-zA-Z])", "", simple)
    simple = re.sub(r"\\mathrm\{(\w)\}", r"\\text{\1}", simple)
    try:
        element = convert(simple, display="block" if display else "inline")
    except Exception as error:
        logger.warning("formula %r: %s", latex, error, location=place)
        return f"<code>{escape(latex)}</code>"
    # Capital Greek letters are upright.
    element = re.sub(r"<mi>(&#x003(?:9\w|A\d);)</mi>", r'<mi mathvariant="normal">\1</mi>', element)
    return element.replace("<math ", f'<math alttext="{escape(" ".join(latex.split()), quote=True)}" ', 1)


def visit_inline(translator: Any, node: nodes.math) -> None:
    """A formula inside a line."""
    translator.body.append(mathml(node.astext(), display=False, place=node))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    r"""A formula of its own, with the number that \tag gives it."""
    latex = node.astext()
    tag = re.search(r"\\tag\{(\w+)\}", latex)
    number = f'<a class="eqno" href="#eq-{tag[1]}">({tag[1]})</a>' if tag else ""
    anchor = f' id="eq-{tag[1]}"' if tag else ""
    formula = mathml(re.sub(r"\\tag\{\w+\}", "", latex), display=True, place=node)
    # A wide formula scrolls, and a keyboard must be able to scroll it too.
    body = f'<div class="formula" tabindex="0">{formula}</div>'
    translator.body.append(f'<div class="math-block"{anchor}>{body}{number}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
