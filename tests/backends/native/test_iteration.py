"""Newton's iteration in C, against torch's in fp64, and when a layer takes it."""

import pytest
import torch
from checks import correlated, covariance_with, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

import iternorm
from iternorm import functional, solvers
from iternorm.backends.native import build, iteration, verbs
from iternorm.timing.threads import num_threads
from iternorm.whitening.settings import Settings

DTYPES = (torch.float32, torch.float64)
# Covariances of condition 100 magnify rounding by as much, in torch too (8.2e-6 in fp32 for the gradient).
ROUNDING = {torch.float32: 2e-5, torch.float64: 4e-14}
SIZES = (1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 150)
STEPS = (0, 1, 2, 5, 12, 13, 20, 1000)
GUARD = 4096


@pytest.fixture(scope="module", autouse=True)
def _built():
    for dtype in DTYPES:
        if reason := build.failure(dtype):
            pytest.skip(reason)


@pytest.fixture
def calls(monkeypatch):
    """How often the iteration in C has run, forward and backward."""
    seen = []
    for name in ("solve", "solve_backward"):
        function = getattr(iteration, name)
        monkeypatch.setattr(iteration, name, lambda *args, f=function, n=name: (seen.append(n), f(*args))[1])
    return seen


BOTH = ["solve", "solve_backward"]


def problem(size, dtype, groups=2):
    covariance = covariance_with(torch.logspace(0, -2, size, dtype=torch.float64), groups)
    scales = torch.tensor([7.0, 1e-3, 1.0, 40.0], dtype=torch.float64)[:groups]
    return (covariance * scales[:, None, None]).to(dtype), torch.randn(groups, size, size, dtype=dtype)


def by_torch(covariance, grad, num_iters):
    whitening, saved = solvers.solve(covariance, "newton", num_iters, keep=True)
    gradient = solvers.solve_backward(grad, covariance, whitening, saved, "newton", num_iters)
    return [whitening, gradient, *saved]


def by_c(covariance, grad, num_iters):
    whitening, kept = iteration.solve(covariance, num_iters)
    return [whitening, iteration.solve_backward(grad, covariance, whitening, kept, num_iters), *kept]


def check(size, num_iters, dtype):
    covariance, grad = problem(size, dtype)
    # A matrix of one row takes none.
    steps = 0 if size == 1 else min(num_iters, solvers.most_steps(dtype))
    exact = by_torch(covariance.double(), grad.double(), steps)
    actual = by_c(covariance, grad, num_iters)
    assert len(actual) == len(exact) == 2 + 2 * max(steps - 1, 0)
    for a, e in zip(actual, exact, strict=True):
        assert a.dtype == dtype
        assert a.shape == covariance.shape
        assert torch.equal(a, a.mT)
        for of_group, exact_of_group in zip(a, e, strict=True):
            assert relative_error(of_group, exact_of_group) < ROUNDING[dtype], f"{size} channels, {num_iters} steps"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_iters", STEPS)
def test_every_size_and_number_of_steps(num_iters, dtype, poisoned_memory):
    for size in SIZES:
        check(size, num_iters, dtype)


def test_machines_with_narrower_vectors(narrower_vectors):
    for dtype in DTYPES:
        for size in SIZES:
            check(size, 5, dtype)


@pytest.mark.parametrize("num_iters", [3, 5, 9])
@pytest.mark.parametrize("size", [8, 64, 128])
def test_it_is_no_less_accurate_than_torch(size, num_iters):
    covariance, grad = problem(size, torch.float32, groups=4)
    exact = by_torch(covariance.double(), grad.double(), num_iters)
    theirs, ours = by_torch(covariance, grad, num_iters), by_c(covariance, grad, num_iters)
    for t, o, e in zip(theirs, ours, exact, strict=True):
        assert relative_error(o, e) < 2 * relative_error(t, e) + 2**-24


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_whose_trace_falls_stops_as_in_torch(dtype):
    # An eigenvalue of -3e-7 takes many steps to grow. The second group goes on when the first has stopped.
    bad = torch.linspace(0.1, 1, 20, dtype=torch.float64)
    bad[0] = -3e-7
    covariance = torch.stack([covariance_with(bad), covariance_with(bad.abs() + 0.1)]).to(dtype)
    grad = torch.randn_like(covariance)
    theirs, ours = by_torch(covariance, grad, 24), by_c(covariance, grad, 24)
    # R is zero where it has stopped, and only there.
    stopped = [[bool((r == 0).all()) for r in residual] for residual in theirs[2 : 2 + 23]]
    assert stopped == [[bool((r == 0).all()) for r in residual] for residual in ours[2 : 2 + 23]]
    assert stopped[-1] == [True, False]
    for t, o in zip(theirs[2 + 23 :], ours[2 + 23 :], strict=True):
        assert relative_error(o[1], t[1]) < ROUNDING[dtype]
    for t, o in zip(theirs[:2], ours[:2], strict=True):
        assert o.isfinite().all()
        assert relative_error(o[1], t[1]) < ROUNDING[dtype]
        if dtype == torch.float64:
            # What lies below fp32's rounding has grown to 1 on the way.
            assert relative_error(o[0], t[0]) < 1e-6


