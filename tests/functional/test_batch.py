"""The public functions: values against the reference, running statistics, errors."""

import pytest
import torch
from checks import correlated, covariance_of, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iternorm import functional, reference
from iternorm.whitening import groups

SOLVERS = ("newton", "zca", "pca", "cholesky")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def normalize(x, solver, **kwargs):
    if solver == "newton":
        return functional.iter_norm(x, training=True, **kwargs)
    return functional.decorrelated_batch_norm(x, training=True, solver=solver, **kwargs)


def expected_of(x, solver, weight=None, bias=None, group_size=None, num_iters=5, eps=1e-5):
    if solver == "newton":
        return reference.iter_norm(x, weight, bias, group_size, num_iters, eps)
    return reference.decorrelated_batch_norm(x, weight, bias, group_size, solver, eps)


@st.composite
def activations(draw):
    """A shape with enough samples that the groups are well conditioned, its dtype and its memory format."""
    torch.manual_seed(draw(st.integers(0, 99)))
    channels = draw(st.integers(1, 70))
    spatial = draw(st.lists(st.integers(1, 5), max_size=3))
    positions = torch.Size(spatial).numel()
    samples = -(-4 * channels // positions) + draw(st.integers(2, 9))
    x = correlated(samples, channels, *spatial, dtype=draw(st.sampled_from(DTYPES)))
    memory = draw(st.sampled_from(["contiguous", "channels_last", "strided"]))
    if memory == "channels_last" and x.ndim >= 4:
        x = x.to(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    elif memory == "strided":
        x = torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    return x


@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    x=activations(),
    group_size=st.none() | st.integers(1, 70),
    solver=st.sampled_from(SOLVERS),
    num_iters=st.integers(0, 7),
    affine=st.booleans(),
)
def test_fast_path_equals_the_reference(x, group_size, solver, num_iters, affine):
    channels = x.shape[1]
    weight, bias = torch.randn(2, channels, dtype=x.dtype) if affine else (None, None)
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    steps = {"num_iters": num_iters} if solver == "newton" else {}
    actual = normalize(leaves[0], solver, weight=leaves[1], bias=leaves[2], group_size=group_size, **steps)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = expected_of(wide[0], solver, wide[1], wide[2], group_size=group_size, num_iters=num_iters)
    assert actual.shape == x.shape
    assert actual.dtype == x.dtype
    # An exact solver divides by the smallest eigenvalue, so rounding is magnified by the condition number.
    limit = 1e-9 if x.dtype == torch.float64 else {"newton": 1e-5}.get(solver, 1e-3)
    if x.dtype in (torch.float16, torch.bfloat16):
        limit += torch.finfo(x.dtype).eps
    assert relative_error(actual, expected) < limit
    if solver == "pca" and x.dtype != torch.float64:
        # Its gradient also divides by the gaps between eigenvalues, which may be as small as chance has them.
        return
    grad = torch.randn(x.shape, dtype=x.dtype)
    actual.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in zip(leaves, wide, strict=True):
        if ours is not None and theirs is not None:
            scale = 1 if solver != "pca" else 1e4
            assert theirs.grad is not None
            difference = (ours.grad.double() - theirs.grad).norm()
            # A group of one channel with no samples to spare has gradients that vanish: measured against dy.
            assert difference < 4 * limit * scale * (theirs.grad.norm() + grad.norm() / 10)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("group_size", [16, 64, None])
def test_fp32_is_within_2e_6_of_fp64(group_size, channels_last):
    x = torch.randn(64, 128, 16, 16)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, 128)
    grad = torch.randn_like(x)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight, bias)]
        y = functional.iter_norm(leaves[0], weight=leaves[1], bias=leaves[2], training=True, group_size=group_size)
        y.backward(grad.to(dtype))
        results.append([y.detach(), *(t.grad for t in leaves)])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("solver", SOLVERS)
def test_half_precision_is_rounded_once(dtype, solver):
    # Statistics, iteration and products are fp32: what is left is the rounding of the output.
    x = correlated(32, 12, 6, 6, dtype=dtype)
    y = normalize(x, solver, group_size=5)
    assert y.dtype == dtype
    assert relative_error(y, expected_of(x.double(), solver, group_size=5)) < torch.finfo(dtype).eps / 2


