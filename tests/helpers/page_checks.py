"""What must hold for every page the project writes."""

import re
from html.parser import HTMLParser


class Balance(HTMLParser):
    """Fails on a tag that closes what is not open; keeps ids and addresses."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self._note(attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._note(attrs)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def _note(self, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            # A PNG that stands in the page itself is no address.
            if name in ("href", "src", "xlink:href") and not value.startswith("data:image/png;base64,"):
                self.addresses.append(value)


def assert_self_contained(page):
    """Tags balance, ids are unique, every address is an id of the page, nothing is fetched and nothing runs."""
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert len(set(parser.ids)) == len(parser.ids)
    assert {address.removeprefix("#") for address in parser.addresses} <= set(parser.ids)
    assert set(re.findall(r"url\(#?([^)]*)\)", page)) <= set(parser.ids)
    assert "<script" not in page
    assert "@import" not in page
    assert "<link" not in page
