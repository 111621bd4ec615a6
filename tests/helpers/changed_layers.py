"""Layers to which something was done that a new layer in their place would lose."""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from iternorm import IterNorm2d


class Doubled(IterNorm2d):
    """Does more than the layer that it is derived from."""

    def forward(self, input, residual=None):
        return 2 * super().forward(input, residual)


def changed_layers() -> nn.Sequential:
    """A parametrized layer, two with a forward of their own, and a parametrized BatchNorm, of four channels, in eval.

    The forward is set on the one and of the other's class.
    """
    parametrized = parametrize.register_parametrization(IterNorm2d(4), "weight", nn.Softplus())
    wrapped: Any = IterNorm2d(4)
    inner = wrapped.forward
    wrapped.forward = lambda input: 2 * inner(input)
    batchnorm = parametrize.register_parametrization(nn.BatchNorm2d(4), "weight", nn.Softplus())
    return nn.Sequential(parametrized, wrapped, Doubled(4), batchnorm).eval()
