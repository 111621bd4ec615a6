"""The layers by the C kernels: the same numbers as by torch, gradients, and when each is taken."""

from functools import partial

import pytest
import torch
from checks import channels_last, correlated, relative_error

import iternorm
from iternorm import functional
from iternorm.backends.native import build, verbs
from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import dispatch


@pytest.fixture(scope="module", autouse=True)
def _built():
    for dtype in (torch.float32, torch.float64):
        if reason := build.failure(dtype):
            pytest.skip(reason)


@pytest.fixture
def calls(monkeypatch):
    """Which verbs ran, and where."""
    seen = []
    for name in ("moments", "cross_moments", "apply", "apply_backward"):
        for module in (torch_verbs, verbs):
            function, where = getattr(module, name), module.__name__.split(".")[2]
            monkeypatch.setattr(
                module, name, lambda *a, f=function, n=name, w=where: (seen.append(f"{w} {n}"), f(*a))[1]
            )
    return seen


NATIVE = ["native moments", "native apply", "native cross_moments", "native apply_backward"]
PLAIN = [name.replace("native", "torch") for name in NATIVE]


def strided(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [iternorm.IterNorm2d, iternorm.DecorrelatedBatchNorm2d])
def test_a_training_step_is_that_of_torch(kind, layout, calls):
    x = correlated(16, 70, 9, 9, dtype=torch.float32).contiguous(memory_format=layout)
    grad = torch.randn_like(x)
    results = []
    for impl in ("native", "torch"):
        layer, leaf = kind(70, group_size=32, impl=impl), x.clone().requires_grad_()
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2, 70))
        y = layer(leaf)
        y.backward(grad)
        results.append([y, leaf.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()])
        assert y.stride() == leaf.grad.stride() == x.stride()
    assert calls == NATIVE + PLAIN
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 5e-6


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("group_size", [1, 4, 6])
def test_gradients(group_size, layout):
    x = correlated(5, 6, 3, 2).contiguous(memory_format=layout).requires_grad_()
    weight, bias = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)

    def normalize(*args):
        return functional.iter_norm(
            args[0], weight=args[1], bias=args[2], training=True, group_size=group_size, eps=1e-3, impl="native"
        )

    inputs = (x, weight.detach().requires_grad_(), bias.detach().requires_grad_())
    assert torch.autograd.gradcheck(normalize, inputs)
    # The kernels are no part of a graph of the backward: random directions are enough.
    assert torch.autograd.gradgradcheck(normalize, inputs, fast_mode=True)


def test_auto_takes_the_kernels_where_they_are_faster(calls):
    for x, group_size, expected in (
        (torch.randn(8, 32, 20, 20), 16, NATIVE),
        (torch.randn(8, 32, 20, 20), 2, PLAIN),
        (torch.randn(8, 32, 20, 20).double(), 16, NATIVE),
        (torch.randn(8, 32, 20, 20).bfloat16(), 16, PLAIN),
        (torch.randn(4, 32, 20, 20), 16, PLAIN),
        (channels_last(torch.randn(8, 32, 20, 20)), 32, NATIVE),
        (channels_last(torch.randn(8, 32, 20, 20)), 16, PLAIN),
        (torch.randn(8, 32, 20, 40)[..., ::2], 16, NATIVE),
        (torch.randn(8, 400, 32).transpose(1, 2), 32, NATIVE),
        (torch.randn(2048, 32), 16, PLAIN),
        (torch.randn(2048, 64)[:, ::2], 16, PLAIN),
    ):
        calls.clear()
        leaf = x.requires_grad_()
        y = functional.iter_norm(leaf, training=True, group_size=group_size)
        y.backward(torch.randn_like(y))
        assert calls == expected


