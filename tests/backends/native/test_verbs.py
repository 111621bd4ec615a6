"""The C kernels in every shape and layout, against sums written plainly in fp64."""

import pytest
import torch
from checks import SHAPES, by_group, channels_last, correlated, padded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from iternorm.backends.native import build, verbs
from iternorm.backends.torch import verbs as torch_verbs
from iternorm.timing.threads import num_threads
from iternorm.whitening import groups

DTYPES = (torch.float32, torch.float64)
LIMIT = {torch.float32: 2e-6, torch.float64: 1e-13}
GUARD = 4096


@pytest.fixture(scope="module", autouse=True)
def _built():
    for dtype in DTYPES:
        if reason := build.failure(dtype):
            pytest.skip(reason)


def layouts(x):
    yield x.contiguous()
    if x.ndim == 3:
        yield x.transpose(1, 2).contiguous().transpose(1, 2)
    if x.ndim in (4, 5):
        yield channels_last(x)


def small(num_features, group_size, dtype):
    """Two matrices and two vectors for the maps; what a smaller last group leaves free holds NaN."""
    size, count = groups.effective_size(num_features, group_size), groups.num_groups(num_features, group_size)
    matrices = torch.full((2, count, size, size), torch.nan, dtype=dtype)
    for part in groups.parts(num_features, group_size):
        for matrix in matrices:
            part.of(matrix).normal_()
    return *matrices, *torch.randn(2, num_features, dtype=dtype)


def all_verbs(module, x, grad, group_size, first, second, offset, mean):
    return [
        *module.moments(x, group_size),
        *module.cross_moments(grad, x, mean, group_size),
        module.apply(x, first, offset, group_size),
        module.apply_backward(grad, x, first, second, offset, group_size),
    ]


def closed_forms(x, grad, group_size, first, second, offset, mean):
    """The same in fp64, each group as ``[d, m]``."""
    shape, size = x.shape, groups.effective_size(x.shape[1], group_size)
    x_blocks, grad_blocks = by_group(x, group_size), by_group(grad, group_size)
    means = mean.double().split(group_size)

    def joined(blocks):
        whole = torch.cat(blocks).view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        return whole + offset.double().view(1, -1, *(1,) * (len(shape) - 2))

    def mapped(block, matrix):
        return matrix[: len(block), : len(block)].double() @ block

    mapped_x = [mapped(b, a) for b, a in zip(x_blocks, first, strict=True)]
    pair = [mapped(g, a) + mapped(b, c) for g, b, a, c in zip(grad_blocks, x_blocks, first, second, strict=True)]
    return [
        torch.cat([b.mean(1) for b in x_blocks]),
        padded([torch.cov(b, correction=0).view(len(b), len(b)) for b in x_blocks], size),
        torch.cat([g.sum(1) for g in grad_blocks]),
        padded([g @ (b - m[:, None]).T for g, b, m in zip(grad_blocks, x_blocks, means, strict=True)], size),
        joined(mapped_x),
        joined(pair),
    ]


NAMES = ("mean", "covariance", "sum", "cross", "apply", "apply_backward")


def assert_right(actual, expected, dtype, what):
    num_samples = actual[-1].numel() // actual[0].numel()
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert a.dtype == dtype
        assert a.shape == e.shape
        # One sample has no covariance. Random sums cancel, but are about so large where they do not.
        summed = num_samples if name in ("sum", "cross") else 1e-4
        scale = max(float(e.norm()), (e.numel() * summed) ** 0.5)
        error = float((a.double() - e).norm()) / scale
        assert error < 2 * LIMIT[dtype], f"{name} of {what}: {error:.1e}"


def check(shape, group_size, dtype):
    x, grad = correlated(*shape, dtype=dtype), correlated(*shape, dtype=dtype)
    parameters = small(shape[1], group_size, dtype)
    expected = closed_forms(x, grad, group_size, *parameters)
    for x_in, grad_in in zip(layouts(x), layouts(grad), strict=True):
        actual = all_verbs(verbs, x_in, grad_in, group_size, *parameters)
        assert_right(actual, expected, dtype, f"{shape}, groups of {group_size}, strides {x_in.stride()}")
        assert actual[-1].stride() == actual[-2].stride() == x_in.stride()


