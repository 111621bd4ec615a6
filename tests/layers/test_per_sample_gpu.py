"""Whitening of each sample on a real GPU, against the same layer in fp64 on the CPU: outputs and gradients."""

import copy

import pytest
import torch

pytest.importorskip("triton")

from checks import correlated, worst

from iternorm import GroupWhitening2d, InstanceWhitening2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# As for the layers over a batch. bfloat16's is larger: the scale is applied to an output that has been rounded already.
BUDGETS = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
CASES = [
    (GroupWhitening2d, {"num_groups": 32}, (8, 64, 16, 16)),
    (GroupWhitening2d, {"num_groups": 8, "activation": "relu"}, (4, 24, 7, 9)),
    (GroupWhitening2d, {"num_groups": 64}, (3, 64, 12, 12)),
    (InstanceWhitening2d, {"group_size": 16}, (4, 48, 16, 16)),
    (InstanceWhitening2d, {"group_size": 20, "activation": "relu"}, (4, 50, 9, 9)),
]


@pytest.mark.parametrize(("kind", "words", "shape"), CASES)
@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("last", [False, True])
def test_output_and_gradients_against_fp64(kind, words, shape, dtype, last, poisoned_memory):
    layer = kind(shape[1], **words)
    torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
    torch.nn.init.normal_(layer.bias)
    x, grad = correlated(*shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    found = []
    for device, compute in (("cuda", dtype), ("cpu", torch.float64)):
        own = copy.deepcopy(layer).to(device, torch.float64 if device == "cpu" else torch.float32)
        given = x.to(device, compute)
        if last:
            given = given.contiguous(memory_format=torch.channels_last)
        given.requires_grad_()
        y = own(given)
        assert y.stride() == given.stride()
        gradients = torch.autograd.grad(y, (given, *own.parameters()), grad.to(y))
        found.append([y.detach(), *gradients])
    # A ReLU passes other values where rounding has moved one across zero: few, and small in the norm.
    errors = [float((a.cpu().double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
    assert worst(errors) < BUDGETS[dtype] * (10 if "activation" in words else 1), errors
