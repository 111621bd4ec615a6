"""Whitening of each sample in the kernels, in Triton's interpreter: against fp64, and how often memory is read."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: test_per_sample_gpu.py", allow_module_level=True)

from checks import correlated, relative_error
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import iternorm
from iternorm.backends.triton import items, runtime
from iternorm.backends.triton.device.items.moments import sum_parts
from iternorm.whitening import modes

GROUP, INSTANCE = "GroupWhitening", "InstanceWhitening"
# What others reach too, in another shape.
RARE = ("one group", "group3d", "group1d", "zca", "instance1d")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Kind, options, shape. The interpreter has three multiprocessors: one sample is shared by several programs.
CASES = {
    "one channel to a block": (GROUP, {"num_groups": 4}, (2, 8, 4, 5)),
    "programs share positions": (GROUP, {"num_groups": 4}, (1, 8, 14, 14)),
    "programs share blocks": (GROUP, {"num_groups": 3}, (1, 15, 5, 5)),
    "more samples than programs": (GROUP, {"num_groups": 4}, (7, 8, 4, 4)),
    "three channels to a row": (GROUP, {"num_groups": 4, "activation": "relu"}, (2, 12, 5, 5)),
    "few rows of many channels": (GROUP, {"num_groups": 2}, (1, 64, 4, 4)),
    "an odd number of rows": (GROUP, {"num_groups": 5, "activation": "relu"}, (2, 20, 7, 5)),
    "more channels than a tile takes": (GROUP, {"num_groups": 2}, (1, 96, 4, 4)),
    "all channels of more rows": (GROUP, {"num_groups": 18, "activation": "relu"}, (2, 72, 5, 5)),
    "one group": (GROUP, {"num_groups": 1, "bias": False}, (2, 6, 4, 4)),
    "no scale": (GROUP, {"num_groups": 4, "affine": False, "activation": "relu"}, (2, 8, 4, 4)),
    "group3d": (GROUP, {"num_groups": 4}, (2, 8, 3, 3, 2)),
    "group1d": (GROUP, {"num_groups": 4}, (2, 8, 17)),
    "zca": (GROUP, {"num_groups": 4, "solver": "zca", "eps": 1e-3}, (2, 8, 4, 4)),
    "instance": (INSTANCE, {"group_size": 4, "activation": "relu"}, (2, 8, 5, 5)),
    "a smaller last group": (INSTANCE, {"group_size": 4}, (2, 10, 6, 6)),
    "instance1d": (INSTANCE, {"group_size": None}, (3, 6, 30)),
}


def made(kind, words, shape):
    layer = getattr(iternorm, f"{kind}{len(shape) - 2}d")(shape[1], impl="triton", **{"num_iters": 3, **words})
    for name, parameter in layer.named_parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if name == "weight" else torch.nn.init.normal_(parameter)
    return layer


def exact(layer):
    """The same in fp64, by torch."""
    own = copy.deepcopy(layer).double()
    own.impl = "torch"
    return own


def laid_out(x, last):
    if not last:
        return x
    if x.ndim == 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous(memory_format=FORMATS[x.ndim])


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched."""
    names, launch = [], runtime.Launch.__call__

    def noted(self, stream, values):
        names.append(self.kernel.__name__)
        # The interpreter copies memory by torch.
        with _disable_current_modes():
            launch(self, stream, values)

    monkeypatch.setattr(runtime.Launch, "__call__", noted)
    return names


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.rare) if c in RARE else c for c in CASES])
def test_output_and_gradients_equal_those_in_double_precision(case, last, launched, poisoned_memory):
    kind, words, shape = CASES[case]
    layer = made(kind, words, shape)
    x, grad = correlated(*shape, dtype=torch.float32), torch.randn(shape)
    found = []
    for own, dtype in ((layer, torch.float32), (exact(layer), torch.float64)):
        given = laid_out(x.to(dtype), last).requires_grad_()
        y = own(given)
        gradients = torch.autograd.grad(y, (given, *own.parameters()), grad.to(dtype))
        found.append((y, *gradients))
        if own is layer:
            assert y.stride() == gradients[0].stride() == given.stride()
    assert "item_cross_moments" in launched
    for actual, wanted in zip(*found, strict=True):
        # ZCA's iteration multiplies the rounding of a covariance by its condition number.
        assert relative_error(actual, wanted) < (2e-5 if case == "zca" else 2e-6)


