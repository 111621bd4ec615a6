"""The networks of the experiments. Each takes its normalization as a callable, so that one network serves them all.

`build` makes them by name. The residual networks are in `residual`, the names of normalizations in `norms`.
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from iternorm.networks import norms
from iternorm.networks.norms import NormFactory
from iternorm.networks.residual import ResNet, WideResNet, scaled

# Names of `build`; a Wide ResNet may have any other depth and width.
NAMES = ("mlp", "vgg", "wrn-28-10", "wrn-40-10", "resnet-18", "resnet-50", "resnet-101")


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


# Width and number of the convolutions of each block of the paper's VGG.
VGG_BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


class VGG(nn.Module):
    """The paper's VGG for images of 32x32 (Table A2): sixteen 3x3 convolutions and one linear layer.

    A layer is convolution without bias, normalization, ReLU. Blocks end in max pooling by 2, the last in average
    pooling. Convolutions have torch's initialization; the linear layer's weights have a standard deviation of 0.01.

    Args:
        num_classes: The number of outputs.
        norm: Makes the normalization of a layer from its number of channels; None has none. One with
            ``activation="relu"`` needs no ReLU after it.
        in_channels: The channels of an image.
        blocks: The width and the number of the convolutions of each block. An image is as wide as 2 to the power of
            their number, so that one value a channel is left.

    Example:
        >>> import torch
        >>> model = VGG(10, norm=nn.BatchNorm2d, blocks=((4, 1), (8, 2)))
        >>> model(torch.zeros(5, 3, 4, 4)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        num_classes: int = 10,
        norm: NormFactory | None = None,
        *,
        in_channels: int = 3,
        blocks: Sequence[tuple[int, int]] = VGG_BLOCKS,
    ):
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for index, (width, depth) in enumerate(blocks):
            for _ in range(depth):
                layers.append(nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False))
                layers.append(nn.Identity() if norm is None else norm(width))
                # A layer that rectifies its own output leaves nothing to do there; names stay as they are.
                rectified = getattr(layers[-1], "activation", None) == "relu"
                layers.append(nn.Identity() if rectified else nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.AvgPool2d(2) if index == len(blocks) - 1 else nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


def build(
    name: str,
    norm: str,
    num_classes: int,
    in_shape: tuple[int, int, int],
    *,
    eps: float = 1e-5,
    dropout: float = 0.0,
    width: float = 1.0,
) -> nn.Module:
    """The network of a name with the normalization of a label.

    Args:
        name: ``mlp``, ``vgg``, ``wrn-28-10`` (any ``wrn-d-k`` with d = 6n + 4), ``resnet-18``, ``-34``, ``-50``,
            ``-101`` or ``-152``.
        norm: A label of `norms.make_norm`; for a ResNet one of `norms.place_norms`, such as ``IterNorm-L1+DF``. A Wide
            ResNet with IterNorm has one more norm, after its first convolution, as in the code behind the paper's
            numbers (see `residual.WideResNet`).
        num_classes: The number of outputs.
        in_shape: Channels, height and width of an image.
        eps: The eps of the normalization.
        dropout: The share of activations that a Wide ResNet drops; the others have no dropout.
        width: Multiplies the number of channels, for trials; the paper's is 1.

    Raises:
        ValueError: A name is not known (the nearest ones are named), or the arguments do not go together.

    Example:
        >>> model = build("wrn-16-4", "IterNorm T=5 d=64", 10, (3, 32, 32), dropout=0.3, width=0.25)
        >>> model.stem_norm.num_features, model.norm.num_features
        (4, 64)
    """
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes}: a whole number from 1 is needed")
    if not width > 0:
        raise ValueError(f"width={width}: a positive number is needed")
    wide = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    if dropout and not wide:
        raise ValueError(f"dropout={dropout}: {name} has no dropout, 0 is needed")
    channels, height, breadth = in_shape
    # Where every norm has a ReLU behind it, whitening layers apply it: on a GPU that saves three passes.
    if wide:
        make = norms.make_norm(norm, eps, activation="relu")
        options = {"dropout": dropout, "in_channels": channels, "width": width}
        stem = norms.make_norm(norm, eps) if norms.is_iterated(norm) else None
        return WideResNet(int(wide[1]), int(wide[2]), num_classes, make, stem_norm=stem, **options)
    if found := re.fullmatch(r"resnet-(\d+)", name):
        placed = norms.place_norms(norm, eps)
        return ResNet(int(found[1]), num_classes, **placed._asdict(), in_channels=channels, width=width)
    if name == "mlp":
        hidden = scaled(100, width)
        return MLP(math.prod(in_shape), num_classes, norms.make_norm(norm, eps, rank=1), hidden_features=hidden)
    if name == "vgg":
        side = 2 ** len(VGG_BLOCKS)
        if (height, breadth) != (side, side):
            raise ValueError(
                f"in_shape={in_shape}: vgg takes images of {side}x{side}, its last pooling leaves one value"
            )
        blocks = [(scaled(block_width, width), depth) for block_width, depth in VGG_BLOCKS]
        make = norms.make_norm(norm, eps, activation="relu")
        return VGG(num_classes, make, in_channels=channels, blocks=blocks)
    raise ValueError(f"no network is called {name!r}: {norms.nearest(name, NAMES)}")
