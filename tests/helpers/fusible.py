"""Networks in which norms are followed by additions and ReLUs, and what must hold once they are fused."""

# A converted model is a Module to a checker, whatever it was.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportUnusedExpression=false

import copy

import torch
from torch import nn
from torch.nn import functional as F

from iternorm import ConversionReport, convert_batchnorm

ADDS = "adds the shortcut, then ReLU"


def conv(inputs, outputs, size=3, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


def vgg():
    layers = []
    for inputs, outputs in ((3, 6), (6, 8)):
        layers += [conv(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers)


class BasicBlock(nn.Module):
    """Two convolutions; one ReLU module is used twice; the sum is in place."""

    def __init__(self, inputs=8, outputs=8, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """A ReLU module for each norm, the shortcut's norm a child of the block, and a parameter that nobody uses."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.act1 = conv(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2, self.bn2, self.act2 = conv(4, 4), nn.BatchNorm2d(4), nn.ReLU()
        self.conv3, self.bn3, self.act3 = conv(4, 12, 1), nn.BatchNorm2d(12), nn.ReLU()
        self.drop = nn.Identity()
        self.short_conv, self.short_bn = conv(8, 12, 1), nn.BatchNorm2d(12)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        y = self.act1(self.drop(self.bn1(self.conv1(x))))
        y = self.act2(self.bn2(self.conv2(y)))
        return self.act3(self.drop(self.bn3(self.conv3(y))) + self.short_bn(self.short_conv(x)))


class ResNet(nn.Module):
    """The stem has a ReLU of its own."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = conv(3, 8), nn.BatchNorm2d(8), nn.ReLU()
        self.layer1 = nn.Sequential(BasicBlock(), BasicBlock(8, 8, 2), Bottleneck())
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


class PreActivation(nn.Module):
    """Nothing follows the sum."""

    def __init__(self):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(8), conv(8, 8)
        self.bn2, self.conv2 = nn.BatchNorm2d(8), conv(8, 8)

    def forward(self, x):
        y = self.conv1(self.bn1(x).relu())
        return x + self.conv2(F.relu(self.bn2(y), inplace=True))


class Wired(nn.Module):
    """Two convolutions with norms and a ReLU, joined as `wire` says."""

    def __init__(self, wire, **modules):
        super().__init__()
        self.wire = wire
        self.conv, self.norm, self.relu = conv(8, 8), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.norm2 = conv(8, 8), nn.BatchNorm2d(8)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.wire(self, x)


def pair(model, **words):
    """The model converted without and with fusion, and the report of the second."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
            layer.running_mean.normal_(), layer.running_var.uniform_(0.5, 2)
    report = ConversionReport()
    words = {"group_size": 4, **words}
    plain = convert_batchnorm(copy.deepcopy(model), **words)
    return plain, convert_batchnorm(model, fuse=True, report=report, **words), report


def assert_same(plain, fused, x):
    """Outputs, gradients and statistics in training and in eval."""
    assert list(fused.state_dict()) == list(plain.state_dict())
    for training in (True, False):
        results = []
        for model in (plain, fused):
            model.train(training).zero_grad()
            inputs = x.clone().requires_grad_()
            output = model(inputs)
            output.sin().sum().backward()
            grads = {name: p.grad for name, p in model.named_parameters()}
            results.append((output.detach(), inputs.grad, grads, dict(model.state_dict())))
        # Only the order of the additions may differ.
        torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)


NETWORKS = {
    "vgg": (vgg, (3, 8, 8), {"1": "ReLU", "5": "ReLU"}),
    "basic block": (BasicBlock, (8, 6, 6), {"bn1": "ReLU", "bn2": ADDS}),
    "basic block with a stride": (lambda: BasicBlock(8, 12, 2), (8, 6, 6), {"bn1": "ReLU", "bn2": ADDS}),
    "bottleneck": (Bottleneck, (8, 6, 6), {"bn1": "ReLU", "bn2": "ReLU", "bn3": ADDS}),
    "resnet": (
        ResNet,
        (3, 8, 8),
        {"bn1": "ReLU"}
        | {f"layer1.{i}.{n}": text for i in (0, 1) for n, text in (("bn1", "ReLU"), ("bn2", ADDS))}
        | {"layer1.2.bn1": "ReLU", "layer1.2.bn2": "ReLU", "layer1.2.bn3": ADDS},
    ),
    "pre-activation": (PreActivation, (8, 6, 6), {"bn1": "ReLU", "bn2": "ReLU"}),
}


_CALLS = ("call_function", "call_method")


def count(model):
    """ReLUs and additions in the model's own code. What its norms do is not seen."""
    graph = torch.fx.symbolic_trace(model).graph
    relus = sum(type(model.get_submodule(n.target)) is nn.ReLU for n in graph.nodes if n.op == "call_module")
    # Not what a function prints, which has an address: its digits may spell "add".
    called = [getattr(n.target, "__name__", str(n.target)) for n in graph.nodes if n.op in _CALLS]
    return relus + sum("relu" in name for name in called), sum("add" in name for name in called)