@pytest.mark.parametrize("case", ["an odd number of rows", "all channels of more rows"])
def test_half_precision_is_rounded_once(case, launched, poisoned_memory):
    kind, words, shape = CASES[case]
    layer = made(kind, words, shape)
    x, grad = (laid_out(torch.randn(shape).bfloat16(), True) for _ in range(2))
    found = []
    for own, dtype in ((layer, torch.bfloat16), (exact(layer), torch.float64)):
        given = x.to(dtype).requires_grad_()
        y = own(given)
        # Where rounding has moved a value across zero, a ReLU would pass another gradient.
        passed = grad.to(dtype) * (found[0][0] > 0) if found else grad
        found.append((y, *torch.autograd.grad(y, (given, *own.parameters()), passed)))
    assert "item_cross_moments" in launched
    for actual, wanted in zip(*found, strict=True):
        # The interpreter multiplies in fp32. bfloat16 has eight bits.
        assert relative_error(actual, wanted) < 4e-3


class Operations(TorchDispatchMode):
    """The names of torch's operations, and how large what they give is."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        self.found.append((name, getattr(result, "numel", lambda: 0)()))
        return result


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", ["three channels to a row", "a smaller last group"])
def test_it_has_the_passes_of_a_layer_over_a_batch(case, last, launched, monkeypatch):
    kind, words, shape = CASES[case]
    layer, x, grad = made(kind, words, shape), laid_out(torch.randn(shape), last), laid_out(torch.randn(shape), last)
    # A dispatch mode is looking: without this the call would be recorded, in operators.
    monkeypatch.setattr(modes, "is_recorded", lambda *tensors: False)
    x.requires_grad_()
    with Operations() as operations:
        y = layer(x)
        torch.autograd.grad(y, (x, *layer.parameters()), grad)
    assert launched == [
        *("item_moments", "reduce_moments", "whiten_forward"),
        *("item_cross_moments", "reduce_moments", "whiten_backward", "sum_parts"),
    ]
    # Of an activation's size there is new memory, and nothing that reads or writes it.
    large = {name for name, size in operations.found if size >= x.numel()}
    assert large <= {"empty_like", "new_empty", "empty", "detach", "alias", "view", "slice"}
    # The gradients of scale and shift are summed over the samples in the chain.
    assert "sum" not in {name for name, _ in operations.found}


def test_an_input_without_gradient_is_read_once_more(launched):
    layer, x = made(*CASES["instance"]), correlated(2, 8, 5, 5, dtype=torch.float32)
    expected = exact(layer)
    for own, dtype in ((layer, torch.float32), (expected, torch.float64)):
        own(x.to(dtype)).square().sum().backward()
    assert launched[3:] == ["item_cross_moments", "sum_parts"]
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, expected.get_parameter(name).grad) < 2e-6


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize(("count", "channels"), [(1, 3), (4, 8), (9, 20)])
def test_parts_of_the_gradients_of_scale_and_shift_are_added_up(count, channels, has_weight):
    # What lies behind the parts is not read, and what lies around the sums is not written.
    parts, room = (torch.full(size, torch.nan) for size in ((count + 4, 2 * channels), (2, channels + 16)))
    parts[:count].normal_()
    # Blocks of four parts: one that is not full, a full one, and several.
    words = {"WEIGHT": has_weight, "ROWS": 4, "COLUMNS": 16, "PDL": False}
    sum_parts[(-(-2 * channels // 16), 1)](parts, room[0] if has_weight else None, room[1], count, channels, **words)
    expected = parts[:count].sum(0)
    torch.testing.assert_close(room[1, :channels], expected[channels:])
    if has_weight:
        torch.testing.assert_close(room[0, :channels], expected[:channels])
    assert room[not has_weight :, channels:].isnan().all()
    assert has_weight or room[0].isnan().all()


@pytest.mark.parametrize("case", ["more samples than programs", "few rows of many channels"])
def test_gradients_of_scale_and_shift_come_in_several_blocks(case, monkeypatch, poisoned_memory):
    kind, words, shape = CASES[case]
    layer, x = made(kind, words, shape), correlated(*shape, dtype=torch.float32)
    expected = exact(layer)
    monkeypatch.setattr(items, "_plans", {})
    monkeypatch.setattr(items, "_SUMMED_PARTS", 2)
    for own, dtype in ((layer, torch.float32), (expected, torch.float64)):
        own(x.to(dtype)).square().sum().backward()
    (plan,) = items._plans.values()
    launch = plan.launches["learned"]
    assert launch.dependent
    assert plan.learned_parts > 2 or launch.grid[0] > 1
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, expected.get_parameter(name).grad) < 2e-6


@pytest.mark.parametrize("case", ["three channels to a row", "a smaller last group"])
def test_it_is_twice_differentiable(case):
    kind, words, shape = CASES[case]
    layer = made(kind, words, shape)
    x, results = correlated(*shape, dtype=torch.float32), []
    for own, dtype in ((layer, torch.float32), (exact(layer), torch.float64)):
        given = x.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad((own(given) + 1).pow(3).sum(), given, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), (given, *own.parameters())))
    for actual, wanted in zip(*results, strict=True):
        assert relative_error(actual, wanted) < 1e-5


def test_a_layer_that_has_seen_such_a_batch_notices_what_is_changed():
    kind, words, shape = CASES["one channel to a block"]
    layer, x = made(kind, words, shape), correlated(*shape, dtype=torch.float32)
    assert torch.equal(layer(x), layer(x))
    layer.num_iters = 1
    torch.testing.assert_close(layer(x), exact(layer)(x.double()).float())
    layer.eps = 0.5
    torch.testing.assert_close(layer(x), exact(layer)(x.double()).float())
    layer.activation = "relu"
    assert (layer(x) >= 0).all()
    with pytest.raises(ValueError, match="expected an input of 8 channels"):
        layer(x[:, :6])
    layer.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"weight has shape \[3\]"):
        layer(x)


def test_more_groups_than_a_grid_has_are_refused():
    x = torch.randn(8192, 8, 16)
    with pytest.raises(ValueError, match="up to 65535 groups, not 65536"):
        iternorm.InstanceWhitening1d(8, group_size=1, impl="triton")(x)
    assert iternorm.InstanceWhitening1d(8, group_size=1)(x).isfinite().all()


def test_a_compiler_sees_the_operation_on_a_batch():
    kind, words, shape = CASES["one channel to a block"]
    layer, x = made(kind, words, shape), correlated(*shape, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_no_program_of_an_item_is_without_a_piece():
    for shape in ((1, 64, 5, 5), (3, 96, 20, 20), (200, 64, 8, 8), (1, 512, 7, 7), (2, 8, 64, 64)):
        for last in (False, True):
            x = laid_out(torch.empty(shape), last)
            for sms, size in itertools.product((3, 132), (8, 64)):
                items._plans.clear()
                plan = items.plan_for(x, None, None, shape[1] // 2, size, 5, False, False)
                plan.num_sms = sms
                launch = plan.launches["moments"]
                tile = launch.constants["TILE"]
                # Tiles of all channels have positions for samples.
                samples = plan.layout.samples // (tile.SPAN if tile.FLAT else 1)
                assert launch.grid[0] == -(-samples // plan.unit_of("moments"))
    items._plans.clear()


@pytest.mark.parametrize(("batch", "expected"), [(64, 1), (256, 2)])
def test_moments_of_few_samples_have_one_program_to_a_multiprocessor(batch, expected, monkeypatch):
    monkeypatch.setattr(items, "_plans", {})
    x = torch.empty(batch, 64, 32, 32, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    plan = items.plan_for(x, None, None, 32, 32, 5, False, False)
    plan.num_sms = 132
    for kernel in ("moments", "cross_moments"):
        launch = plan.launches[kernel]
        assert launch.constants["TILE"].FLAT
        assert launch.grid == (max(1, 132 * expected // batch), batch)
    # The iteration of one program hides that of another.
    assert plan.tiles_of("whiten").per_sm == plan.tiles_of("whiten_backward").per_sm == 2
