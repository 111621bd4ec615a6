"""What a layer is made of: one chain of launches each way, and of torch's operations those that give memory."""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_kernels.py", allow_module_level=True)

from iternorm import GroupWhitening2d, IterNorm2d
from iternorm.backends.triton import layout, plan, precision, runtime
from iternorm.backends.triton import run as launch
from iternorm.backends.triton.launches import iteration
from iternorm.whitening import autograd
from iternorm.whitening.settings import Running, Settings

# Since torch 2.9.
HAS_FP32_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")
# New memory, and parts of it.
MEMORY = {"aten::new_empty", "aten::empty_like", "aten::slice", "aten::view", "aten::detach"}
# Where the programs of an iteration meet.
MEMORY |= {"aten::new_zeros"}


class Operations(TorchDispatchMode):
    """Writes down the names of the operations that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("size", "num_iters", "forward", "backward"),
    [
        # Sums, their reduction, and the iteration with its use.
        (64, 5, 3, 3),
        # The iteration is a launch of its own, whatever its steps, and so are the running statistics.
        (128, 0, 5, 4),
        (128, 3, 5, 4),
        # In blocks, matrices are prepared for their products.
        (192, 3, 6, 5),
    ],
)
def test_a_layer_is_one_chain_of_launches_and_no_operation_of_torch(size, num_iters, forward, backward, monkeypatch):
    chains = []
    monkeypatch.setattr(runtime.Launches, "run", lambda self, stream, names, arguments: chains.append(names))
    # A plan that another test made has launches of its own.
    monkeypatch.setattr(plan, "_plans", {})
    x, weight, bias = torch.randn(3, size, 8, 8), torch.ones(size), torch.zeros(size)
    statistics = Running(torch.zeros(size), torch.zeros(1, size, size), torch.tensor(0), None, False)
    with Operations() as operations:
        _, state, found = launch.forward(x, weight, bias, size, num_iters, 1e-5, statistics)
        launch.backward(x, x, weight, state, found, 1e-5, True)
    assert [len(names) for names in chains] == [forward, backward]
    assert operations.names <= MEMORY


@pytest.mark.parametrize("group_size", [16, pytest.param(192, marks=pytest.mark.rare)])
def test_an_input_that_is_copied_has_one_plan_for_both_passes(group_size, monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    channels = max(32, group_size)
    layer = IterNorm2d(channels, group_size=group_size, num_iters=1, impl="triton")
    # Neither contiguous nor channels_last.
    x = torch.randn(4, channels, 4, 6)[:, :, :, ::2].requires_grad_()
    for _ in range(2):
        layer(x).sum().backward()
    (made,) = plan._plans.values()
    assert made.copied


@pytest.mark.parametrize(
    ("image", "group_size", "copied"),
    [((8, 8), 192, False), ((20, 20), 192, False), ((4, 4), 192, True), ((9, 9), 192, True), ((9, 9), 64, False)],
)
def test_wide_groups_of_contiguous_memory_are_copied_if_planes_are_short_or_unaligned(image, group_size, copied):
    x = torch.randn(2, 192, *image)
    assert plan.plan_for(x, None, None, group_size, 1, None).copied == copied
    x = x.to(memory_format=torch.channels_last)
    assert not plan.plan_for(x, None, None, group_size, 1, None).copied


@pytest.mark.parametrize("num_iters", [0, 1, 4, 15])
def test_the_iteration_alone_is_one_chain_each_way(num_iters, monkeypatch):
    chains = []
    monkeypatch.setattr(runtime.Launches, "run", lambda self, stream, names, arguments: chains.append(names))
    covariance = torch.eye(130).expand(2, 130, 130).contiguous()
    with Operations() as operations:
        whitening, saved = iteration.solve(covariance, num_iters)
        iteration.solve_backward(covariance, covariance, whitening, saved, num_iters)
    assert chains == [("iterate",), ("iterate_backward",)]
    assert operations.names <= MEMORY


def test_the_iteration_alone_is_not_run_once_more_for_its_backward(monkeypatch):
    chains = []
    monkeypatch.setattr(runtime.Launches, "run", lambda self, stream, names, arguments: chains.append(names))
    settings = Settings(130, "zca")
    covariance = torch.eye(130)[None]
    whitening, solved = autograd.inverse_sqrt(covariance, 130, settings, keep=False, iteration=iteration)
    autograd.inverse_sqrt_backward(covariance, whitening, solved, 130, settings, iteration)
    assert chains == [("iterate",), ("iterate_backward",)]


def test_a_chain_on_a_stream_is_called_as_it_was_prepared():
    calls, made = [], []

    def make(name) -> Any:
        made.append(name)
        # What is called, the grid, and what goes before and after the values.
        prepared = (lambda *args: calls.append((name, *args)), (8, 2, 1), ("before",), ("after",))
        return SimpleNamespace(prepared=prepared)

    launches = runtime.Launches({name: partial(make, name) for name in ("first", "second", "third")})
    for _ in range(2):
        launches.run(7, ("first", "second"), ((0, 16), (32, 1e-5)))
    assert made == ["first", "second"]
    assert calls == 2 * [
        ("first", 8, 2, 1, 7, "before", 0, 16, "after"),
        ("second", 8, 2, 1, 7, "before", 32, 1e-5, "after"),
    ]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [16, 64, 128, 192])
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"activation": "relu"},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"running": "covariance"},
        {"num_iters": 0},
        {"num_iters": 1, "affine": False, "activation": "relu"},
    ],
)
def test_every_launch_on_a_stream_gets_addresses_and_floats(words, size, channels_last, launched):
    layer = IterNorm2d(192, group_size=size, impl="triton", **words)
    x = torch.randn(4, 192, 4, 4)
    x = (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert y.stride() == x.stride() == x.grad.stride()
    if layer.affine:
        layer(x.detach()).sum().backward()
    with torch.no_grad():
        layer.eval()(x)
    assert len(launched) >= 7
    assert_addresses_and_floats(launched)


@pytest.mark.parametrize("words", [{}, {"activation": "relu", "bias": False}, {"affine": False}])
def test_every_launch_for_samples_gets_addresses_and_floats(words, launched):
    layer, x = GroupWhitening2d(8, num_groups=4, impl="triton", **words), torch.randn(4, 8, 4, 4, requires_grad=True)
    layer(x).sum().backward()
    if layer.affine:
        layer(x.detach()).sum().backward()
    assert len(launched) == (12 if layer.affine else 6)
    assert_addresses_and_floats(launched)


def assert_addresses_and_floats(launched):
    for kernel, names, (_, _, stream, *values) in launched:
        assert stream == 7
        for name, value in zip(names, values, strict=True):
            assert type(value) is (int if name.endswith("_ptr") else float), (kernel, name, value)


@pytest.mark.parametrize("group_size", [64, 192])
def test_other_batch_sizes_compile_few_kernels_more(group_size, monkeypatch):
    compiled = set()

    def note(*what):
        compiled.add(what)
        return None, None, (), (), 100

    monkeypatch.setattr(runtime, "_compiled", note)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(precision, "INTERPRETED", False)
    monkeypatch.setitem(runtime._known, 0, runtime.Device("an H200", (9, 0), 132))
    monkeypatch.setattr(plan, "_plans", {})
    names = ["moments", "reduce", "cross_moments", "cross_reduce", "apply"]
    names += ["whiten", "whiten_backward"] if group_size == 64 else ["apply_backward"]
    counts = []
    with FakeTensorMode():
        weight = torch.empty(192, device="cuda:0")
        for batch in range(2, 300):
            x = torch.empty(batch, 192, 16, 16, device="cuda:0", memory_format=torch.channels_last)
            made = plan.plan_for(x, weight, weight, group_size, 5, None)
            for name in names:
                made.launches[name]
            counts.append(len(compiled))
    assert counts[0] == len(names)
    # Other tiles for many samples, and as many partial sums to a reduction as the next power of two.
    assert counts[-1] <= 3 * len(names)


def test_a_chain_without_a_stream_is_left_to_triton():
    calls = []

    def make(name) -> Any:
        return lambda stream, values: calls.append((name, stream, values))

    launches = runtime.Launches({name: partial(make, name) for name in ("first", "second")})
    launches.run(None, ("first", "second"), ((0,), (1,)))
    assert calls == [("first", None, (0,)), ("second", None, (1,))]


@pytest.mark.parametrize("group_size", [64, 128])
def test_only_the_first_launch_of_a_pass_waits_for_the_end_of_what_comes_before(group_size):
    found = plan.plan_for(torch.randn(4, 128, 5, 5), None, None, group_size, 5, None).launches
    assert not found["moments"].dependent
    assert not found["cross_moments"].dependent
    rest = ("whiten", "whiten_backward", "weight_gradient")
    if group_size == 128:
        rest = ("wide_weight_gradient", "apply", "apply_backward")
        # All their programs run at once, which cannot be while others are at work.
        assert not found["iterate"].dependent
        assert not found["iterate_backward"].dependent
    assert all(found[name].dependent for name in ("reduce", "cross_reduce", *rest))


@pytest.mark.parametrize("before", ["highest", "high"])
@pytest.mark.parametrize("after", ["highest", "high"])
def test_a_backward_knows_what_its_forward_kept_whatever_precision_is_set_since(before, after, monkeypatch):
    monkeypatch.setattr(precision, "INTERPRETED", False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: before)
    x = torch.randn(4, 128, 5, 5)

    def kept(dtype, exact=False, num_iters=5):
        parts = precision.newton_split(precision.split_for(dtype), exact, num_iters)
        return torch.empty(layout.state_of(128, 64, num_iters, parts, 0).size)

    state, half, exact, long = (kept(x.dtype), kept(torch.float16), kept(x.dtype, True), kept(x.dtype, False, 20))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: after)
    splits = {"highest": 3, "high": 2}
    assert layout.split_of(state, x, 64, 5, False) == splits[before]
    # What does not depend on the precision of then is what it is now.
    assert layout.split_of(half, x.half(), 64, 5, False) == 2
    assert layout.split_of(exact, x, 64, 5, True) == layout.split_of(long, x, 64, 20, False) == splits[after]
    assert layout.split_of(state, x, 64, 1, False) == layout.split_of(state, x, 128, 5, False) == splits[after]


SETTINGS = [
    ("torch.backends.fp32_precision = 'tf32'", 2),
    ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", 2),
    ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", 3),
    ("torch.backends.cuda.matmul.allow_tf32 = True", 2),
    ("torch.set_float32_matmul_precision('high')", 2),
    ("torch.set_float32_matmul_precision('highest')", 3),
    ("pass", 3),
]


def test_tf32_is_allowed_in_every_way_that_torch_has():
    # Each in a fork of its own: the settings hang together, and one that was set before decides what another does.
    script = """if True:
        import os, sys, torch
        from iternorm.backends.triton.precision import split_for
        for setting in sys.argv[1:]:
            if os.fork() == 0:
                exec(setting)
                print(+split_for(torch.float32), flush=True)
                os._exit(0)
            os.wait()
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    wanted = [(setting, split) for setting, split in SETTINGS if "fp32_precision" not in setting or HAS_FP32_PRECISION]
    command = [sys.executable, "-c", script, *(setting for setting, _ in wanted)]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True).stdout.split()
    assert found == [str(split) for _, split in wanted]


@pytest.mark.parametrize("num_iters", [5, 20])
@pytest.mark.parametrize(("channels", "size"), [(128, 128), (300, 200)])
def test_a_group_above_64_keeps_covariance_and_whitening_for_its_backward(channels, size, num_iters, monkeypatch):
    monkeypatch.setattr(runtime.Launches, "run", lambda *_: None)
    monkeypatch.setattr(plan, "_plans", {})
    layer = IterNorm2d(channels, group_size=size, num_iters=num_iters, impl="triton")
    x = torch.randn(8, channels, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    known = {tensor.data_ptr() for tensor in (x, *layer.parameters())}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    bytes_kept = sum(tensor.nbytes for tensor in kept if tensor.data_ptr() not in known)
    groups, padded = -(-channels // size), layout.padded_size(size)
    # Mean and variance, too; all parts begin at 16 bytes.
    assert bytes_kept <= 4 * (groups * (padded**2 + size**2) + 2 * channels + 16)
