"""Follow every link of the built site that stays inside it: python docs/check_links.py docs/_build/html."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page, and where its links, pictures, styles and scripts lead."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)


def check(root: Path) -> list[str]:
    """A sentence for each link that leads nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in root.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = found / "index.html" if found.is_dir() else found
            if not found.is_file():
                wrong.append(f"{path.relative_to(root)}: {target} is not there")
            elif parts.fragment and found in pages and unquote(parts.fragment) not in pages[found].ids:
                wrong.append(f"{path.relative_to(root)}: {target} has no such place")
    return wrong


def main() -> None:
    """Print what is wrong, and fail if anything is."""
    root = Path(sys.argv[1]).resolve()
    wrong = check(root)
    print("\n".join(wrong) or f"all links inside {root.name} lead somewhere")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
