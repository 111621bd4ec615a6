"""What follows a layer in a compiled graph, in Triton's interpreter: joined to its kernels, with the same numbers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from iternorm import IterNorm2d

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_modes.py", allow_module_level=True)


def norm():
    layer = IterNorm2d(4, group_size=4, num_iters=2, impl="triton")
    for parameter in layer.parameters():
        nn.init.uniform_(parameter)
    return layer


class Block(nn.Module):
    """A residual block as torchvision writes it, with a shortcut that is normalized too, or none."""

    def __init__(self, shortcut: bool = False):
        super().__init__()
        self.first, self.second = norm(), norm()
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = norm() if shortcut else nn.Identity()

    def forward(self, x):
        out = self.second(self.relu(self.first(x)))
        out += self.shortcut(x)
        return self.relu(out)


class Watched(nn.Module):
    """Something else looks at what lies between the layer and the ReLU."""

    def __init__(self):
        super().__init__()
        self.norm = norm()

    def forward(self, x):
        y = self.norm(x)
        return torch.relu(y) * y.sigmoid()


class Broadcast(nn.Module):
    """What is added is not of the output's shape."""

    def __init__(self):
        super().__init__()
        self.norm = norm()

    def forward(self, x):
        return torch.relu(self.norm(x) + x.mean((2, 3), keepdim=True))


def compiled_graphs(model, x):
    """Output and gradients of the compiled model, and the graphs of its forward and its backward."""
    seen = []
    torch.compiler.reset()
    options: dict[str, Any] = {
        "post_grad_custom_post_pass": lambda graph: seen.append([str(node.target) for node in graph.nodes])
    }
    step = torch.compile(model, fullgraph=True, options=options)
    return *outputs_and_gradients(step, model, x), seen


def outputs_and_gradients(step, model, x):
    leaf = x.clone().requires_grad_()
    y = step(leaf)
    return y.detach(), torch.autograd.grad(y.sin().sum(), (leaf, *model.parameters()))


@pytest.mark.parametrize(
    ("make", "left", "last"),
    [
        (Block, (), False),
        (lambda: Block(shortcut=True), (), True),
        (Watched, ("aten.relu.default",), False),
        (Broadcast, ("aten.relu.default", "aten.add.Tensor"), False),
    ],
)
def test_what_follows_a_layer_is_joined_to_it(make, left, last):
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    x = torch.randn(6, 4, 3, 2)
    if last:
        x = x.to(memory_format=torch.channels_last)
    y, gradients, (forward, *_) = compiled_graphs(model, x)
    expected_y, expected_gradients = outputs_and_gradients(eager, eager, x)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    # Nothing but the layers' own operators is left of the forward, unless it cannot be joined.
    assert {target for target in forward if target in ("aten.relu.default", "aten.add.Tensor")} == set(left)


def test_the_backward_masks_in_its_own_kernels():
    x = torch.randn(6, 4, 3, 2)
    *_, backward = compiled_graphs(Block(), x)[2]
    assert not {"aten.where.self", "aten.le.Scalar", "aten.threshold_backward.default"} & set(backward)


def test_a_pass_of_the_user_runs_too():
    seen = []
    torch.compiler.reset()
    torch.compile(Block(), options={"joint_custom_pre_pass": lambda graph: seen.append(graph)})(torch.randn(6, 4, 3, 2))
    assert seen
