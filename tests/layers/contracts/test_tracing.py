"""Graphs of a network that somebody else records: torch.fx, fake tensors, make_fx, aot_module, memory estimates."""

import copy

import pytest
import torch
from checks import assert_same_state, correlated, state_of
from functorch.compile import aot_module, nop
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from iternorm import DecorrelatedBatchNorm2d, IterNorm2d, SyncIterNorm, functional

KINDS = (IterNorm2d, DecorrelatedBatchNorm2d, SyncIterNorm)


class Residual(nn.Module):
    """A block as networks have it: the layer in the middle of branches, twice, and a function."""

    def __init__(self, kind=IterNorm2d, **words):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(kind(6, group_size=4, **words) for _ in range(2))

    def forward(self, x):
        y = self.norms[0](self.conv(x)).relu()
        return self.norms[1](y + x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fx_traces_a_layer_as_one_node(kind, training):
    model = Residual(kind).train(training)
    traced = fx.symbolic_trace(copy.deepcopy(model))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["conv", "norms.0", "norms.1"]
    x = correlated(8, 6, 5, 5, dtype=torch.float32)
    torch.testing.assert_close(traced(x), model(x))
    assert_same_state(traced, state_of(model))
    # A graph of a graph, as passes over it make them.
    torch.testing.assert_close(fx.symbolic_trace(traced)(x), model(x))


def test_fx_traces_with_a_tracer_that_names_nodes_by_their_path():
    # Extractors of features look at the path of a node's module while it is made.
    class Extractor(fx.Tracer):
        def __init__(self):
            super().__init__()
            self.seen = {}
            self.path = ""

        def call_module(self, m, forward, args, kwargs):
            outside, self.path = self.path, self.path_of_module(m)
            try:
                return super().call_module(m, forward, args, kwargs)
            finally:
                self.path = outside

        def create_proxy(self, *args, **kwargs):
            proxy = super().create_proxy(*args, **kwargs)
            self.seen[proxy.node.name] = self.path
            return proxy

    tracer = Extractor()
    tracer.trace(Residual())
    assert {"norms.0", "norms.1"} <= set(tracer.seen.values())


def test_fx_traces_the_functions():
    def function(x, weight):
        y = functional.iter_norm(x, weight=weight, training=True, group_size=3)
        return functional.decorrelated_batch_norm(y, training=True, group_size=2)

    traced = fx.symbolic_trace(function)
    x, weight = correlated(16, 6), torch.rand(6).double()
    torch.testing.assert_close(traced(x, weight), function(x, weight))
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [
        functional.iter_norm,
        functional.decorrelated_batch_norm,
    ]


@pytest.mark.parametrize("impl", ["auto", "torch", "native", "reference"])
@pytest.mark.parametrize("kind", [IterNorm2d, DecorrelatedBatchNorm2d])
def test_fake_tensors_train(kind, impl):
    with FakeTensorMode():
        model = Residual(kind, impl=impl)
        x = torch.empty(8, 6, 16, 16, requires_grad=True).contiguous(memory_format=torch.channels_last)
        y = model(x)
        assert y.shape == x.shape
        assert y.is_contiguous(memory_format=torch.channels_last)
        y.sum().backward()
        assert {p.grad.shape for p in model.parameters()} == {p.shape for p in model.parameters()}
        assert model.eval()(x).shape == x.shape


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_a_training_step(tracing_mode):
    model = Residual()
    x = correlated(8, 6, 5, 5, dtype=torch.float32)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def step(parameters, buffers, x):
        y = functional_call(model, (parameters, buffers), (x,)).sin().sum()
        return torch.autograd.grad(y, list(parameters.values())), buffers

    clones = {name: value.clone() for name, value in buffers.items()}
    graph = make_fx(step, tracing_mode=tracing_mode)(parameters, clones, x)
    before = {name: value.clone() for name, value in buffers.items()}
    gradients, updated = graph(parameters, before, x)
    expected, expected_buffers = step(parameters, {name: value.clone() for name, value in buffers.items()}, x)
    torch.testing.assert_close(gradients, expected)
    torch.testing.assert_close(updated, expected_buffers)


def test_aot_module_trains():
    model = Residual()
    eager = copy.deepcopy(model)
    recorded = aot_module(model, nop)
    x = correlated(8, 6, 5, 5, dtype=torch.float32)
    for run in (recorded, eager):
        run(x).sin().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))


def test_a_dispatch_mode_sees_the_operators():
    layer = IterNorm2d(6)
    x = correlated(8, 6, 5, 5, dtype=torch.float32)
    expected = copy.deepcopy(layer)(x)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 6, 4, 4), (3, 6, 0, 4)])
@pytest.mark.parametrize("affine", [True, False])
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(shape, training, affine):
    for kind in KINDS:
        layer = kind(6, group_size=4, affine=affine).train(training)
        layer(correlated(8, 6, 3, 3, dtype=torch.float32))
        before = state_of(layer)
        x = torch.empty(shape, requires_grad=True)
        y = layer(x)
        assert y.shape == shape
        assert y.data_ptr() != x.data_ptr() or y is not x
        y.sum().backward()
        assert x.grad.shape == shape
        assert all((p.grad == 0).all() for p in layer.parameters())
        assert_same_state(layer, before)


def test_an_empty_batch_may_be_followed_by_an_operation_in_place():
    layer = nn.Sequential(IterNorm2d(6, affine=False), nn.ReLU(inplace=True))
    x = torch.empty(0, 6, 4, 4, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("impl", ["auto", "torch", "native", "reference"])
def test_every_implementation_keeps_the_memory_format(impl):
    x = correlated(8, 6, 5, 5, dtype=torch.float32).to(memory_format=torch.channels_last).requires_grad_()
    y = IterNorm2d(6, group_size=4, impl=impl)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_the_reference_compiles_in_training():
    # Without the code generator: its plain operators are torch's own.
    torch._dynamo.reset()
    layer = IterNorm2d(6, group_size=4, impl="reference", running="covariance")
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    x = correlated(8, 6, 5, 5, dtype=torch.float32)
    for run in (compiled, eager):
        run(x).sin().sum().backward()
    torch.testing.assert_close(layer.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(eager.named_buffers()), rtol=1e-4, atol=1e-5)
