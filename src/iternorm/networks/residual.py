"""The residual networks of the paper: Wide ResNets for CIFAR, and ResNets for ImageNet.

Each takes its normalization as a callable, and the places that the paper treats apart as arguments of their own.
Convolutions have no bias.
"""

from torch import Tensor, nn

from iternorm.networks.norms import NormFactory

# Blocks of each stage, and whether they are bottlenecks.
RESNET_STAGES = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
# A bottleneck's output has so many times the channels of its 3x3 convolution.
EXPANSION = 4


def scaled(channels: int, width: float) -> int:
    """The number of channels of a network made wider or narrower, never below one."""
    return max(1, round(channels * width))


def _normalization(norm: NormFactory | None, channels: int) -> nn.Module:
    return nn.Identity() if norm is None else norm(channels)


def _rectified(norm: nn.Module, x: Tensor) -> Tensor:
    """Norm and ReLU, which may be a part of the norm."""
    x = norm(x)
    return x if getattr(norm, "activation", None) == "relu" else x.relu()


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)


def _initialize(model: nn.Module, head: nn.Linear) -> None:
    """He's initialization by fan-out; the head has torch's own weights and no bias at the start."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(head.bias)


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after normalization and ReLU, with dropout between them, and a shortcut.

    Where the number of channels changes, the shortcut is a 1x1 convolution of the first activation, so that norm and
    ReLU are shared; elsewhere it is the block's input itself.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: NormFactory | None, dropout: float):
        super().__init__()
        self.norm1 = _normalization(norm, in_channels)
        self.conv1 = _conv(in_channels, out_channels, 3, stride)
        self.norm2 = _normalization(norm, out_channels)
        # A layer even at 0, because the modules of a network must not depend on a probability.
        self.dropout = nn.Dropout(dropout)
        self.conv2 = _conv(out_channels, out_channels, 3)
        projected = in_channels != out_channels or stride != 1
        self.shortcut = _conv(in_channels, out_channels, 1, stride) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        activation = _rectified(self.norm1, x)
        residual = _rectified(self.norm2, self.conv1(activation))
        residual = self.conv2(self.dropout(residual))
        return residual + (x if self.shortcut is None else self.shortcut(activation))


class WideResNet(nn.Module):
    """WRN-d-k for images of 32x32 (Zagoruyko and Komodakis, 2016), as the paper uses it in Section 5.2.

    A 3x3 convolution to 16 channels, three stages of (d - 4) / 6 blocks with 16k, 32k and 64k channels, then norm,
    ReLU, the average over all (8x8) positions and a linear layer. Norms come before the convolutions. Convolutions are
    initialized by He's rule with the fan-out.

    Args:
        depth: d, of the form 6n + 4.
        widen_factor: k.
        num_classes: The number of outputs.
        norm: Makes a normalization from its number of channels; None has none. One with ``activation="relu"`` needs no
            ReLU after it.
        stem_norm: One more normalization, right after the first convolution and without a ReLU. The code behind the
            paper's numbers has it with IterNorm and not with BN. None has none.
        dropout: The share of activations, not channels, that are dropped between the convolutions of a block.
        in_channels: The channels of an image.
        width: Multiplies every number of channels, for trials; the paper's is 1.

    Example:
        >>> import torch
        >>> model = WideResNet(10, 1, norm=nn.BatchNorm2d)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int,
        widen_factor: int,
        num_classes: int = 10,
        norm: NormFactory | None = None,
        *,
        stem_norm: NormFactory | None = None,
        dropout: float = 0.0,
        in_channels: int = 3,
        width: float = 1.0,
    ):
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            near = max(10, 6 * round((depth - 4) / 6) + 4)
            raise ValueError(f"depth={depth} of a Wide ResNet: 6n + 4 from 10 is needed, {near} for instance")
        if widen_factor < 1:
            raise ValueError(f"widen_factor={widen_factor} of a Wide ResNet: a whole number from 1 is needed")
        channels = scaled(16, width)
        self.conv = _conv(in_channels, channels, 3)
        self.stem_norm = _normalization(stem_norm, channels)
        blocks = []
        for stage in range(3):
            out_channels = scaled(16 * widen_factor * 2**stage, width)
            for index in range((depth - 4) // 6):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(WideBlock(channels, out_channels, stride, norm, dropout))
                channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.norm = _normalization(norm, channels)
        self.head = nn.Linear(channels, num_classes)
        _initialize(self, self.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem_norm(self.conv(x)))
        return self.head(_rectified(self.norm, x).mean((2, 3)))


class ResidualBlock(nn.Module):
    """The block of a ResNet: convolutions each followed by a norm, a shortcut, and a ReLU after their sum.

    Two 3x3 convolutions, or, as a bottleneck, 1x1, 3x3 and 1x1 with four times the channels. The first 3x3 convolution
    has the stride. Where shapes change the shortcut is a 1x1 convolution with a norm.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, norm: NormFactory | None, bottleneck: bool):
        super().__init__()
        out_channels = channels * EXPANSION if bottleneck else channels
        if bottleneck:
            convolutions = (
                _conv(in_channels, channels, 1),
                _conv(channels, channels, 3, stride),
                _conv(channels, out_channels, 1),
            )
        else:
            convolutions = (_conv(in_channels, channels, 3, stride), _conv(channels, channels, 3))
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList([_normalization(norm, layer.out_channels) for layer in convolutions])
        self.shortcut = nn.Sequential()
        if in_channels != out_channels or stride != 1:
            self.shortcut = nn.Sequential(
                _conv(in_channels, out_channels, 1, stride), _normalization(norm, out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            residual = norm(convolution(residual.relu() if index > 0 else residual))
        return (residual + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """ResNet for ImageNet (He et al., 2016), with the places of Section 5.3 for its normalizations.

    A 7x7 convolution with stride 2, norm, ReLU, 3x3 max pooling with stride 2, four stages of blocks with 64, 128, 256
    and 512 channels, the average over all positions (7x7 for images of 224x224, and any other size will do), and a
    linear layer. Convolutions are initialized by He's rule with the fan-out.

    Args:
        depth: 18, 34, 50, 101 or 152.
        num_classes: The number of outputs.
        norm: Makes a normalization from its number of channels; None has none.
        first_norm: The one after the first convolution (the paper's L1 replaces only this); None is as `norm`.
        feature_norm: One more, of the averaged features ``[N, C]`` before the linear layer (the paper's DF); None has
            none.
        in_channels: The channels of an image.
        width: Multiplies every number of channels, for trials; the paper's is 1.

    Example:
        >>> import torch
        >>> model = ResNet(18, 7, nn.BatchNorm2d, feature_norm=nn.BatchNorm1d, width=1 / 16)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 7])
    """

    def __init__(
        self,
        depth: int,
        num_classes: int = 1000,
        norm: NormFactory | None = None,
        *,
        first_norm: NormFactory | None = None,
        feature_norm: NormFactory | None = None,
        in_channels: int = 3,
        width: float = 1.0,
    ):
        super().__init__()
        if depth not in RESNET_STAGES:
            raise ValueError(f"depth={depth} of a ResNet: one of {', '.join(map(str, RESNET_STAGES))} is needed")
        counts, bottleneck = RESNET_STAGES[depth]
        channels = scaled(64, width)
        self.conv = _conv(in_channels, channels, 7, 2)
        self.norm = _normalization(norm if first_norm is None else first_norm, channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks = []
        for stage, count in enumerate(counts):
            inner = scaled(64 * 2**stage, width)
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(ResidualBlock(channels, inner, stride, norm, bottleneck))
                channels = inner * EXPANSION if bottleneck else inner
        self.blocks = nn.Sequential(*blocks)
        self.feature_norm = _normalization(feature_norm, channels)
        self.head = nn.Linear(channels, num_classes)
        _initialize(self, self.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.norm(self.conv(x)).relu()))
        return self.head(self.feature_norm(x.mean((2, 3))))
