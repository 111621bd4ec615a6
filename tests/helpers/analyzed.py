"""A small network and batches for it, to be analyzed."""

import torch
from torch import nn

import iternorm


def images(count=4, size=8, channels=3, side=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, channels, side, side, generator=generator) for _ in range(count)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(8, 12, 1),
        iternorm.IterNorm2d(12, group_size=5),
        nn.Flatten(),
        nn.Linear(12 * 16, 10),
        iternorm.DecorrelatedBatchNorm1d(10, group_size=4),
        nn.LayerNorm(10),
    )
