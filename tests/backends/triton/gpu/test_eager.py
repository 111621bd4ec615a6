"""On a GPU a step that is launched from C++ is the step that Python launches, bit for bit."""

from typing import Any

import pytest
import torch
from checks import correlated

from iternorm import DecorrelatedBatchNorm2d, GroupWhitening2d, IterNorm2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    pytest.importorskip("triton")
    from iternorm.backends.triton.eager import library

    library.wait()


def steps(layer, shape, dtype, channels_last, residual, count=3):
    torch.manual_seed(2)
    found, name = [], ""
    for _ in range(count):
        format = torch.channels_last if channels_last else torch.contiguous_format
        x, z, grad = (
            correlated(*shape, dtype=torch.float32).cuda().to(dtype).contiguous(memory_format=format) for _ in range(3)
        )
        x.requires_grad_()
        z = z.requires_grad_() if residual else None
        y = layer(x, residual=z)
        y.backward(grad)
        found += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        found += [] if z is None else [z.grad]
        name = y.grad_fn.name()
    return [*found, *(value.clone() for value in layer.state_dict().values())], name


@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_from_cpp_are_those_from_python(dtype, channels_last, residual, group_size, monkeypatch):
    from iternorm.backends.triton.eager import library

    shape = (16, 96, 8, 8)
    layers = [IterNorm2d(96, group_size=group_size, activation="relu").cuda() for _ in range(2)]
    found, name = steps(layers[0], shape, dtype, channels_last, residual)
    assert "_WhitenEager" not in name
    monkeypatch.setattr(library, "_found", None)
    expected, name = steps(layers[1], shape, dtype, channels_last, residual)
    assert "_WhitenEager" in name
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_whitened_on_their_own_from_cpp(dtype, channels_last, monkeypatch):
    from iternorm.backends.triton.eager import library

    format = torch.channels_last if channels_last else torch.contiguous_format
    values = [correlated(8, 96, 8, 8, dtype=torch.float32).cuda().to(dtype) for _ in range(2)]
    x, grad = (value.contiguous(memory_format=format) for value in values)
    x.requires_grad_()
    results = []
    for found in (library._found, None):
        monkeypatch.setattr(library, "_found", found)
        layer = GroupWhitening2d(96, activation="relu").cuda()
        # The first batch is checked in Python.
        layer(x)
        y: Any = layer(x)
        assert ("_WhitenItems" in y.grad_fn.name()) == (found is None)
        results.append((y, *torch.autograd.grad(y, (x, *layer.parameters()), grad)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_other_streams_and_graphs(monkeypatch):
    from iternorm.backends.triton.eager import library

    layer = DecorrelatedBatchNorm2d(64).cuda()
    values = correlated(32, 64, 8, 8, dtype=torch.float32).cuda()

    def step() -> Any:
        x = values.clone().requires_grad_()
        y = layer(x)
        return y, torch.autograd.grad(y, x, values)[0], y.grad_fn.name()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        y, grad, name = step()
    torch.cuda.current_stream().wait_stream(stream)
    assert "_WhitenEager" not in name
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_grad, name = step()
    assert "_WhitenEager" not in name
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, y)
    assert torch.equal(captured_grad, grad)
    monkeypatch.setattr(library, "_found", None)
    assert torch.equal(step()[0], y)


@pytest.mark.parametrize("residual", [False, True])
def test_a_compiled_layer_is_launched_from_cpp(residual, monkeypatch):
    """The same bits as before the operators were registered."""
    from iternorm.whitening import fused

    def train(layer):
        compiled, found = torch.compile(layer, fullgraph=True), []
        torch.manual_seed(4)
        for _ in range(3):
            x, z = (torch.randn(8, 64, 6, 6, device="cuda").bfloat16().requires_grad_() for _ in range(2))
            y = torch.relu(compiled(x) + z) if residual else compiled(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        return [*found, *(value.clone() for value in layer.state_dict().values())]

    monkeypatch.setattr(fused, "_registration", object())
    expected = train(IterNorm2d(64).cuda())
    torch.compiler.reset()
    monkeypatch.setattr(fused, "_registration", None)
    fused._register_compiled()
    from iternorm.backends.triton import run

    for name in ("forward", "backward"):
        # Python launches nothing.
        monkeypatch.delattr(run, name)
    found = train(IterNorm2d(64).cuda())
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
