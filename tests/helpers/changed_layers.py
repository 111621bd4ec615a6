"""Layers to which something was done that a new layer in their place would lose."""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from iternorm import IterNorm2d


def changed_layers() -> nn.Sequential:
    """A parametrized layer, one with a forward of its own, and a parametrized BatchNorm, of four channels, in eval."""
    parametrized = parametrize.register_parametrization(IterNorm2d(4), "weight", nn.Softplus())
    wrapped: Any = IterNorm2d(4)
    inner = wrapped.forward
    wrapped.forward = lambda input: 2 * inner(input)
    batchnorm = parametrize.register_parametrization(nn.BatchNorm2d(4), "weight", nn.Softplus())
    return nn.Sequential(parametrized, wrapped, batchnorm).eval()