# And on both sides of those that the kernels make: whole and ragged vectors, blocks, tiles and chunks, short planes
# that share a tile and long ones that are cut.
MORE_SHAPES = [
    ((1, 5, 1), 2),
    ((2100, 33), 32),
    ((5, 64, 32, 32), 64),
    ((3, 96, 31, 33), 48),
    ((2, 24, 60, 60), 16),
    ((1, 12, 70, 70), 12),
    ((70, 40, 7, 7), 33),
    ((4, 200, 8, 8), 130),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "group_size"), SHAPES + MORE_SHAPES)
def test_every_verb(shape, group_size, dtype, poisoned_memory):
    check(shape, group_size, dtype)


@settings(max_examples=80, deadline=None)
@given(
    samples=st.integers(1, 9),
    groups_of=st.integers(1, 130),
    ragged=st.integers(0, 129),
    spatial=st.lists(st.integers(1, 17), max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_any_shape(samples, groups_of, ragged, spatial, dtype, seed):
    torch.manual_seed(seed)
    check((samples, groups_of + ragged % groups_of, *spatial), groups_of, dtype)


def test_machines_with_narrower_vectors(narrower_vectors):
    for dtype in DTYPES:
        for shape, group_size in SHAPES + MORE_SHAPES:
            check(shape, group_size, dtype)


GUARDED = [((3, 70, 9, 9), 64), ((33, 13), 5), ((70, 40, 7, 7), 33), ((1, 12, 70, 70), 12)]
# Large enough to be stored past the caches, 8 MB of fp32, and the same where vectors of the output are not whole lines.
GUARDED += [((65, 32, 33, 32), 32), ((70, 32, 31, 31), 32), ((70, 40, 29, 29), 20)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "group_size"), GUARDED)
def test_nothing_is_read_or_written_out_of_bounds(shape, group_size, dtype, monkeypatch):
    guarded = []

    def inside(tensor):
        """Memory like the tensor's, in the midst of bytes that must stay as they are."""
        size = tensor.numel() * tensor.element_size()
        block = torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8)
        guarded.append(block)
        return (
            block[GUARD:-GUARD].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), GUARD // tensor.itemsize)
        )

    make_results, make_workspace = verbs._results, verbs.workspace_for
    monkeypatch.setattr(verbs, "_results", lambda *args: tuple(inside(t) for t in make_results(*args)))
    monkeypatch.setattr(verbs, "workspace_for", lambda *args: inside(make_workspace(*args)))
    monkeypatch.setattr(torch_verbs, "empty_output", lambda x: inside(torch.empty_like(x)))
    x, grad = correlated(*shape, dtype=dtype), correlated(*shape, dtype=dtype)
    parameters = small(shape[1], group_size, dtype)
    expected = closed_forms(x, grad, group_size, *parameters)
    for x_in, grad_in in zip(layouts(x), layouts(grad), strict=True):
        # Bytes of 0xFF are NaN: one that is read spoils the result.
        x_in, grad_in = inside(x_in).copy_(x_in), inside(grad_in).copy_(grad_in)
        first, second, offset, mean = (inside(p).copy_(p) for p in parameters)
        assert_right(all_verbs(verbs, x_in, grad_in, group_size, first, second, offset, mean), expected, dtype, shape)
    assert len(guarded) >= 16
    for block in guarded:
        assert (block[:GUARD] == 0xFF).all()
        assert (block[-GUARD:] == 0xFF).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_that_begins_at_any_element(dtype):
    shape, group_size = (4, 24, 9, 8), 16
    memory = torch.full((2, 4 * 24 * 72 + 3), torch.nan, dtype=dtype)
    x, grad = (m[3:].view(shape).copy_(correlated(*shape, dtype=dtype)) for m in memory)
    assert x.data_ptr() % 16
    parameters = small(24, group_size, dtype)
    expected = closed_forms(x, grad, group_size, *parameters)
    assert_right(all_verbs(verbs, x, grad, group_size, *parameters), expected, dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "group_size"), [((9, 70, 23, 23), 32), ((4000, 70), 33), ((20, 16, 32, 32), 16)])
def test_the_number_of_threads_does_not_change_a_bit(shape, group_size, dtype):
    for x in layouts(correlated(*shape, dtype=dtype)):
        grad = torch.randn_like(x)
        parameters = [p.nan_to_num() for p in small(shape[1], group_size, dtype)]
        results = []
        for threads in (1, 2, 3, 7):
            with num_threads(threads):
                results.append(all_verbs(verbs, x, grad, group_size, *parameters))
        for result in results[1:]:
            for name, a, b in zip(NAMES, result, results[0], strict=True):
                assert torch.equal(a, b), name


