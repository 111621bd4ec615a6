"""Networks that nobody here wrote, small: real architectures of `transformers` and `monai`, without a download."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import iternorm
from iternorm.layers.base import WhiteningNorm

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def hf_resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    words = {"embedding_size": 16, "hidden_sizes": [24, 32, 48, 80], "depths": [1, 1, 2, 1], "num_labels": 5}
    return ResNetForImageClassification(ResNetConfig(**words))


def hf_regnet():
    from transformers import RegNetConfig, RegNetForImageClassification

    words: dict[str, Any] = {
        "embedding_size": 16, "hidden_sizes": [24, 48, 72, 96], "depths": [1, 1, 2, 1], "groups_width": 24,
        "num_labels": 5,
    }  # fmt: skip
    return RegNetForImageClassification(RegNetConfig(**words))


def hf_mobilenet_v2():
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    words: dict[str, Any] = {"depth_multiplier": 0.35, "num_labels": 5}
    return MobileNetV2ForImageClassification(MobileNetV2Config(**words))


def hf_efficientnet():
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    words = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "num_labels": 5}
    return EfficientNetForImageClassification(EfficientNetConfig(**words))


def monai_resnet_2d():
    from monai.networks.nets.resnet import resnet18

    return resnet18(spatial_dims=2, n_input_channels=3, num_classes=5)


def monai_resnet_3d():
    from monai.networks.nets.resnet import resnet18

    return resnet18(spatial_dims=3, n_input_channels=1, num_classes=5)


def monai_densenet():
    from monai.networks.nets.densenet import DenseNet121

    return DenseNet121(spatial_dims=2, in_channels=3, out_channels=5, init_features=16, growth_rate=8)


MODELS = {
    "transformers ResNet": (hf_resnet, (3, 32, 32)),
    "transformers RegNet": (hf_regnet, (3, 32, 32)),
    "transformers MobileNetV2": (hf_mobilenet_v2, (3, 32, 32)),
    "transformers EfficientNet": (hf_efficientnet, (3, 32, 32)),
    "monai resnet18 2-D": (monai_resnet_2d, (3, 32, 32)),
    "monai resnet18 3-D": (monai_resnet_3d, (1, 16, 16, 16)),
    "monai DenseNet121": (monai_densenet, (3, 32, 32)),
}
# torch.fx stops at what these compute from the shape of their input.
NOT_TRACEABLE = ("transformers ResNet", "transformers RegNet", "transformers MobileNetV2")


def build(name):
    """A model with running statistics that are not those of a new one, in eval mode, and a batch."""
    # It is there with the dev extra; `make test-versions` has torch alone.
    pytest.importorskip(name.split()[0])
    builder, shape = MODELS[name]
    torch.manual_seed(0)
    model = builder()
    x = torch.randn(8, *shape)
    with torch.no_grad():
        for layer in model.modules():
            if hasattr(layer, "running_var"):
                layer.momentum, momentum = 0.5, layer.momentum
                layer.__dict__["original_momentum"] = momentum
        for _ in range(3):
            model(torch.randn(8, *shape))
        for layer in model.modules():
            if hasattr(layer, "running_var"):
                layer.momentum = layer.__dict__.pop("original_momentum")
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.2)
    return model.eval(), x


def converted_and_trained(name):
    """The model with IterNorm after one training step, in eval mode, and a batch."""
    model, x = build(name)
    iternorm.convert_batchnorm(model)
    for layer in model.modules():
        if isinstance(layer, WhiteningNorm):
            # MobileNetV2's and EfficientNet's 0.99 and more would leave the statistics of this one small batch, and
            # MobileNetV2's linear bottlenecks make them of low rank: from those fp32 itself computes two digits only.
            layer.momentum = 0.1
    model.train()
    logits(model, x).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    model.zero_grad()
    return model.eval(), x


def logits(model, x):
    output = model(x)
    return getattr(output, "logits", output)


class BatchNormAct2d(nn.BatchNorm2d):
    """A stand-in for timm's class of this name, which does not install beside the CPU build of torch.

    It drops and activates in a forward of its own, around a copy of BatchNorm's.
    """

    def __init__(self, num_features, act_layer: Callable[[], nn.Module] = nn.ReLU, drop=0.0, **words):
        super().__init__(num_features, **words)
        self.drop = nn.Dropout2d(drop) if drop else nn.Identity()
        self.act = act_layer()

    def forward(self, input):
        x = input
        torch._assert(x.ndim == 4, "expected 4D input")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        x = nn.functional.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            factor,
            self.eps,
        )
        return self.act(self.drop(x))
