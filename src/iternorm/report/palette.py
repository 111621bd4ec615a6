"""One colour for a normalization, in every figure."""

import re
from collections.abc import Iterable

GREY = "#7f7f7f"
# What is not a normalization: our numbers where a figure tells no norms apart, and the paper's.
OURS, PAPER = "#3b4657", "#000000"

_COLORS = {
    **dict.fromkeys(("plain", "none"), GREY),
    **dict.fromkeys(("BN", "BatchNorm", "BatchNorm2d"), "#0072b2"),
    "DBN": "#d55e00",
    "GroupNorm": "#7b5ea7",
    "LayerNorm": "#a65628",
    # All channels together: from T=1 on, the darker the more iterations.
    "IterNorm T=0": "#b0904a",
    "IterNorm T=1": "#9ccc3c",
    "IterNorm T=2": "#66c85a",
    "IterNorm T=3": "#3cc4b4",
    "IterNorm T=5": "#009e73",
    "IterNorm T=7": "#00694d",
    "IterNorm T=9": "#003526",
    "IterNorm T=5 d=256": "#882255",
    "IterNorm T=5 d=128": "#aa4499",
    "IterNorm T=3 d=64": "#a98bd6",
    "IterNorm T=5 d=64": "#cc79a7",
    "IterNorm T=7 d=64": "#8a3668",
    "IterNorm T=5 d=32": "#e69f00",
    "IterNorm T=5 d=1": "#56b4e9",
    # On ImageNet, where it is T=5 in groups of 64.
    "IterNorm": "#cc79a7",
}
_OTHERS = ("#332288", "#999933", "#44aa99", "#ddaa33", "#661100", "#117733", "#bbbbbb")


def color_of(norm: str) -> str | None:
    """The colour of a norm by its label; None where it has none of its own.

    Example:
        >>> color_of("DBN-16-L1") == color_of("DBN"), color_of("IterNorm-L1+DF") == color_of("IterNorm T=5 d=64")
        (True, True)
    """
    plain = re.sub(r"-(L1\+DF|L1|Full)$", "", norm.removeprefix("Sync"))
    return _COLORS.get(re.sub(r"^DBN.*", "DBN", plain))


def colors_of(norms: Iterable[str], *, named: bool = False) -> dict[str, str]:
    """The colours of some norms in one figure: their own, else one that no other of them has.

    Two that have one colour, as DBN-16 and DBN do, are told apart too, unless their names stand beside them (`named`).
    """
    names = list(dict.fromkeys(norms))
    free = iter(_OTHERS * (1 + len(names) // len(_OTHERS)))
    found: dict[str, str] = {}
    for name in names:
        own = color_of(name)
        found[name] = next(free) if own is None or (own in found.values() and not named) else own
    return found