def test_zca_gives_unit_covariance():
    x = correlated(256, 24, 4, 4)
    y = functional.decorrelated_batch_norm(x, training=True, group_size=None, eps=1e-12)
    torch.testing.assert_close(covariance_of(y), torch.eye(24, dtype=torch.float64), atol=1e-9, rtol=0)
    y = functional.decorrelated_batch_norm(x.float(), training=True, group_size=None)
    torch.testing.assert_close(covariance_of(y), torch.eye(24), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_many_steps_equal_zca_at_condition_number_1000(dtype):
    eigenvalues = torch.logspace(0, -3, 16, dtype=torch.float64)
    x = torch.randn(4096, 16, dtype=torch.float64)
    # Samples whose covariance has exactly these eigenvalues.
    x = reference.decorrelated_batch_norm(x, group_size=None, eps=1e-14)
    x = x @ torch.diag(eigenvalues.sqrt()) @ torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0]
    expected = reference.decorrelated_batch_norm(x, group_size=None, eps=1e-10)
    actual = functional.iter_norm(x.to(dtype), training=True, num_iters=30, eps=1e-10)
    assert (actual - expected).abs().max() < (1e-3 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("solver", ["newton", "zca"])
@pytest.mark.parametrize("num_iters", [0, 1, 5])
def test_rotating_the_channels_rotates_the_output(solver, num_iters):
    x = correlated(32, 8, 3, 3)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]

    def rotate(t):
        return torch.einsum("ij,njhw->nihw", rotation, t)

    steps = {"num_iters": num_iters} if solver == "newton" else {}
    actual = normalize(rotate(x), solver, group_size=None, **steps)
    torch.testing.assert_close(actual, rotate(normalize(x, solver, group_size=None, **steps)))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "2-D"])
@pytest.mark.parametrize("channels", ["one", "all"])
def test_a_mean_of_1000_deviations_whitens_in_fp32(solver, layout, channels):
    x = torch.randn(64, 16, 12, 12, dtype=torch.float64)
    x[:, 3 if channels == "one" else slice(None)] += 1000
    x = x.float()
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    if layout == "2-D":
        x = x.permute(0, 2, 3, 1).reshape(-1, 16)
    actual = normalize(x, solver, group_size=16)
    expected = expected_of(x.double(), solver, group_size=16)
    if solver == "pca":
        # Axes of nearly equal variance turn freely; what they span does not.
        actual, expected = covariance_of(actual), covariance_of(expected)
    assert (actual - expected).abs().max() < 1e-3


