"""On a GPU a step that is launched from C++ is the step that Python launches, bit for bit."""

import pytest
import torch
from checks import correlated

from iternorm import DecorrelatedBatchNorm2d, IterNorm2d

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    from iternorm.backends.triton.eager import library

    library.wait()


def steps(layer, shape, dtype, channels_last, residual, count=3):
    torch.manual_seed(2)
    found = []
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
    return [*found, *(value.clone() for value in layer.state_dict().values())], y.grad_fn.name()


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


def test_other_streams_and_graphs(monkeypatch):
    from iternorm.backends.triton.eager import library

    layer = DecorrelatedBatchNorm2d(64).cuda()
    x = correlated(32, 64, 8, 8, dtype=torch.float32).cuda().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            y = layer(x)
            (grad,) = torch.autograd.grad(y, x, x.detach())
    torch.cuda.current_stream().wait_stream(stream)
    assert "_WhitenEager" not in y.grad_fn.name()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
        (captured_grad,) = torch.autograd.grad(captured, x, x.detach())
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, y)
    assert torch.equal(captured_grad, grad)
    monkeypatch.setattr(library, "_found", None)
    assert torch.equal(layer(x), y)
