"""Normalizations by name: a label of a recipe in, a callable that makes the layers of a network out."""

import difflib
import re
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from torch import nn

from iternorm.analysis import Whitening
from iternorm.layers.norms import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d
from iternorm.layers.sync import SyncIterNorm

# Makes the normalization of a layer with the given number of features.
NormFactory = Callable[[int], nn.Module]

# Examples of labels; other numbers are possible.
LABELS = ("plain", "BN", "DBN", "DBN-16", "DBN-16 pca", "IterNorm T=5", "IterNorm T=5 d=64", "SyncIterNorm T=5 d=64")
# The rows of the paper's Table 2, for residual networks on ImageNet.
PLACED_LABELS = ("DBN-16-L1", "IterNorm-L1", "IterNorm-Full", "IterNorm-L1+DF")

# What "IterNorm" means on ImageNet, where the paper gives no more than the name.
_IMAGENET_SETTING = " T=5 d=64"
_PLACED = re.compile(r"(?P<whitening>.+)-(?P<place>L1|L1\+DF|Full)")


class PlacedNorms(NamedTuple):
    """The normalizations of a residual network: of the layers, of the first one, and of the features."""

    norm: NormFactory | None
    first_norm: NormFactory | None
    feature_norm: NormFactory | None


def make_norm(
    label: str, eps: float = 1e-5, rank: Literal[1, 2] = 2, *, activation: str | None = None
) -> NormFactory | None:
    """The layer of a label, as a callable that takes the number of features.

    Args:
        label: ``plain`` is no normalization. The others are those of `iternorm.analysis.Whitening`: ``BN``, ``DBN-16``
            (groups of 16, ZCA), ``DBN-16 pca``, ``IterNorm T=5`` (all channels together), ``IterNorm T=5 d=64``; and
            ``Sync`` before an IterNorm, whose statistics are then those of all processes.
        eps: Added to the variance, or to the diagonal of the covariance.
        rank: 1 for features ``[N, C]``, 2 for images ``[N, C, H, W]``.
        activation: What follows the normalization, where a whitening layer can apply it itself; BN leaves it to the
            network.

    Raises:
        ValueError: The label is not known; the nearest ones are named.

    Example:
        >>> layer = make_norm("IterNorm T=3 d=16")(32)
        >>> type(layer).__name__, layer.group_size, layer.num_iters
        ('IterNorm2d', 16, 3)
    """
    if rank not in (1, 2):
        raise ValueError(f"rank={rank!r}: 1 (features) or 2 (images) is needed")
    if label == "plain":
        return None
    synchronized = label.startswith("SyncIterNorm")
    try:
        operation = Whitening.parse(label.removeprefix("Sync") if synchronized else label, eps)
    except ValueError as error:
        if placed := _PLACED.fullmatch(label):
            place, whitening = placed["place"], placed["whitening"]
            raise ValueError(
                f"norm={label!r}: {place} is a place in a ResNet, this network has none; use {whitening!r} or the like"
            ) from error
        raise ValueError(f"no norm is called {label!r}: {nearest(label, LABELS)}") from error
    if label == "BN":
        return partial(nn.BatchNorm1d if rank == 1 else nn.BatchNorm2d, eps=eps)
    if operation.solver != "newton":
        kind = DecorrelatedBatchNorm1d if rank == 1 else DecorrelatedBatchNorm2d
        return partial(kind, eps=eps, group_size=operation.group_size, solver=operation.solver, activation=activation)
    kind = SyncIterNorm if synchronized else IterNorm1d if rank == 1 else IterNorm2d
    return partial(kind, eps=eps, group_size=operation.group_size, num_iters=operation.num_iters, activation=activation)


def is_iterated(label: str) -> bool:
    """Whether a label of `make_norm` is an IterNorm, synchronized or not."""
    return label.removeprefix("Sync").startswith("IterNorm")


def place_norms(label: str, eps: float = 1e-5) -> PlacedNorms:
    """The normalizations of a residual network for ImageNet, where the label may say where they stand (Section 5.3).

    A label of `make_norm` stands in every place. With ``-L1`` at its end it stands first in the network only, the rest
    being BN; with ``-L1+DF`` also before the last linear layer, to decorrelate the features; with ``-Full`` in every
    place of a norm. Before these, ``IterNorm`` alone is T=5 and groups of 64, the paper's setting on ImageNet.

    Raises:
        ValueError: The label is not known; the nearest ones are named.

    Example:
        >>> placed = place_norms("IterNorm-L1+DF")
        >>> [type(make(64)).__name__ for make in placed]
        ['BatchNorm2d', 'IterNorm2d', 'IterNorm1d']
    """
    found = _PLACED.fullmatch(label)
    try:
        if found is None:
            norm = make_norm(label, eps)
            return PlacedNorms(norm, norm, None)
        whitening = found["whitening"]
        if whitening in ("IterNorm", "SyncIterNorm"):
            whitening += _IMAGENET_SETTING
        norm = make_norm(whitening, eps)
        features = make_norm(whitening, eps, rank=1)
    except ValueError as error:
        raise ValueError(f"no norm is called {label!r}: {nearest(label, (*LABELS, *PLACED_LABELS))}") from error
    if norm is None:
        raise ValueError(f"norm={label!r}: plain is no normalization, so it has no place; use 'plain' or 'BN'")
    rest = norm if found["place"] == "Full" else make_norm("BN", eps)
    return PlacedNorms(rest, norm, features if found["place"] == "L1+DF" else None)


def nearest(name: str, known: tuple[str, ...]) -> str:
    """The end of a message about an unknown name: the nearest of the known ones, then all of them."""
    lowered = {each.lower(): each for each in known}
    near = [lowered[each] for each in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{hint}names are like {', '.join(known)}"