def test_a_group_that_is_not_finite_leaves_the_others():
    covariance, grad = problem(24, torch.float32, groups=4)
    expected = by_c(covariance, grad, 5)[:2]
    covariance[1, 3, 5] = covariance[1, 5, 3] = torch.nan
    covariance[2, 4, 4] = torch.inf
    for a, e in zip(by_c(covariance, grad, 5)[:2], expected, strict=True):
        assert not a[1].isfinite().any()
        assert not a[2].isfinite().any()
        torch.testing.assert_close(a[[0, 3]], e[[0, 3]], rtol=0, atol=0)


@pytest.mark.parametrize("num_iters", [0, 1, 2])
def test_a_trace_that_has_overflowed_gives_nan(num_iters):
    covariance, grad = problem(24, torch.float32)
    covariance[1, 4, 4] = torch.inf
    for result in by_c(covariance, grad, num_iters)[:2]:
        assert result[0].isfinite().all()
        assert result[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(dtype):
    covariance, grad = (t.repeat(10, 1, 1) for t in problem(64, dtype, groups=4))
    covariance *= torch.linspace(1, 2, 40, dtype=dtype)[:, None, None]
    results = []
    for threads in (1, 2, 5, 8):
        with num_threads(threads):
            results.append(by_c(covariance, grad, 5))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert torch.equal(a, b)


def test_two_threads_are_not_asked_for():
    library, of_one = build.library(torch.float32), iteration._Iteration(1, 64, 5, 12, 1)

    def threads_of(groups, threads):
        shape = iteration._Iteration(groups, 64, 5, 12, threads)
        each = verbs.workspace_for(library.newton_workspace, of_one).numel()
        return verbs.workspace_for(library.newton_workspace, shape).numel() / each

    assert threads_of(1, 16) == threads_of(2, 16) == threads_of(64, 2) == 1
    assert threads_of(64, 16) == 8
    assert 1 < threads_of(8, 16) < 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [9, 33, 64])
def test_nothing_is_read_or_written_out_of_bounds(size, dtype, monkeypatch):
    guarded = []

    def inside(tensor):
        """Memory like the tensor's, in the midst of bytes that must stay as they are."""
        block = torch.full((tensor.numel() * tensor.element_size() + 2 * GUARD,), 0xFF, dtype=torch.uint8)
        guarded.append(block)
        return block[GUARD:-GUARD].view(tensor.dtype).view(tensor.shape)

    make_workspace, make_like = verbs.workspace_for, torch.empty_like
    covariance, grad = problem(size, dtype)
    expected = by_c(covariance, grad, 5)
    monkeypatch.setattr(verbs, "workspace_for", lambda *args: inside(make_workspace(*args)))
    monkeypatch.setattr(torch, "empty_like", lambda x: inside(make_like(x)))
    whitening, kept = iteration.solve(inside(covariance).copy_(covariance), 5)
    kept = inside(kept).copy_(kept)
    gradient = iteration.solve_backward(inside(grad).copy_(grad), covariance, whitening, kept, 5)
    for a, e in zip([whitening, gradient, *kept], expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)
    assert len(guarded) == 7
    for block in guarded:
        assert (block[:GUARD] == 0xFF).all()
        assert (block[-GUARD:] == 0xFF).all()


