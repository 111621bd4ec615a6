"""`layer(x, residual=z)`: what is added to the output, before the activation."""

import pytest
import torch
from torch import nn

import iternorm

SHAPES = {"1d": (6, 8), "2d": (4, 8, 5, 3), "3d": (3, 8, 2, 3, 2)}
LAYERS = {"1d": iternorm.IterNorm1d, "2d": iternorm.IterNorm2d, "3d": iternorm.IterNorm3d}


def tensors(shape, dtype=torch.float64, last=False):
    torch.manual_seed(0)
    x, z = torch.randn(2, *shape, dtype=dtype).unbind()
    if last:
        format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        x, z = x.to(memory_format=format), z.to(memory_format=format)
    return x.requires_grad_(), z.requires_grad_()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("impl", ["torch", "native", "reference"])
@pytest.mark.parametrize("rank", SHAPES)
def test_it_is_the_layer_the_sum_and_the_activation(rank, impl, activation, training):
    layer = LAYERS[rank](8, group_size=4, impl=impl, activation=activation, dtype=torch.float64)
    plain = LAYERS[rank](8, group_size=4, impl=impl, dtype=torch.float64)
    nn.init.uniform_(layer.weight)
    plain.load_state_dict(layer.state_dict())
    layer.train(training)
    plain.train(training)
    x, z = tensors(SHAPES[rank])
    y = layer(x, residual=z)
    expected = plain(x) + z
    if activation:
        expected = expected.relu()
    torch.testing.assert_close(y, expected)
    inputs = (x, z, layer.weight, layer.bias)
    found = torch.autograd.grad(y.sin().sum(), inputs)
    wanted = torch.autograd.grad(expected.sin().sum(), (x, z, plain.weight, plain.bias))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


def test_the_function_takes_it_too():
    x, z = tensors((6, 8))
    y = iternorm.functional.iter_norm(x, training=True, group_size=4, activation="relu", residual=z)
    assert torch.equal(y, (iternorm.functional.iter_norm(x, training=True, group_size=4) + z).relu())
    y = iternorm.functional.decorrelated_batch_norm(x, training=True, group_size=4, residual=z)
    assert torch.equal(y, iternorm.functional.decorrelated_batch_norm(x, training=True, group_size=4) + z)


def test_its_gradients_are_exact():
    layer = iternorm.IterNorm2d(4, group_size=2, activation="relu", dtype=torch.float64)
    x, z = tensors((3, 4, 2, 2))
    assert torch.autograd.gradcheck(lambda x, z: layer(x, residual=z), (x, z))


@pytest.mark.parametrize(
    ("residual", "error", "words"),
    [
        (torch.zeros(6, 7), ValueError, "residual has shape"),
        (torch.zeros(1, 8), ValueError, "residual has shape"),
        (torch.zeros(6, 8, dtype=torch.float64), ValueError, "residual has dtype"),
        (torch.zeros(6, 8, device="meta"), ValueError, "residual has device"),
        (torch.zeros(6, 8).to_sparse(), ValueError, "residual has layout"),
        (1.0, TypeError, "residual must be a tensor or None, got float"),
    ],
)
def test_what_cannot_be_added_is_refused_by_name(residual, error, words):
    layer = iternorm.IterNorm1d(8, group_size=4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(error, match=words):
        layer(torch.randn(6, 8), residual=residual)
    torch.testing.assert_close(dict(layer.state_dict()), before, rtol=0, atol=0)


def test_a_traced_graph_hands_it_on():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = iternorm.IterNorm2d(4, group_size=2, activation="relu")

        def forward(self, x):
            return self.norm(x, residual=x)

    block, x = Block(), torch.randn(5, 4, 3, 3)
    traced = torch.fx.symbolic_trace(block)
    assert torch.equal(traced.eval()(x), block.eval()(x))
