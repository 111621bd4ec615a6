"""The reference says once what several layers share.

A layer's docstring is complete by itself, because `help()` shows one at a time. On a page they stand together, so those
of one and three dimensions, and the lazy ones, keep their own words and refer to the two-dimensional layer.
"""

import re
from typing import Any

from sphinx.application import Sphinx


def shorten(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keep the first paragraph and the example of a layer whose arguments are described elsewhere."""
    found = re.fullmatch(r"iternorm\.(Lazy)?(\w+?)([123])d", name)
    if what != "class" or not found or (found[3] == "2" and not found[1]):
        return
    text = "\n".join(lines)
    paragraphs = text.split("\n\n")
    example = text[text.index(".. rubric:: Example") :] if ".. rubric:: Example" in text else ""
    other = f"The other arguments are those of :class:`{found[2]}2d <iternorm.{found[2]}2d>`."
    lines[:] = "\n\n".join([paragraphs[0], other, example]).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect, behind napoleon."""
    app.connect("autodoc-process-docstring", shorten, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