def test_the_reference_implementation_is_the_reference():
    x = correlated(8, 10, 3, 3)
    weight, bias = torch.randn(2, 10, dtype=torch.float64)
    for solver in SOLVERS:
        actual = normalize(x, solver, weight=weight, bias=bias, group_size=4, impl="reference")
        torch.testing.assert_close(actual, expected_of(x, solver, weight, bias, 4), rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", ["whitening", "covariance"])
def test_running_statistics_follow_the_papers_equation(impl, solver, kind):
    x = correlated(16, 10, 3, 3)
    start = torch.randn(10, dtype=torch.float64), torch.randn(3, 4, 4, dtype=torch.float64)
    mean, matrix = (t.clone() for t in start)
    normalize(
        x, solver, running_mean=mean, **{f"running_{kind}": matrix}, momentum=0.3, group_size=4, impl=impl, eps=1e-3
    )
    solve = (lambda c: reference.newton(c, 5)) if solver == "newton" else getattr(reference, solver)
    _, batch_mean, matrices = reference.whiten(x, solve, 4, 1e-3)
    if kind == "covariance":
        # The running covariance is that of the data: eps is added where it is used.
        matrices = [covariance_of(g) for g in x.split(4, 1)]
    batch = groups.pad([torch.stack(matrices[:2]), matrices[2][None]])
    torch.testing.assert_close(mean, 0.7 * start[0] + 0.3 * batch_mean)
    torch.testing.assert_close(matrix, 0.7 * start[1] + 0.3 * batch)


def test_eval_applies_the_running_statistics():
    x = correlated(4, 10, 3, 3)
    mean, weight, bias = torch.randn(3, 10, dtype=torch.float64)
    whitening = torch.randn(3, 4, 4, dtype=torch.float64)
    blocks = torch.block_diag(whitening[0], whitening[1], whitening[2, :2, :2])
    shape = (1, -1, 1, 1)
    expected = torch.einsum("ij,njhw->nihw", blocks, x - mean.view(shape)) * weight.view(shape) + bias.view(shape)
    actual = functional.iter_norm(x, mean, whitening, weight, bias, group_size=4)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("shape", [(5, 10), (5, 10, 3), (5, 10, 3, 2), (5, 10, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_eval_in_every_rank_and_dtype(shape, dtype):
    x = correlated(*shape, dtype=dtype)
    mean, whitening = torch.randn(10), torch.randn(3, 4, 4)
    actual = functional.iter_norm(x, mean, whitening, group_size=4)
    expected = functional.iter_norm(x.double(), mean.double(), whitening.double(), group_size=4)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < torch.finfo(dtype).eps * 4


def arguments(**changes):
    """A call that works, with changes."""
    good = {
        "input": torch.randn(6, 10, 2, 2),
        "running_mean": torch.zeros(10),
        "running_whitening": torch.eye(4).expand(3, 4, 4).clone(),
        "weight": torch.ones(10),
        "bias": torch.zeros(10),
        "training": True,
        "group_size": 4,
        "num_batches_tracked": torch.tensor(3),
    }
    return {**good, **changes}


ERRORS = [
    ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
    ({"input": torch.ones(6, 10, dtype=torch.long)}, TypeError, "input has dtype torch.int64; .* input.float()"),
    ({"input": torch.ones(6, 10, dtype=torch.complex64)}, TypeError, "input has dtype torch.complex64"),
    ({"input": torch.ones(10)}, ValueError, r"2 to 5 dimensions \[N, C, ...\], got 1: shape \[10\]"),
    ({"input": torch.ones(1, 1, 1, 1, 1, 1)}, ValueError, "2 to 5 dimensions .* got 6"),
    ({"input": torch.ones(4, 0)}, ValueError, r"input has no channels: shape \[4, 0\]"),
    ({"input": torch.ones(1, 10, 1, 1)}, ValueError, r"more than 1 value per channel .* \[1, 10, 1, 1\]; use a larger"),
    ({"group_size": 0}, ValueError, "group_size=0 must be at least 1; use None"),
    ({"group_size": -4}, ValueError, "group_size=-4 must be at least 1"),
    ({"group_size": 4.0}, TypeError, "group_size=4.0 is not an integer"),
    ({"group_size": True}, TypeError, "group_size=True is not an integer"),
    ({"num_iters": -1}, ValueError, "num_iters=-1 must be at least 0; the paper uses 5"),
    ({"num_iters": 2.5}, TypeError, "num_iters=2.5 is not an integer"),
    ({"eps": -1e-5}, ValueError, "eps=-1e-05 must not be negative"),
    ({"eps": float("nan")}, ValueError, "eps=nan must not be negative"),
    ({"eps": float("inf")}, ValueError, "eps=inf must not be negative or infinite"),
    ({"correction": 2}, ValueError, "correction=2 is not known; 0 is the biased covariance, 1 the unbiased one"),
    ({"correction": 0.5}, TypeError, "correction=0.5 is not an integer"),
    ({"shrinkage": 1.5}, ValueError, "shrinkage=1.5 must be from 0 to 1"),
    ({"shrinkage": "much"}, TypeError, "shrinkage='much' is not a number"),
    ({"eps": "small"}, TypeError, "eps='small' is not a number"),
    ({"momentum": 1.5}, ValueError, "momentum=1.5 must be from 0 to 1"),
    ({"momentum": "fast"}, TypeError, "momentum='fast' is not a number"),
    ({"momentum": None, "num_batches_tracked": None}, ValueError, "momentum=None .* needs num_batches_tracked"),
    (
        {"impl": "cuda"},
        ValueError,
        "impl='cuda' is not known; choose one of 'auto', 'triton', 'native', 'torch', 'reference'",
    ),
    ({"weight": torch.ones(9)}, ValueError, r"weight has shape \[9\]; an input of 10 channels .* needs \[10\]"),
    ({"bias": torch.ones(10, 1)}, ValueError, r"bias has shape \[10, 1\]"),
    ({"running_mean": torch.ones(3)}, ValueError, r"running_mean has shape \[3\]"),
    ({"running_whitening": torch.ones(2, 5, 5)}, ValueError, r"running_whitening has shape .* needs \[3, 4, 4\]"),
    ({"running_covariance": torch.ones(3, 4, 4)}, ValueError, "are both given"),
    ({"running_whitening": None}, ValueError, "go together; give both or neither"),
    ({"running_mean": None}, ValueError, "go together; give both or neither"),
    (
        {"running_mean": None, "running_whitening": None, "training": False},
        ValueError,
        "training=False needs running_mean",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors_name_the_argument_and_change_nothing(changes, kind, message):
    good = arguments()
    call = {**good, **changes}
    functional.iter_norm(**arguments())
    before = {k: v.clone() for k, v in call.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(kind, match=message):
        functional.iter_norm(**call)
    for name, value in before.items():
        torch.testing.assert_close(call[name], value, rtol=0, atol=0)


def test_an_implementation_that_cannot_run_raises():
    # In an environment without triton, or with an old one, that is the reason.
    with pytest.raises(ValueError, match=r'impl="triton" cannot run: .*(float64|triton.* installed); use impl="auto"'):
        functional.iter_norm(torch.randn(4, 4, dtype=torch.float64), training=True, impl="triton")


def test_unknown_solver():
    with pytest.raises(ValueError, match="solver='newton' is not known; choose one of 'zca', 'pca', 'cholesky'"):
        functional.decorrelated_batch_norm(torch.randn(4, 4), training=True, solver="newton")


def test_an_unwritten_element_would_show(poisoned_memory):
    for x in (torch.randn(6, 70, 9, 9), torch.randn(6, 70, 2, 2), torch.randn(99, 70)):
        for solver in SOLVERS:
            leaf = x.clone().requires_grad_()
            y = normalize(leaf, solver, group_size=64 if solver == "newton" else 16, eps=1e-2)
            assert y.isfinite().all()
            y.square().mean().backward()
            assert leaf.grad.isfinite().all()