@pytest.mark.parametrize("mean", [0.0, 3.0, 30.0, 1e3, -1e4])
def test_a_large_mean_costs_no_accuracy(mean):
    for x in layouts(torch.randn(16, 8, 24, 24) + mean):
        exact_mean, exact = torch_verbs.moments(x.double(), 8)
        actual_mean, actual = verbs.moments(x, 8)
        assert relative_error(actual_mean, exact_mean) < 1e-6
        assert relative_error(actual, exact) < 1e-6
        grad = torch.randn_like(x) + 1
        total, cross = verbs.cross_moments(grad, x, actual_mean, 8)
        exact_total, exact_cross = torch_verbs.cross_moments(grad.double(), x.double(), actual_mean.double(), 8)
        assert relative_error(total, exact_total) < 1e-6
        assert relative_error(cross, exact_cross) < 1e-6


def test_first_samples_that_mislead_cost_no_accuracy():
    # The pilot of the first chunk, and of the chunk in which the mean jumps, are far from the mean.
    x = torch.randn(8, 8, 40, 40)
    x[0] = 0
    x[1:, :, 20:] += 1e3
    x[4:] -= 5e3
    for view in layouts(x):
        exact = torch_verbs.moments(view.double(), 8)
        for a, e in zip(verbs.moments(view, 8), exact, strict=True):
            assert relative_error(a, e) < 1e-6


def test_a_constant_activation_has_no_covariance():
    for x in layouts(torch.full((8, 8, 20, 20), 7.3)):
        mean, covariance = verbs.moments(x, 8)
        assert relative_error(mean, torch.full((8,), 7.3)) < 1e-7
        assert covariance.abs().max() < 1e-10


def test_what_is_not_a_number_is_not_lost():
    for bad in (torch.nan, torch.inf):
        for x in layouts(torch.randn(4, 8, 20, 20)):
            x[3, 5, 19, 19] = bad
            mean, covariance = verbs.moments(x, 4)
            assert not mean[5].isfinite()
            assert mean[:4].isfinite().all()
            assert not covariance[1].isfinite().all()
            y = verbs.apply(x, torch.randn(2, 4, 4), torch.zeros(8), 4)
            assert (~y.isfinite()).sum() == 4


@pytest.mark.parametrize(
    "x", [torch.randn(4, 8, 6, 6).bfloat16(), torch.randn(4, 8, 6, 6, device="meta")], ids=["bfloat16", "meta"]
)
def test_what_the_kernels_cannot_take_is_named(x):
    assert verbs.unsupported(x)
    assert not verbs.can_run(x)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 8, 6, 6)[:, :, ::2],
        torch.randn(4, 9, 6, 6)[:, 1:],
        torch.randn(4, 8, 1, 1).expand(4, 8, 3, 3),
        torch.randn(8, 4).t(),
        channels_last(torch.randn(4, 8, 6, 6))[:, :, ::2],
    ],
    ids=["strided", "slice", "expanded", "transposed", "strided rows"],
)
def test_memory_of_another_layout_is_copied(x):
    parameters = small(x.shape[1], 3, torch.float32)
    for grad in (torch.randn(x.shape), torch.randn(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]):
        actual = all_verbs(verbs, x, grad, 3, *parameters)
        assert_right(actual, closed_forms(x, grad, 3, *parameters), torch.float32, f"strides {x.stride()}")
        assert actual[-1].is_contiguous()
        assert actual[-2].is_contiguous()


def test_rows_and_planes_together():
    x = torch.randn(4, 8, 6, 6)
    # Planes of one position are rows too, whatever their strides say.
    for x_in in (x, x[:, :, :1, :1].contiguous()):
        parameters = small(8, 3, torch.float32)
        grad = torch.randn_like(x_in)
        expected = closed_forms(x_in, grad, 3, *parameters)
        for pair in ((channels_last(x_in), grad), (x_in, channels_last(grad))):
            actual = all_verbs(verbs, *pair, 3, *parameters)
            assert_right(actual, expected, torch.float32, "rows and planes")
            assert actual[-1].stride() == pair[0].stride()
