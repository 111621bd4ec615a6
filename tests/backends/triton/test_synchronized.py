"""Ranks whose moments go from kernel to collective to kernel equal one process: in Triton's interpreter, over gloo."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import sync_kernels
import sync_ranks
import torch
from sync_checks import SIZE, assert_equal_to_one_process, shared_results_of, tolerance

import iternorm

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_synchronized.py", allow_module_level=True)

from iternorm.backends.triton import plan
from iternorm.backends.triton import synchronized as chains
from iternorm.timing.gpu.synchronized import absent_ranks
from iternorm.whitening import dispatch
from iternorm.whitening.processes import synchronized
from iternorm.whitening.processes.collective import Group
from iternorm.whitening.settings import Settings


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return shared_results_of("kernels", tmp_path_factory, 600)


def in_torch(case):
    """The case as one process computes it in fp64, by another backend."""
    return replace(case, words={**case.words, "impl": "torch"})


@pytest.mark.rare
@pytest.mark.parametrize("name", sync_kernels.CASES)
def test_ranks_equal_one_process_on_the_concatenated_batch(ranks, name):
    assert_equal_to_one_process([rank[name] for rank in ranks], in_torch(sync_kernels.CASES[name]))


@pytest.mark.rare
@pytest.mark.parametrize("name", sync_kernels.COMPILED)
def test_full_graph_compile_equals_one_process(ranks, name):
    assert_equal_to_one_process([rank["compiled", name] for rank in ranks], in_torch(sync_kernels.CASES[name]))


@pytest.mark.rare
def test_ranks_of_different_backends_understand_each_other(ranks):
    case = in_torch(sync_kernels.CASES["ragged groups"])
    assert_equal_to_one_process([rank["another backend"] for rank in ranks], case)


@pytest.mark.rare
@pytest.mark.parametrize("debugged", [False, True])
def test_ranks_that_exchange_from_cpp_equal_one_process(ranks, debugged):
    found = [rank["from C++", debugged] for rank in ranks]
    # All of the second step, four kernels each way.
    assert [launches for _, launches in found] == [8] * SIZE
    assert_equal_to_one_process([steps for steps, _ in found], in_torch(sync_kernels.FROM_CPP))


@pytest.mark.rare
def test_all_ranks_keep_the_same_statistics_to_the_last_bit(ranks):
    for name in sync_kernels.CASES:
        for rank in ranks[1:]:
            for buffer, value in ranks[0][name][1].items():
                assert torch.equal(rank[name][1][buffer], value), (name, buffer)


@pytest.mark.rare
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_residual_and_an_activation(ranks, activation):
    case = in_torch(sync_kernels.RESIDUAL)
    layer = iternorm.IterNorm2d(case.shape[0], activation=activation, dtype=torch.float64, **case.words)
    whole = [tuple(t.double() for t in pair) for pair in sync_ranks.batches(case)]
    steps, buffers = sync_kernels.residual_steps(sync_ranks.prepared(layer), whole)
    bound = tolerance(case)
    for i, expected in enumerate(steps):
        for name in "xyz":
            parts = torch.cat([rank["residual", activation][0][i][name] for rank in ranks]).double()
            torch.testing.assert_close(parts, expected[name], rtol=bound, atol=bound, msg=name)
        for name in ("weight", "bias"):
            total = sum(rank["residual", activation][0][i][name].double() for rank in ranks)
            torch.testing.assert_close(total, expected[name], rtol=bound, atol=30 * bound, msg=name)
    for name, value in buffers.items():
        own = ranks[1]["residual", activation][1][name].to(value.dtype)
        torch.testing.assert_close(own, value, rtol=bound, atol=bound)


@pytest.mark.rare
def test_one_collective_forward_one_backward(ranks):
    expected = {"forward": ["all_gather_into_tensor"], "backward": ["all_reduce"]}
    assert [rank["collectives"] for rank in ranks] == [expected] * SIZE


@pytest.mark.rare
def test_bad_input_is_refused_as_elsewhere(ranks):
    for rank in ranks:
        assert rank["one value"].startswith("ValueError: Expected more than 1 value per channel when training, got 1")
        assert rank["second derivative"].startswith("RuntimeError: a graph of the backward (create_graph=True)")
        assert rank["refused"].startswith('ValueError: impl="reference" does not synchronize')


@pytest.mark.rare
def test_without_a_gradient_of_the_input_those_of_the_parameters_stay_the_ranks_own(ranks):
    for rank in ranks:
        assert torch.equal(rank["weight alone"], torch.full((6,), 4.0))


def test_the_kernels_are_chosen_with_a_process_group_too():
    x = torch.randn(4, 6)
    group = Group("some group", 3)
    chosen = dispatch.choose(Settings(6, impl="triton", process_group=group), x)
    assert chosen is dispatch.Backend.TRITON
    assert dispatch.choose(Settings(6, impl="auto", process_group=group), x) is dispatch.Backend.VERBS
    with pytest.raises(ValueError, match="correction"):
        dispatch.choose(Settings(6, impl="triton", process_group=group, correction=1), x)


@pytest.mark.parametrize("group_size", [4, 72])
def test_launches_that_follow_a_collective_wait_for_all_of_it(group_size):
    found = plan.plan_for(torch.randn(4, 72, 2, 2), None, None, group_size, 2, None, ranks=3).launches
    assert not found["merge"].dependent
    assert not found["unpack"].dependent
    assert found["reduce"].dependent


@pytest.mark.parametrize(
    ("channels", "size", "image", "last"),
    [
        (10, 4, (4, 2), True),
        pytest.param(66, 66, (4, 2), True, marks=pytest.mark.rare),
        pytest.param(140, 130, (4, 2), True, marks=pytest.mark.rare),
        # Planes of a wide group, read in place.
        pytest.param(130, 130, (8, 8), False, marks=pytest.mark.rare),
    ],
)
def test_two_parts_of_a_batch_equal_the_whole(channels, size, image, last, poisoned_memory):
    """The kernels of two ranks in one process: each is handed what the other would send.

    Large groups are minutes in three processes of Triton's interpreter: there they run on a GPU alone.
    """
    torch.manual_seed(0)
    x, grad = (torch.randn(5, channels, *image) for _ in range(2))
    if last:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    x[:2] += 3
    weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    cuts = slice(0, 2), slice(2, 5)
    # Above 64 channels the steps, which take longest, are those of one process.
    steps = 1 if size > 64 else 2
    asked = (size, steps, 1e-5, None, False, True, 2)
    sent = [synchronized.moments_op(x[cut], size) for cut in cuts]
    forwards = []
    for cut in cuts:
        gather = lambda gathered, own: gathered.copy_(torch.cat(sent))  # noqa: E731
        forwards.append(chains.forward(x[cut], weight, bias, None, *asked, gather))
    arguments = [
        (grad[cut], x[cut], weight, state, plan, 1e-5, y) for cut, (y, state, plan) in zip(cuts, forwards, strict=True)
    ]
    total: Any = sum(chains.backward(*each, None)[-1] for each in arguments)
    backwards: Any = [chains.backward(*each, lambda sums: sums.copy_(total)) for each in arguments]

    layer = iternorm.IterNorm2d(channels, group_size=size, num_iters=steps, activation="relu", impl="torch").double()
    with torch.no_grad():
        layer.get_parameter("weight").copy_(weight)
        layer.get_parameter("bias").copy_(bias)
    whole = x.double().requires_grad_()
    expected = layer(whole)
    expected.backward(grad.double())
    # fp32 against fp64; sums of gradients over 40 to 320 samples are the largest numbers.
    close: Any = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(torch.cat([y for y, *_ in forwards]).double(), expected.detach(), **close)
    torch.testing.assert_close(torch.cat([dx for dx, *_ in backwards]).double(), whole.grad, **close)
    for i, parameter in enumerate(layer.parameters()):
        own = sum(each[1 + i].double() for each in backwards)
        torch.testing.assert_close(own, parameter.grad, **close)


RARE = [pytest.param(layout, marks=pytest.mark.rare) for layout in ("planes", "wide")]


@pytest.mark.parametrize("layout", ["rows", *RARE])
def test_operators_keep_their_contracts(layout):
    shape = (2, 130, 2, 3) if layout == "wide" else (3, 6, 2, 3)
    x, grad, residual = (torch.randn(shape) for _ in range(3))
    if layout == "rows":
        x = x.contiguous(memory_format=torch.channels_last)
    channels, size, steps = shape[1], min(shape[1], 4) if layout != "wide" else 130, 1 if layout == "wide" else 2
    weight, bias = torch.rand(channels), torch.randn(channels)
    check = torch.library.opcheck
    if layout == "wide":
        # What depends on the width of a group is the size of what an operator returns.
        check = functools.partial(check, test_utils=("test_faketensor",))
    check(synchronized.moments_op, (x, size))
    sent = synchronized.moments_op(x, size)
    gathered = torch.cat([sent, sent])
    groups = -(-channels // size)
    running = (torch.zeros(channels), torch.zeros(groups, size, size), torch.tensor(0))
    asked = (size, steps, 1e-5, False, True, 2)
    check(synchronized.whiten_op, (x, gathered, weight, bias, residual, *running, 0.1, False, *asked))
    y, state = synchronized.whiten_op(x, gathered, weight, bias, residual, None, None, None, None, False, *asked)
    assert y.stride() == x.stride()
    for needs_residual in (False, True):
        arguments = (grad, x, weight, state, y, size, steps, False, needs_residual, 2)
        check(synchronized.cross_moments_op, arguments)
    sent = synchronized.cross_moments_op(*arguments)[0]
    check(synchronized.input_gradient_op, (grad, x, weight, state, sent, y, size, steps, 1e-5, False, 2))


@pytest.mark.parametrize("size", [16, 64, 128, 192])
@pytest.mark.parametrize("samples", [0, 4])
@pytest.mark.parametrize(
    "words", [{}, {"activation": "relu"}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]
)
def test_every_launch_on_a_stream_gets_addresses_and_floats(words, samples, size, launched):
    layer = iternorm.SyncIterNorm(192, group_size=size, impl="triton", **words)
    x = torch.randn(samples, 192, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    residual = torch.ones_like(x) if "activation" in words else None
    with absent_ranks(3):
        # The second step takes the short way of a batch like the last one.
        layer(x, residual=residual)
        launched.clear()
        y = layer(x, residual=residual)
        forward = [name for name, *_ in launched]
        y.backward(torch.ones_like(y))
    assert y.shape == x.shape
    if size <= 64:
        # One launch more each way than IterNorm has; without samples only what the statistics need.
        assert forward == (["partial_moments", "reduce_moments"] if samples else []) + ["merge", "whiten_forward"]
        following = [name for name, *_ in launched][len(forward) :]
        backward = ["partial_moments", "reduce_moments", "unpack", "whiten_backward"]
        assert following == (backward if samples else [])
    for kernel, names, (_, _, stream, *values) in launched:
        assert stream == 7
        for name, value in zip(names, values, strict=True):
            assert type(value) is (int if name.endswith("_ptr") else float), (kernel, name, value)


def allocations(step):
    """How often a function asks torch for memory."""
    with torch.profiler.profile() as found:
        step()
    made = ("aten::new_empty", "aten::empty_like", "aten::new_zeros", "aten::zeros_like")
    return sum(event.count for event in found.key_averages() if event.key in made)


@pytest.mark.parametrize("size", [16, 192])
def test_a_step_allocates_what_iter_norm_does_and_what_is_exchanged(size, launched):
    # Where the host decides, a tensor more is a large share of the time.
    counts = []
    for kind in (iternorm.IterNorm2d, iternorm.SyncIterNorm):
        layer = kind(192, group_size=size, impl="triton")
        x = torch.randn(4, 192, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
        with absent_ranks(3):
            layer(x).backward(torch.ones_like(x))
            outputs = []
            forward = allocations(lambda layer=layer, x=x, outputs=outputs: outputs.append(layer(x)))
            wanted = (x, *layer.parameters())
            backward = allocations(
                lambda y=outputs[0], wanted=wanted: torch.autograd.grad(y, wanted, torch.ones(y.shape))
            )
        counts.append((forward, backward))
    (forward, backward), together = counts
    # Forward what is sent and what all have sent, backward what is summed in place.
    assert together == (forward + 2, backward + 1)
