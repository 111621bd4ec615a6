"""Models to fold, and what must hold of the folded one."""

from typing import Any

import torch
from torch import nn

from iternorm import (
    FoldTable,
    IterNorm2d,
    fold,
)
from iternorm.layers.base import WhiteningNorm


class Wired(nn.Module):
    """A convolution, a norm and a convolution, joined as `wire` says."""

    def __init__(self, wire, **modules):
        super().__init__()
        self.wire = wire
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = IterNorm2d(4)
        self.last = nn.Conv2d(4, 4, 1)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.wire(self, x)


def settled(model) -> Any:
    """Statistics as after some training (full matrices, symmetric), random scales and shifts, fp64, eval."""
    generator = torch.Generator().manual_seed(1)
    model = model.double().eval()
    with torch.no_grad():
        for layer in model.modules():
            if not isinstance(layer, WhiteningNorm):
                continue
            layer.running_mean.normal_(generator=generator)
            noise = torch.empty_like(layer.get_buffer(f"running_{layer.running}")).normal_(generator=generator)
            covariance = noise @ noise.mT / noise.shape[-1] + torch.eye(noise.shape[-1])
            mask = layer.running_matrix.diagonal(dim1=-2, dim2=-1) != 0
            layer.running_matrix.copy_(covariance * mask[:, :, None] * mask[:, None, :])
            if layer.affine:
                layer.weight.uniform_(0.5, 1.5, generator=generator)
                layer.bias.normal_(generator=generator)
    return model


def norms_of(model):
    return [m for m in model.modules() if isinstance(m, WhiteningNorm)]


def check(model, x, hows, **words) -> tuple[Any, FoldTable]:
    """Fold by tracing and by running; both must give the same table and the model's output."""
    expected = model(x)
    tables = []
    for example in (None, x):
        folded, table = fold(model, example, **words)
        assert not norms_of(folded)
        torch.testing.assert_close(folded(x), expected, rtol=1e-10, atol=1e-10)
        assert [row.how for row in table] == hows
        tables.append(table)
    assert [row[:3] for row in tables[0]] == [row[:3] for row in tables[1]]
    assert norms_of(model)
    return folded, table
