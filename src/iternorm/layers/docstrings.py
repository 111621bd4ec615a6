"""Complete docstrings: what a base class says once appears in the help of every layer."""

import inspect
from typing import TypeVar

Layer = TypeVar("Layer", bound=type)


def complete(layer: Layer) -> Layer:
    """Class decorator: add the first base's paragraphs and arguments to those of the class itself.

    The first paragraph stays the class's own. Sections are those of the Google style, ``Args:`` and ``Example:``; an
    example of the base is not taken over.
    """
    own, base = _sections(layer.__doc__), _sections(next(filter(None, (b.__doc__ for b in layer.__mro__[1:])), None))
    if own["text"]:
        parts = own["text"] + base["text"][1:]
        arguments = [section.removeprefix("Args:\n") for section in base["args"] + own["args"]]
        layer.__doc__ = "\n\n".join([*parts, "Args:\n" + "\n".join(arguments), *own["example"]])
    return layer


def _sections(docstring: str | None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"text": [], "args": [], "example": []}
    # Without any where Python drops docstrings (-OO).
    for paragraph in inspect.cleandoc(docstring or "").split("\n\n"):
        kind = {"Args:": "args", "Example:": "example"}.get(paragraph.partition("\n")[0], "text")
        if paragraph:
            found[kind].append(paragraph)
    return found
