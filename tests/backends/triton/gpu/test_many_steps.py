"""Many Newton steps on a real GPU, on channels that depend on each other: finite, and ZCA where that can be told."""

import copy

import pytest
import torch

pytest.importorskip("triton")

from checks import relative_error, worst
from gpu_checks import BUDGETS, activation, layer_for

from iternorm import DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d, solvers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
# On the space that the data span. Off it W is hundreds of times larger, and its rounding in the last product spreads to
# all directions: in simulation up to 5 % of the output with TF32's 11 bits, and all of it with bfloat16's 8.
BUDGET_ON_SPAN = {"fp32": 0.01, "tf32": 0.15, "bf16": float("inf"), "fp16": 0.15}


def dependent(shape, group_size, rank, last=False):
    """An activation whose groups are of a lower rank, with a deviation of 30, and the projection on what each spans."""
    mixing = torch.randn(shape[1] // group_size, group_size, rank, device=DEVICE, dtype=torch.float64) / rank**0.5
    latent = torch.randn(shape[0], len(mixing), rank, *shape[2:], device=DEVICE, dtype=torch.float64)
    x = 30 * torch.einsum("gdr,ngr...->ngd...", mixing, latent).reshape(shape)
    basis = torch.linalg.qr(mixing)[0]
    return (x.contiguous(memory_format=torch.channels_last) if last else x), basis @ basis.mT


def on_span(y, projection):
    """``[N, C, ...]`` as ``[G, m, d]`` in fp64, projected."""
    groups = y.detach().double().unflatten(1, (len(projection), -1)).flatten(3) if y.ndim > 2 else y[..., None]
    return groups.permute(1, 0, 3, 2).flatten(1, 2) @ projection


def zca_of(x, group_size, eps=1e-5):
    """By the eigendecomposition, in fp64."""
    rows = x.detach().double().unflatten(1, (-1, group_size)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)
    centred = rows - rows.mean(1, keepdim=True)
    covariance = centred.mT @ centred / centred.shape[1]
    identity = torch.eye(group_size, device=x.device, dtype=torch.float64)
    return centred @ solvers.zca(covariance + eps * identity)


def described(**tensors):
    """What there is to know of tensors that should be finite."""
    return {
        name: f"finite, at most {t.abs().max().item():.3g}"
        if t.isfinite().all()
        else f"{int((~t.isfinite()).sum())} of {t.numel()} are not finite"
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("group_size", [16, 64, 128, 256])
@pytest.mark.parametrize(("num_iters", "last"), [(15, False), (24, True), (50, False), (50, True)])
@pytest.mark.parametrize("share", [0.1, 0.75])
def test_dependent_channels_stay_finite(name, group_size, num_iters, last, share, precision):
    dtype, setting, _ = BUDGETS[name]
    precision(setting)
    exact, projection = dependent((16, 2 * group_size, 8, 8), group_size, max(1, int(share * group_size)), last)
    x = exact.to(dtype).requires_grad_()
    layer = IterNorm2d(2 * group_size, group_size=group_size, num_iters=num_iters, impl="triton", device=DEVICE)
    y = layer(x)
    y.backward(0.01 * torch.randn_like(y))
    facts = described(y=y, dx=x.grad, d_weight=layer.weight.grad, running_whitening=layer.running_whitening)
    assert all(fact.startswith("finite") for fact in facts.values()), facts
    if num_iters > 15:
        error = relative_error(on_span(y, projection), zca_of(exact, group_size) @ projection)
        assert error < BUDGET_ON_SPAN[name], (error, facts)


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("group_size", [64, 256])
def test_fewer_samples_than_channels(name, group_size, precision):
    dtype, setting, _ = BUDGETS[name]
    precision(setting)
    layer = IterNorm1d(group_size, group_size=None, num_iters=50, impl="triton", device=DEVICE)
    for seed in range(20):
        torch.manual_seed(seed)
        x = (30 * torch.randn(3 * group_size // 4, group_size, device=DEVICE)).to(dtype).requires_grad_()
        y = layer(x)
        y.backward(torch.randn_like(y))
        facts = described(y=y, dx=x.grad, running_whitening=layer.running_whitening)
        assert all(fact.startswith("finite") for fact in facts.values()), (seed, facts)
        error = relative_error(y, zca_of(x[:, :, None], group_size)[0])
        assert error < BUDGET_ON_SPAN[name], (seed, error, facts)


@pytest.mark.parametrize("group_size", [16, 64, 128])
def test_the_gradient_on_the_span_is_that_of_fp64(group_size, precision):
    # Off the span it depends on eigenvalues that fp32 cannot tell from zero.
    precision("highest")
    exact, projection = dependent((16, group_size, 8, 8), group_size, group_size // 4)
    x = exact.float()
    layer = IterNorm2d(group_size, group_size=None, num_iters=50, impl="triton", device=DEVICE)
    reference = copy.deepcopy(layer).double()
    reference.impl = "torch"
    grad, gradients = torch.randn_like(x), []
    for which in (layer, reference):
        values = x.detach().to(which.weight.dtype).requires_grad_()
        which(values).backward(grad.to(values.dtype))
        gradients.append(on_span(values.grad, projection))
    error = relative_error(*gradients)
    assert error < 0.05, (error, described(dx=gradients[0], expected=gradients[1]))


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("group_size", [9, 64, 130])
def test_a_channel_twice_and_a_constant_one_stay_finite(name, group_size, precision, poisoned_memory):
    # Their eigenvalues are zero without any rounding.
    dtype, setting, _ = BUDGETS[name]
    precision(setting)
    x = 30 * torch.randn(16, group_size, 8, 8, device=DEVICE)
    x[:, 1::2] = x[:, : 2 * (group_size // 2) : 2]
    x[:, -1] = 1000.0
    x = x.to(dtype).requires_grad_()
    layer = IterNorm2d(group_size, group_size=None, num_iters=300, impl="triton", device=DEVICE)
    y = layer(x)
    y.backward(0.01 * torch.randn_like(y))
    facts = described(y=y, dx=x.grad, running_whitening=layer.running_whitening)
    assert all(fact.startswith("finite") for fact in facts.values()), facts


@pytest.mark.parametrize("setting", ["highest", "high"])
@pytest.mark.parametrize(("impl", "group_size"), [("torch", 32), ("torch", 256), ("auto", 1100)])
@pytest.mark.parametrize("num_iters", [15, 24, 50])
def test_the_torch_path_stays_finite(setting, impl, group_size, num_iters, precision):
    # "auto" has the iteration alone in kernels: the group is too large for the others.
    precision(setting)
    exact, _ = dependent((16, group_size, 8, 8), group_size, group_size // 4)
    x = exact.float().requires_grad_()
    layer = IterNorm2d(group_size, group_size=None, num_iters=num_iters, impl=impl, device=DEVICE)
    y = layer(x)
    y.backward(0.01 * torch.randn_like(y))
    facts = described(y=y, dx=x.grad, running_whitening=layer.running_whitening)
    assert all(fact.startswith("finite") for fact in facts.values()), facts


@pytest.mark.parametrize(("setting", "budget"), [("highest", 1e-4), ("high", 5e-3)])
@pytest.mark.parametrize("group_size", [64, 128, 256])
@pytest.mark.parametrize("num_iters", [13, 50])
def test_independent_channels_are_as_accurate_as_before(setting, budget, group_size, num_iters, precision):
    precision(setting)
    x = activation((32, group_size, 16, 16), torch.float32)
    layers = [layer_for(x.shape, group_size=None, num_iters=num_iters), None]
    layers[1] = copy.deepcopy(layers[0]).double()
    layers[1].impl = "torch"
    grad, results = torch.randn_like(x), []
    for layer in layers:
        values = x.detach().to(layer.weight.dtype).requires_grad_()
        y = layer(values)
        y.backward(grad.to(y.dtype))
        results.append((y, values.grad))
    found = [relative_error(*pair) for pair in zip(*results, strict=True)]
    assert worst(found) < budget, found


@pytest.mark.parametrize("name", BUDGETS)
def test_zca_of_few_samples_stays_finite(name, precision):
    # ZCA's kernel is the same iteration, not watched: its variances are raised instead.
    dtype, setting, _ = BUDGETS[name]
    precision(setting)
    exact, _ = dependent((16, 128, 8, 8), 64, 6)
    x = exact.to(dtype).requires_grad_()
    y = DecorrelatedBatchNorm2d(128, group_size=64, impl="triton", device=DEVICE)(x)
    y.backward(0.01 * torch.randn_like(y))
    facts = described(y=y, dx=x.grad)
    assert all(fact.startswith("finite") for fact in facts.values()), facts


@pytest.mark.parametrize("group_size", [64, 128, 192])
def test_values_whose_squares_overflow_leave_the_statistics(group_size):
    layer = IterNorm2d(group_size, group_size=None, impl="triton", device=DEVICE)
    layer(torch.randn(8, group_size, 4, 4, device=DEVICE))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    y = layer(1e20 * torch.randn(8, group_size, 4, 4, device=DEVICE))
    assert y.isnan().any()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
