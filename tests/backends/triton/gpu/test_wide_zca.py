"""ZCA of groups above 64 channels on a real GPU: the iteration in kernels, against fp64."""

import pytest
import torch

pytest.importorskip("triton")

from checks import relative_error, worst
from gpu_checks import activation

from iternorm import DecorrelatedBatchNorm2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("setting", ["highest", "high"])
@pytest.mark.parametrize(("channels", "group_size"), [(128, 128), (200, 72), (256, 256), (640, None)])
def test_output_and_gradient_against_fp64(channels, group_size, setting, precision, poisoned_memory):
    precision(setting)
    x = activation((16, channels, 12, 12), torch.float32)
    grad = torch.randn_like(x)
    found = []
    for dtype, impl in ((torch.float32, "auto"), (torch.float64, "torch")):
        leaf = x.to(dtype).requires_grad_()
        layer = DecorrelatedBatchNorm2d(channels, group_size=group_size, impl=impl, device="cuda", dtype=dtype)
        y = layer(leaf)
        found.append((y, *torch.autograd.grad(y, leaf, grad.to(dtype))))
    # Moments and maps are torch's, in TF32 where that is allowed.
    budget = 2e-5 if setting == "highest" else 5e-3
    assert worst(relative_error(a, b) for a, b in zip(*found, strict=True)) < budget


def test_channels_that_depend_on_each_other_stay_finite():
    x = activation((16, 20, 6, 6), torch.float32).repeat(1, 5, 1, 1).requires_grad_()
    y = DecorrelatedBatchNorm2d(100, eps=0.0, group_size=None, device="cuda")(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert y.isfinite().all()
    assert grad.isfinite().all()


def test_it_is_captured_in_a_cuda_graph():
    layer = DecorrelatedBatchNorm2d(128, group_size=128, device="cuda")
    x = activation((16, 128, 8, 8), torch.float32)
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-4)
