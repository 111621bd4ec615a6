"""Small groups that share a tile, in Triton's interpreter: the blocks on the diagonal of its matrices."""

import pytest
import torch
from checks import correlated, layer_for, relative_error

from iternorm import reference
from iternorm.backends.triton import layout, plan
from iternorm.backends.triton.precision import NewtonSplit

# Two channels are left for a third tile of groups of 4, a smaller last group for one of 7.
CASES = [((6, 9, 5, 5), 1, 5), ((3, 130, 3, 3), 4, 5), ((4, 66, 3, 3), 8, 2), ((40, 20), 7, 5), ((6, 9, 5, 5), 2, 0)]


@pytest.mark.parametrize(("shape", "group_size", "num_iters"), CASES)
@pytest.mark.parametrize("running", ["whitening", "covariance"])
def test_output_gradients_and_statistics_are_the_references(shape, group_size, num_iters, running, poisoned_memory):
    x = correlated(*shape, dtype=torch.float32)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    options = {"group_size": group_size, "num_iters": num_iters, "running": running}
    layer, exact = layer_for(shape, **options), layer_for(shape, **options, impl="reference").double()
    exact.load_state_dict(layer.state_dict())
    grad, found = torch.randn_like(x), []
    for module, values in ((layer, x.clone(memory_format=torch.preserve_format)), (exact, x.double())):
        values.requires_grad_()
        y = module(values)
        y.backward(grad.to(y.dtype))
        statistics = (module.running_mean, getattr(module, f"running_{running}"))
        inferred = module.eval()(values.detach())
        found.append((y, values.grad, module.weight.grad, module.bias.grad, *statistics, inferred))
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < 2e-6


def test_the_gradient_of_the_weight_alone():
    x = correlated(3, 70, 4, 4, dtype=torch.float32)
    layer, grad = layer_for(x.shape, group_size=8), torch.randn_like(x)
    layer(x).backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (layer.weight, layer.bias)]
    expected = reference.iter_norm(x.double(), *inputs, group_size=8, num_iters=5)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    for parameter, gradient in zip((layer.weight, layer.bias), wanted, strict=True):
        assert relative_error(parameter.grad, gradient) < 2e-6


def test_a_group_without_variance_leaves_the_others_alone():
    x = correlated(6, 8, 5, 5, dtype=torch.float32)
    x[:, 2:4] = 7.0
    layer = layer_for(x.shape, group_size=2, eps=0.0)
    values = x.clone().requires_grad_()
    y = layer(values)
    y.backward(x.cos())
    kept = [0, 1, 4, 5, 6, 7]
    assert y[:, 2:4].isnan().all()
    assert values.grad[:, 2:4].isnan().all()
    inputs = [t.detach()[..., kept, :, :] if t.ndim > 1 else t.detach()[kept] for t in (x, layer.weight, layer.bias)]
    inputs = [t.double().requires_grad_() for t in inputs]
    expected = reference.iter_norm(*inputs, group_size=2, num_iters=5, eps=0.0)
    wanted = torch.autograd.grad(expected, inputs, x.cos()[:, kept].double())
    found = (values.grad[:, kept], layer.weight.grad[kept], layer.bias.grad[kept])
    assert relative_error(y[:, kept], expected) < 2e-6
    assert all(relative_error(a, e) < 2e-6 for a, e in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("split", "tolerance"), [(NewtonSplit.TWO_HALVES, 1e-6), (NewtonSplit.ONE_HALF, 1e-3)])
def test_a_small_gradient_beside_a_large_one_is_as_exact(split, tolerance, monkeypatch):
    monkeypatch.setattr(plan, "newton_split", lambda *asked: split)
    monkeypatch.setattr(plan, "_plans", {})
    x = correlated(6, 16, 5, 5, dtype=torch.float32)
    layer, grad = layer_for(x.shape, group_size=4, affine=False), torch.randn_like(x)
    grad[:, 4:8] *= 1e-8
    values, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    layer(values).backward(grad)
    reference.iter_norm(exact, group_size=4).backward(grad.double())
    assert values.grad is not None
    assert exact.grad is not None
    for actual, expected in zip(values.grad.split(4, 1), exact.grad.split(4, 1), strict=True):
        assert relative_error(actual, expected) < tolerance


@pytest.mark.parametrize("group_size", [4, 16])
@pytest.mark.parametrize(
    ("split", "size", "tolerance"), [(NewtonSplit.TWO_HALVES, 1e-4, 2e-6), (NewtonSplit.ONE_HALF, 1e-6, 2e-3)]
)
def test_a_small_channel_beside_a_large_one_is_as_exact(split, size, tolerance, group_size, monkeypatch):
    monkeypatch.setattr(plan, "newton_split", lambda *asked: split)
    monkeypatch.setattr(plan, "_plans", {})
    x, grad = correlated(6, 16, 5, 5, dtype=torch.float32), torch.randn(6, 16, 5, 5)
    x[:, ::2] *= size
    layer = layer_for(x.shape, group_size=group_size, affine=False)
    values, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = layer(values), reference.iter_norm(exact, group_size=group_size)
    y.backward(grad)
    expected.backward(grad.double())
    assert values.grad is not None
    assert exact.grad is not None
    for actual, wanted in ((y, expected), (values.grad, exact.grad)):
        channels = zip(actual.split(1, 1), wanted.split(1, 1), strict=True)
        assert all(relative_error(found, right) < tolerance for found, right in channels)


def test_which_groups_share_tiles():
    def tiles(channels, group_size, num_iters=5, **options):
        x = torch.empty(4, channels, 5, 5)
        found = plan.plan_for(x, None, None, group_size, num_iters, None, **options).layout
        return found.num_groups, found.group_size, found.padded

    assert tiles(64, 1) == tiles(64, 8) == (1, 64, 64)
    assert tiles(12, 1) == (1, 12, 16)
    # 21 groups of 3 fit 64 channels.
    assert tiles(130, 3) == (3, 63, 64)
    # Alone: larger groups, all channels together, ZCA, groups that may stop at different steps, and ranks.
    assert tiles(64, layout.LARGEST_SHARED + 1)[0] == 8
    assert tiles(8, 8) == (1, 8, 16)
    assert tiles(64, 8, exact=True) == tiles(64, 8, num_iters=13) == tiles(64, 8, ranks=2) == (8, 8, 16)
