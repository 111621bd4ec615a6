"""What the theme's and Sphinx's HTML lacks for keyboards and screen readers, put in after the build."""

import re
from pathlib import Path

from sphinx.application import Sphinx

# A pattern in the pages, and what stands in its place.
MENDED = (
    (r'<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Pages">'),
    (r'<aside class="toc-drawer([^"]*)">', r'<aside class="toc-drawer\1" aria-label="On this page">'),
    # What scrolls sideways on a narrow screen must be reached by a keyboard.
    (r"<pre>", '<pre tabindex="0">'),
    (r'<div class="table-wrapper([^"]*)">', r'<div class="table-wrapper\1" tabindex="0">'),
)
# A signature of several lines is no list of definitions.
SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.DOTALL)


def mend(app: Sphinx, exception: Exception | None) -> None:
    """Rewrite every page that was built."""
    if exception is not None or app.builder.format != "html":
        return
    for path in Path(app.outdir).rglob("*.html"):
        text = mended = path.read_text(encoding="utf-8")
        for pattern, replacement in MENDED:
            mended = re.sub(pattern, replacement, mended)
        mended = SIGNATURE.sub(lambda found: re.sub(r"(</?)d[ld]>", r"\1div>", found[0]), mended)
        if mended != text:
            path.write_text(mended, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect."""
    app.connect("build-finished", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
