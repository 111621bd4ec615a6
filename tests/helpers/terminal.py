"""What a terminal shows."""


def words(text: str) -> str:
    """The text with one space between words: a terminal breaks lines where they are full."""
    return " ".join(text.split())
