"""A step that is launched from C++ is the step that Python launches, bit for bit."""

import copy
import pickle
from typing import Any

import pytest
import torch
from checks import correlated
from torch import nn
from torch.utils.checkpoint import checkpoint

from iternorm import GroupWhitening2d, InstanceWhitening2d, IterNorm2d
from iternorm.backends.torch.verbs import is_rows
from iternorm.backends.triton import layout
from iternorm.backends.triton.eager import library

SHAPE = (5, 6, 2, 2)


def batch(dtype=torch.float32, shape=SHAPE) -> torch.Tensor:
    return correlated(*shape, dtype=torch.float32).to(dtype)


def steps(layer, count=2, residual=False, channels_last=False, dtype=torch.float32, shape=SHAPE) -> list[torch.Tensor]:
    """Outputs, gradients and state of training steps."""
    found = []
    torch.manual_seed(1)
    for _ in range(count):
        format = torch.channels_last if channels_last else torch.contiguous_format
        x = batch(dtype, shape).contiguous(memory_format=format).requires_grad_()
        z = batch(dtype, shape).contiguous(memory_format=format).requires_grad_() if residual else None
        y = layer(x, residual=z)
        y.backward(batch(dtype, shape))
        found += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        found += [] if z is None else [z.grad]
    return [*found, *(value.clone() for value in layer.state_dict().values())]


CASES = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"activation": "relu"},
    {"num_iters": 2, "bias": False, "running": "covariance"},
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_steps_from_cpp_are_those_from_python(arguments, driver, poisoned_memory):
    options = {"group_size": 4, "num_iters": 1, "impl": "triton", **arguments}
    layer, other = IterNorm2d(6, **options), IterNorm2d(6, **options)
    found = steps(layer)
    # The first batch is checked in Python; the next is launched from C++, three kernels each way.
    assert len(driver.launched) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_found", None)
        expected = steps(other)
    assert len(driver.launched) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_contiguous_memory_that_kernels_read_in_rows_is_copied_there_and_back(activation, driver, monkeypatch):
    # As above 128 channels, which take the interpreter long.
    monkeypatch.setattr(layout, "is_read_in_place", lambda x, group_size: is_rows(x))
    options = {"group_size": 4, "num_iters": 1, "impl": "triton", "activation": activation}
    layer, other = IterNorm2d(6, **options), IterNorm2d(6, **options)
    found = steps(layer, residual=True)
    assert len(driver.launched) == 6
    assert found[0].is_contiguous()
    assert found[1].is_contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_found", None)
        expected = steps(other, residual=True)
    assert len(driver.launched) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    # Strides that a result would not have are left to Python.
    x = batch(shape=(5, 6, 2, 4))[..., ::2].requires_grad_()
    layer(x)
    layer(x).sum().backward()
    assert len(driver.launched) == 6