@pytest.mark.parametrize("solver", ["newton", "zca"])
@pytest.mark.parametrize("impl", ["auto", "native"])
def test_the_results_do_not_depend_on_how_memory_is_laid_out(impl, solver, calls):
    """To the last bit: ZCA's backward would enlarge any difference, and module tests compare the two."""
    x, grad = torch.randn(2, 8, 32, 20, 20)
    normalize = (
        partial(functional.iter_norm, group_size=32) if solver == "newton" else functional.decorrelated_batch_norm
    )
    results = []
    for x_as, grad_as in (
        (x, grad),
        (strided(x), grad),
        (x, strided(grad)),
        (x, channels_last(grad)),
        (x.transpose(2, 3).contiguous().transpose(2, 3), grad),
    ):
        calls.clear()
        leaf = x_as.detach().requires_grad_()
        y = normalize(leaf, training=True, impl=impl)
        y.backward(grad_as)
        results.append((y, leaf.grad))
        assert calls == NATIVE
        assert y.is_contiguous()
    for y, grad_x in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(grad_x, results[0][1])


def test_a_gradient_of_planes_for_rows(calls):
    x, grad = torch.randn(2, 8, 32, 20, 20)
    gradients = []
    for grad_as in (channels_last(grad), grad, grad[:, :, :1, :1].expand_as(grad)):
        leaf = channels_last(x).requires_grad_()
        y = functional.iter_norm(leaf, training=True, group_size=32, impl="native")
        y.backward(grad_as)
        gradients.append(leaf.grad)
        assert calls == NATIVE
        calls.clear()
    assert torch.equal(*gradients[:2])
    leaf = x.clone().requires_grad_()
    functional.iter_norm(leaf, training=True, group_size=32, impl="torch").backward(grad[:, :, :1, :1].expand_as(grad))
    assert relative_error(gradients[2], leaf.grad) < 5e-6


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_of_zeros_that_has_no_memory(layout, calls):
    leaf = torch.randn(8, 32, 20, 20).contiguous(memory_format=layout).requires_grad_()
    y = functional.iter_norm(leaf, training=True, group_size=32)
    y.sgn().sum().backward()
    assert calls == NATIVE
    assert not leaf.grad.any()


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.randn(4, 8, 6, 6).half(), "float32 and float64, the input is torch.float16"),
        (torch.randn(4, 8, 6, 6, device="meta"), "run on the CPU, the input is on meta"),
    ],
    ids=["half", "meta"],
)
def test_the_name_raises_where_the_kernels_cannot_run(x, reason):
    with pytest.raises(ValueError, match=f'impl="native" cannot run: .*{reason}.*; use impl="auto"'):
        functional.iter_norm(x, training=True, group_size=4, impl="native")


@pytest.mark.parametrize("impl", ["auto", "native"])
def test_a_compiled_step_is_the_eager_one(impl, calls):
    layer = iternorm.IterNorm2d(32, group_size=16, impl=impl)
    x = torch.randn(8, 32, 20, 20)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.reset_running_stats()
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        results.append([leaf.grad, layer.running_mean.clone(), layer.running_whitening.clone()])
    assert calls == NATIVE * 2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_does_not_reach_the_kernels(calls):
    x = torch.randn(8, 32, 20, 20)
    y = functional.iter_norm(x, training=True, group_size=16, impl="native")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            functional.iter_norm(x, training=True, group_size=16, impl="native"), y, rtol=0, atol=0
        )


def test_operators_take_the_choice():
    x = torch.randn(6, 8, 5, 5)
    for impl, module in (("native", verbs), ("torch", torch_verbs)):
        for a, b in zip(torch.ops.iternorm.moments(x, 4, impl), module.moments(x, 4), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.library.opcheck(torch.ops.iternorm.moments.default, (x, 4, "native"))
    assert dispatch.verbs_for("torch", 4, x) is torch_verbs


def test_eval_and_a_copy_of_the_layer():
    layer = iternorm.IterNorm2d(8, group_size=4, impl="native")
    layer(torch.randn(4, 8, 5, 5))
    x = torch.randn(4, 8, 5, 5)
    expected = iternorm.IterNorm2d(8, group_size=4, impl="torch")
    expected.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(x), expected.eval()(x), rtol=0, atol=0)
