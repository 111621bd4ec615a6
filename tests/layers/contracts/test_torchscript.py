"""TorchScript: a trace saves, in eval and in training; scripting is refused with what to use instead."""

import copy
import io
from typing import Any

import pytest
import torch
from checks import relative_error, skip_without_kernels
from torch import nn

import iternorm
from iternorm import DecorrelatedBatchNorm2d, IterNorm2d, SyncIterNorm

# TorchScript itself is deprecated, and a trace remarks on every size that Python code looks at.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

LAYERS = {
    "newton": lambda: IterNorm2d(8, group_size=3),
    "native": lambda: IterNorm2d(8, group_size=4, impl="native"),
    "reference": lambda: IterNorm2d(8, group_size=3, impl="reference"),
    "averages": lambda: IterNorm2d(8, group_size=3, momentum=None, running="covariance"),
    "no statistics": lambda: IterNorm2d(8, track_running_stats=False, bias=False),
    "relu": lambda: IterNorm2d(8, activation="relu"),
    "sync": lambda: SyncIterNorm(8, group_size=3),
    **{s: lambda s=s: DecorrelatedBatchNorm2d(8, group_size=3, solver=s) for s in ("zca", "pca", "cholesky")},
}


def saved_and_loaded(traced):
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_trace_saves_and_runs_on_another_batch(name, training):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), LAYERS[name](), nn.Softplus()).double()
    model(torch.randn(8, 3, 8, 8).double())
    model.train(training)
    traced = torch.jit.trace(model, torch.randn(4, 3, 8, 8).double(), check_trace=False)
    loaded = saved_and_loaded(traced)
    model.load_state_dict(loaded.state_dict())
    x = torch.randn(7, 3, 9, 6).double()
    outputs = []
    for module in (loaded, model):
        outputs.append(module(x))
        outputs[-1].cos().sum().backward()
    assert relative_error(*outputs) < 1e-12
    for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        # The convolution's bias has a gradient of zero in training.
        assert (ours.grad - theirs.grad).norm() < 1e-9 * (1 + theirs.grad.norm())
    for ours, theirs in zip(loaded.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    if training and name != "no statistics":
        assert model[1].num_batches_tracked == 3


def test_the_kernel_of_eval_does_not_leave_a_constant_in_the_trace():
    skip_without_kernels()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = IterNorm2d(8, group_size=3, impl="triton").to(device).eval()
    layer.running_mean.normal_()
    with torch.no_grad():
        traced: Any = torch.jit.trace(layer, torch.randn(4, 8, 3, 3, device=device), check_trace=False)
        x = torch.randn(4, 8, 3, 3, device=device)
        torch.testing.assert_close(traced(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [IterNorm2d, SyncIterNorm, DecorrelatedBatchNorm2d])
def test_scripting_is_refused_with_what_to_use(kind, training):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), kind(8), nn.ReLU()).train(training)
    layers = list(model)
    with pytest.raises(
        TypeError, match=rf"torch\.jit\.script cannot compile {kind.__name__}; script what iternorm\.fold"
    ):
        torch.jit.script(model)
    assert list(model) == layers


def test_what_it_says_to_use_works():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), IterNorm2d(8), nn.ReLU())
    x = torch.randn(8, 3, 6, 6)
    model(x)
    model.eval()
    scripted = saved_and_loaded(torch.jit.script(iternorm.fold(copy.deepcopy(model))[0]))
    assert relative_error(scripted(x), model(x)) < 1e-5