@pytest.mark.parametrize(("dtype", "channels_last"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_residual_in_dtypes_and_layouts(dtype, channels_last, driver, poisoned_memory):
    layers = [IterNorm2d(6, group_size=4, num_iters=1, impl="triton", activation="relu") for _ in range(2)]
    arguments = {"residual": True, "channels_last": channels_last, "dtype": dtype}
    found = steps(layers[0], **arguments)
    assert len(driver.launched) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_found", None)
        expected = steps(layers[1], **arguments)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_residual_in_other_strides_has_its_gradient(activation, driver):
    layer = IterNorm2d(6, group_size=4, num_iters=1, impl="triton", activation=activation)
    x, z = batch().requires_grad_(), batch().contiguous(memory_format=torch.channels_last).requires_grad_()
    first, second = ((layer(x, residual=z)).square().sum() for _ in range(2))
    assert len(driver.launched) == 3
    for ours, theirs in zip(torch.autograd.grad(second, (x, z)), torch.autograd.grad(first, (x, z)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.rare
def test_groups_above_64_channels(driver, poisoned_memory):
    shape = (20, 66, 2, 1)
    found, expected = (IterNorm2d(66, group_size=None, num_iters=1, impl="triton") for _ in range(2))
    found = steps(found, 2, shape=shape)
    assert len(driver.launched) == 9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_found", None)
        expected = steps(expected, 2, shape=shape)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def sample_steps(layer, channels_last: bool) -> list[torch.Tensor]:
    """Outputs and gradients of two steps of a layer that whitens each sample on its own."""
    found = []
    torch.manual_seed(1)
    for _ in range(2):
        format = torch.channels_last if channels_last else torch.contiguous_format
        shape = (2, 8, 4, 4)
        x = batch(shape=shape).contiguous(memory_format=format).requires_grad_()
        y = layer(x)
        parameters = list(layer.parameters())
        found += [y.detach(), *torch.autograd.grad(y, [x, *parameters], batch(shape=shape))]
    return found


@pytest.mark.parametrize(
    ("kind", "arguments", "channels_last"),
    [
        (GroupWhitening2d, {}, False),
        (GroupWhitening2d, {"activation": "relu"}, True),
        (GroupWhitening2d, {"affine": False}, True),
        (GroupWhitening2d, {"bias": False}, False),
        (InstanceWhitening2d, {}, True),
    ],
)
def test_samples_whitened_on_their_own(kind, arguments, channels_last, driver, poisoned_memory):
    options = {"num_groups": 4} if kind is GroupWhitening2d else {"group_size": 5}
    layer, other = (kind(8, num_iters=1, impl="triton", **options, **arguments) for _ in range(2))
    found = sample_steps(layer, channels_last)
    # The second batch's: three forward, and three backward with the sum of d(γ) and d(β).
    assert len(driver.launched) == (6 if arguments == {"affine": False} else 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_found", None)
        expected = sample_steps(other, channels_last)
    assert len(driver.launched) == (6 if arguments == {"affine": False} else 7)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_a_graph_of_the_backward_of_samples_and_settings_that_change(driver):
    layer, other = (GroupWhitening2d(8, num_groups=4, num_iters=1, impl="triton") for _ in range(2))
    x, weights = batch(shape=(2, 8, 4, 4)).requires_grad_(), batch(shape=(2, 8, 4, 4))
    for _ in range(2):
        layer(x)
    results = []
    for each in (layer, other):
        (grad,) = torch.autograd.grad((each(x) * weights).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), [x, *each.parameters()][:2]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for each in (layer, other):
        each.eps, each.num_groups = 0.1, 2
    assert torch.equal(layer(x), other(x))
    driver.launched.clear()
    assert torch.equal(layer(x), other(x))
    assert len(driver.launched) == 6
    assert torch.equal(copy.deepcopy(layer)(x), other(x))


def used_layer(**arguments) -> Any:
    """A layer whose next batch, if it is like those before, is launched from C++."""
    layer = IterNorm2d(6, group_size=4, num_iters=1, impl="triton", **arguments)
    for _ in range(2):
        layer(batch().requires_grad_())
    return layer


def like(layer) -> Any:
    """A layer in the same state, whose next batch is launched from Python."""
    other = IterNorm2d(6, group_size=4, num_iters=1, impl="triton", activation=layer.activation)
    other.load_state_dict(layer.state_dict())
    return other


def test_a_graph_of_the_backward(driver):
    layer = used_layer()
    x, weights = batch().requires_grad_(), batch()
    other = like(layer)
    driver.launched.clear()
    results = []
    for each in (layer, other):
        (grad,) = torch.autograd.grad((each(x) * weights).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), [x, each.weight]))
    assert len(driver.launched) == 3
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_many_gradients_at_once(driver):
    layer = used_layer()
    x, grads = batch().requires_grad_(), torch.stack([batch(), batch()])
    y = layer(x)
    (together,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(together, grads, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(y, x, grad, retain_graph=True)[0], rtol=1e-4, atol=1e-5)


def test_a_graph_is_kept_or_freed(driver):
    layer, x = used_layer(), batch().requires_grad_()
    y = layer(x)
    first = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.square().sum(), x)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.square().sum(), x)


def test_an_input_that_was_changed_is_noticed(driver):
    layer, leaf = used_layer(), batch().requires_grad_()
    x = leaf * 1
    y = layer(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_that_are_asked_for(driver):
    layer = used_layer(activation="relu")
    layer.bias.requires_grad_(False)
    other = like(layer)
    other.bias.requires_grad_(False)
    x, z = batch().requires_grad_(), batch()
    for each in (layer, other):
        each(x, residual=z).square().sum().backward()
    assert layer.bias.grad is None
    assert torch.equal(layer.weight.grad, other.weight.grad)


def test_an_input_without_a_gradient_goes_through_python(driver):
    layer, x = used_layer(), batch()
    driver.launched.clear()
    other = like(layer)
    for each in (layer, other):
        each(x).square().sum().backward()
    assert not driver.launched
    assert torch.equal(layer.weight.grad, other.weight.grad)


def test_without_gradients_at_all(driver):
    layer = used_layer()
    other = like(layer)
    driver.launched.clear()
    x = batch()
    with torch.no_grad():
        y = layer(x)
        assert len(driver.launched) == 3
        assert not y.requires_grad
        assert torch.equal(y, other(x))


@pytest.mark.parametrize("change", ["momentum", "precision", "strides", "shape", "weight"])
def test_a_batch_unlike_the_one_before(change, driver, precision):
    layer, x = used_layer(), batch().requires_grad_()
    other = like(layer)
    for each in (layer, other):
        if change == "momentum":
            each.momentum = 0.5
        elif change == "weight":
            each.weight = nn.Parameter(torch.arange(6.0, dtype=torch.bfloat16))
    if change == "precision":
        precision("high")
    elif change == "strides":
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    elif change == "shape":
        x = x.detach()[:4].requires_grad_()
    driver.launched.clear()
    for _ in range(2):
        results = [
            (*torch.autograd.grad((y := each(x)).square().sum(), [x, each.weight]), y) for each in (layer, other)
        ]
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(layer.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    # The interpreter knows one precision, so there is no other step to take.
    assert (driver.launched == []) == (change == "precision")


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has the older way alone")
@pytest.mark.parametrize("allowed", ["tf32", "ieee"])
def test_tf32_that_is_allowed_in_the_newer_way(allowed, driver, precision):
    # `precision` takes it back.
    torch.backends.cuda.matmul.fp32_precision = allowed
    layer = used_layer()
    assert len(driver.launched) == 3
    other = like(layer)
    x = batch().requires_grad_()
    for each in (layer, other):
        each(x).square().sum().backward()
    assert len(driver.launched) == 9
    assert torch.equal(layer.weight.grad, other.weight.grad)


def test_memory_that_is_not_aligned(driver):
    layer = used_layer()
    other = like(layer)
    driver.launched.clear()
    size = batch().numel()
    x = torch.empty(size + 1)[1:].view(SHAPE).copy_(batch()).requires_grad_()
    for each in (layer, other):
        each(x)
    assert not driver.launched
    assert torch.equal(layer.running_whitening, other.running_whitening)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_of_zeros_that_has_no_memory(compiled, driver):
    layer = used_layer() if compiled else like(used_layer())
    x = batch().requires_grad_()
    layer(x).sgn().sum().backward()
    assert not x.grad.any()


def test_checkpointed_and_saved_elsewhere(driver):
    layer, x = used_layer(), batch().requires_grad_()
    expected = torch.autograd.grad(like(layer)(x).square().sum(), x)[0]
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        y = layer(x)
    assert packed
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)
    layer.load_state_dict(like(layer).state_dict())
    y = checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)


def test_copies_begin_anew(driver):
    layer, x = used_layer(), batch().requires_grad_()
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        driver.launched.clear()
        each(x)
        assert not driver.launched or len(driver.launched) == 3
        assert torch.equal(each.weight, layer.weight)


def test_a_launch_that_fails_raises(driver):
    layer, x = used_layer(), batch().requires_grad_()
    driver.failing = 719
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        layer(x)
    driver.failing = 0
    y = layer(x)
    driver.failing = 719
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        y.sum().backward()


def test_a_thread_that_has_no_context_is_left_to_triton(driver):
    layer, x = used_layer(), batch().requires_grad_()
    other = like(layer)
    # CUDA's error for a thread that has not used it yet. Triton's launches give it a context.
    driver.failing = 201
    driver.launched.clear()
    for each in (layer, other):
        each(x).square().sum().backward()
    assert not driver.launched
    assert torch.equal(layer.weight.grad, other.weight.grad)
    assert torch.equal(layer.running_whitening, other.running_whitening)


def test_an_error_of_pythons_backward_reaches_the_caller(driver, monkeypatch):
    layer, x = used_layer(), batch().requires_grad_()
    y = layer(x)

    def fail(*arguments):
        raise KeyError("a reason")

    monkeypatch.setattr("iternorm.whitening.fused._graph_backward", fail)
    with pytest.raises(KeyError, match="a reason"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