@pytest.mark.parametrize("num_iters", [0, 1, 4])
def test_gradients_of_the_layer(num_iters, calls):
    # A full group and a smaller last one.
    x = correlated(12, 11).requires_grad_()
    weight, bias = (torch.randn(11, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def normalize(x, weight, bias):
        options = {"group_size": 8, "num_iters": num_iters, "eps": 1e-3, "impl": "native"}
        return functional.iter_norm(x, weight=weight, bias=bias, training=True, **options)

    assert torch.autograd.gradcheck(normalize, (x, weight, bias))
    assert torch.autograd.gradgradcheck(normalize, (x, weight, bias), fast_mode=True)
    assert set(calls) == set(BOTH)


def gradient_like(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)


def step(x, **options):
    leaf = x.detach().clone().requires_grad_()
    y = functional.iter_norm(leaf, training=True, **options)
    y.backward(gradient_like(y))
    return y.detach(), leaf.grad


def test_where_it_is_taken(calls, as_new_process, monkeypatch, tmp_path):
    x = torch.randn(8, 32, 20, 20)
    for activation, options, expected in (
        (x, {"group_size": 16}, BOTH),
        (x, {"group_size": 20}, ["solve"] * 2 + ["solve_backward"] * 2),
        (x.double(), {"group_size": 16}, BOTH),
        (x.bfloat16(), {"group_size": 16}, BOTH),
        (x[:, :, ::2].repeat(2, 1, 1, 1), {"group_size": 16}, BOTH),
        (x[:1], {"group_size": 16, "impl": "native"}, BOTH),
        (x[:1], {"group_size": 16}, []),
        (x, {"group_size": 7}, []),
        (x.repeat(1, 5, 1, 1), {"group_size": 160}, []),
        (x, {"group_size": 16, "impl": "torch"}, []),
        (x, {"group_size": 16, "impl": "reference"}, []),
    ):
        calls.clear()
        results = step(activation, **options)
        assert calls == expected, options
        for a, b in zip(results, step(activation, **{**options, "impl": "torch"}), strict=True):
            assert relative_error(a, b) < (1e-2 if a.dtype == torch.bfloat16 else 5e-6)
    calls.clear()
    functional.decorrelated_batch_norm(x, training=True, group_size=16)
    monkeypatch.setenv("ITERNORM_NATIVE", "0")
    step(x, group_size=16)
    # Without a compiler.
    monkeypatch.delenv("ITERNORM_NATIVE")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    as_new_process()
    step(x, group_size=16)
    assert calls == []


# Eight iterates of 128 x 128 for each of four groups are 2 MB, more than is kept beside an activation of 1 MB.
MANY_ITERATES = ((8, 512, 8, 8), 128)


def test_iterates_that_are_not_kept_are_computed_again(calls):
    shape, group_size = MANY_ITERATES
    x = correlated(*shape, dtype=torch.float32)
    found = step(x, group_size=group_size, impl="native")
    assert calls == ["solve", "solve", "solve_backward"]
    for a, e in zip(found, step(x.double(), group_size=group_size, impl="torch"), strict=True):
        assert relative_error(a, e) < 1e-5


class Watch(TorchDispatchMode):
    """The names of the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("shape", "group_size"), [((8, 32, 8, 8), 16), MANY_ITERATES])
def test_a_backward_that_is_recorded_is_made_of_operators(shape, group_size):
    x = correlated(*shape, dtype=torch.float32)
    _, expected = step(x, group_size=group_size, impl="native")
    leaf = x.clone().requires_grad_()
    y = functional.iter_norm(leaf, training=True, group_size=group_size, impl="native")
    grad = gradient_like(y)
    with Watch() as watch:
        y.backward(grad)
    assert "aten::baddbmm" in watch.seen
    assert relative_error(leaf.grad, expected) < 1e-5


def test_a_step_has_no_small_products_of_torch():
    # Each would open a parallel region and wait for a core that may be taken.
    layer, x = iternorm.IterNorm2d(128, group_size=64), torch.randn(8, 128, 16, 16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).backward(torch.randn_like(x))
    names = {event.name for event in profile.events()}
    assert "aten::lerp_" in names
    assert not names & {"aten::mm", "aten::bmm", "aten::baddbmm", "aten::addmm", "aten::matmul"}


def test_ranks_of_a_process_group_stay_with_torch():
    from iternorm.whitening import dispatch

    x = torch.randn(8, 32, 20, 20)
    alone = Settings(group_size=16)
    assert dispatch.iteration_for(dispatch.Backend.VERBS, alone, x) is iteration
    together = alone._replace(process_group=object())
    assert dispatch.iteration_for(dispatch.Backend.VERBS, together, x) is None
