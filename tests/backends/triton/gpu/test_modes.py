"""The Triton kernels among what records or transforms a call: compiled modes, fake tensors, torch.func, no samples."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

from checks import assert_same_state, relative_error, state_of
from gpu_checks import activation, layer_for

from iternorm import DecorrelatedBatchNorm2d, IterNorm2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# Both come from torch itself: a deprecated class in its graphs' memory pools, and the empty graph that makes a pool.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize(
    ("mode", "group_size"), [("reduce-overhead", 16), ("reduce-overhead", 192), ("max-autotune", 64)]
)
def test_compiled_modes_train_a_network(mode, group_size):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(16, 192, 1, bias=False),
            IterNorm2d(192, group_size=group_size),
            nn.ReLU(inplace=True),
            nn.Conv2d(192, 192, 1, bias=False),
            IterNorm2d(192, group_size=group_size),
            nn.ReLU(inplace=True),
        ).cuda()

    def train(model, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for x in batches:
            optimizer.zero_grad()
            loss = run(x).cos().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses), state_of(model)

    batches = [activation((8, 16, 14, 14), torch.float32) for _ in range(5)]
    torch._dynamo.reset()
    eager, compiled = network(), network()
    expected, expected_state = train(eager, eager)
    losses, state = train(compiled, torch.compile(compiled, mode=mode, fullgraph=True))
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    for name, value in expected_state.items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("group_size", [16, 128, 192])
def test_fake_tensors_train_as_if_on_the_gpu(group_size):
    with FakeTensorMode():
        layer = IterNorm2d(192, group_size=group_size, device="cuda")
        x = torch.empty(8, 192, 14, 14, device="cuda", requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.device == x.grad.device
        assert x.grad.shape == x.shape
        with torch.no_grad():
            assert layer.eval()(x).shape == x.shape


@pytest.mark.parametrize("solver", ["newton", "zca"])
def test_transforms_on_a_gpu_are_the_backward(solver):
    layer = layer_for((16, 64, 8, 8), impl="auto", dtype=torch.float32)
    if solver == "zca":
        layer = DecorrelatedBatchNorm2d(64, group_size=16, device="cuda")
    x = activation((16, 64, 8, 8), torch.float32)
    layer(x)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    cotangents = torch.randn(2, *y.shape, device="cuda")
    expected = [torch.autograd.grad(y, leaf, c, retain_graph=True)[0] for c in cotangents]
    batched = torch.autograd.grad(y, leaf, cotangents, is_grads_batched=True)[0]
    pulled = torch.func.vjp(layer, x)[1](cotangents[0])[0]
    assert relative_error(pulled, expected[0]) < 1e-5
    assert relative_error(batched, torch.stack(expected)) < 1e-5


def test_an_empty_batch_on_a_gpu():
    layer = layer_for((16, 64, 8, 8), impl="auto")
    before = state_of(layer)
    x = torch.empty(0, 64, 8, 8, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert_same_state(layer, before)
    assert layer.eval()(x).shape == x.shape
