"""Documents of the repository as pages of the site.

A document outside docs/ has a page here that is a stub: its text is put in when the site is built. Links between
documents are written for a reader of the repository, and lead to the pages that show them.
"""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
# The page that shows each document.
PAGES = {
    "contributing": "CONTRIBUTING.md",
    "design": "DESIGN.md",
    "changelog": "CHANGELOG.md",
    "benchmarks": "benchmarks/README.md",
}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Put in the document's text, and let its links lead to pages."""
    if page in PAGES:
        app.env.note_dependency(str(ROOT / PAGES[page]))
        source[0] = (ROOT / PAGES[page]).read_text(encoding="utf-8")
    path = Path(app.env.doc2path(page))
    if path.suffix != ".md":
        return
    here = path.parent
    # Where the text stands in the repository, which its links start from.
    home = (ROOT / PAGES[page]).parent if page in PAGES else here
    pages = {ROOT / document: Path(app.srcdir) / f"{name}.md" for name, document in PAGES.items()}
    pages[ROOT / "README.md"] = Path(app.srcdir) / "index.md"
    # The gallery's scripts become pages, in a folder that the build writes.
    scripts, gallery = Path(app.srcdir) / "gallery", Path(app.srcdir) / "auto_gallery"
    pages[scripts] = gallery / "index.rst"
    pages |= {script: gallery / f"{script.stem}.rst" for script in scripts.glob("*.py")}

    def lead(found: re.Match[str]) -> str:
        target = (home / found[1]).resolve()
        return Path(os.path.relpath(pages.get(target, target), here)).as_posix()

    # Anchors of HTML are targets of MyST.
    text = re.sub(r'^<a id="([\w-]+)"></a>$', r"(\1)=", source[0], flags=re.MULTILINE)
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    source[0] = "".join(part if index % 2 else _LINK.sub(lead, part) for index, part in enumerate(parts))
    if page == "decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
