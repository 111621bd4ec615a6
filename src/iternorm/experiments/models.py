"""The networks of the experiments. Each takes its normalization as a callable, so that one network serves them all."""

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn

# Makes the normalization of a layer with the given number of features.
NormFactory = Callable[[int], nn.Module]


class MLP(nn.Module):
    """The paper's multi-layer perceptron (Section 4.2): four linear layers, 100 units in each of the three hidden ones.

    A hidden layer is linear, normalization, ReLU. Images are flattened.

    Args:
        in_features: The number of values of one example.
        num_classes: The number of outputs.
        norm: Makes the normalization of a hidden layer from its width; None is the paper's "plain" network.
        hidden_features: The width of a hidden layer.
        num_layers: The number of linear layers, the last one included.

    Example:
        >>> import torch
        >>> model = MLP(64, 10, norm=nn.BatchNorm1d)
        >>> model(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        norm: NormFactory | None = None,
        *,
        hidden_features: int = 100,
        num_layers: int = 4,
    ):
        super().__init__()
        if num_layers < 2:
            raise ValueError(f"num_layers={num_layers} leaves no hidden layer: it must be at least 2")
        widths = [in_features] + [hidden_features] * (num_layers - 1)
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])
        self.norms = nn.ModuleList([nn.Identity() if norm is None else norm(width) for width in widths[1:]])
        self.head = nn.Linear(hidden_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(linear(x)).relu()
        return self.head(x)
