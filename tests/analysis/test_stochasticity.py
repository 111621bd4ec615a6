"""SND: the definition, its two implementations against each other, its closed forms, and the paper's claims."""

from typing import Any

import pytest
import torch
from torch import nn

import iternorm
from iternorm import reference
from iternorm.analysis import (
    Whitening,
    batch_norm,
    condition_number,
    covariance,
    decorrelated_batch_norm,
    in_training,
    iter_norm,
    operation_of,
    snd,
)
from iternorm.analysis.stochasticity import summarize

OPERATIONS = [
    batch_norm(),
    iter_norm(5),
    iter_norm(0),
    iter_norm(3, group_size=4),
    decorrelated_batch_norm("zca"),
    decorrelated_batch_norm("pca", group_size=3),
    decorrelated_batch_norm("cholesky", group_size=5),
]


def by_reference(operation):
    """The operation in plain terms: whitening matrices of the reference batch, applied to centred samples."""
    solver = {"zca": reference.zca, "pca": reference.pca, "cholesky": reference.cholesky}.get(operation.solver)

    def apply(batch, samples):
        size = operation.group_size
        newton = solver or (lambda matrix: reference.newton(matrix, operation.num_iters))
        if size == 1:
            newton = torch.rsqrt
        _, mean, matrices = reference.whiten(batch, newton, size, operation.eps)
        shape = (1, -1) + (1,) * (samples.ndim - 2)
        blocks = torch.block_diag(*matrices)
        return torch.einsum("ij,nj...->ni...", blocks, samples - mean.view(shape))

    return apply


def snd_by_definition(operation, data, batch_size, samples, draws):
    """Equations 9 and 10 as they stand, over the batches that `snd` draws."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.stack(
        [operation(data[torch.randperm(len(data), generator=generator)[:batch_size]], samples) for _ in range(draws)]
    )
    mean = outputs.mean(0)
    distances, norms = (outputs - mean).norm(dim=2), mean.norm(dim=1)
    return (distances.flatten(2).mean(2), norms.flatten(1).mean(1)) if distances.ndim > 2 else (distances, norms)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
@pytest.mark.parametrize("positions", [(), (3, 2)])
def test_vectorized_estimate_equals_the_definition(operation, positions, generator):
    data = torch.randn(40, 8, *positions, generator=generator, dtype=torch.float64) + 5
    samples = torch.randn(6, 8, *positions, generator=generator, dtype=torch.float64)
    expected, norms = snd_by_definition(by_reference(operation), data, 12, samples, draws=9)
    for budget in (1, 2**12, 2**30):
        result = snd(operation, data, 12, samples=samples, draws=9, memory_budget=budget)
        torch.testing.assert_close(result.per_sample, expected.mean(0))
        assert result.value == pytest.approx(expected.mean().item())
        assert result.relative == pytest.approx((expected.mean() / norms.mean()).item())


@pytest.mark.parametrize("budget", [1, 2**30])
def test_a_function_equals_the_definition(budget, generator):
    data = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    samples = data[:5] * 2
    operation = by_reference(iter_norm(3, group_size=4))
    result = snd(operation, data, 12, samples=samples, draws=9, memory_budget=budget)
    expected, norms = snd_by_definition(operation, data, 12, samples, 9)
    torch.testing.assert_close(result.per_sample, expected.mean(0))
    assert result.relative == pytest.approx((expected.mean() / norms.mean()).item())


def test_a_sample_is_measured_alone(generator):
    data = torch.randn(200, 4, generator=generator)
    many = snd(batch_norm(), data, 8, samples=data[:7])
    for index in range(7):
        one = snd(batch_norm(), data, 8, samples=data[index : index + 1])
        assert one.value == pytest.approx(many.per_sample[index].item(), rel=1e-5)
        assert one.standard_error == pytest.approx(many.per_sample_standard_error[index].item(), rel=1e-5)


def test_centring_alone_has_a_closed_form(generator):
    # F(X; x) = x - mean(X) moves by N(0, I/B), whose norm has mean √2 Γ((d+1)/2) / Γ(d/2) / √B.
    data = torch.randn(20000, 3, generator=generator)
    result = snd(lambda batch, samples: samples - batch.mean(0), data, 25, samples=1, draws=2000)
    expected = (2 / torch.pi) ** 0.5 * 2 / 5
    assert abs(result.value - expected) < 4 * result.standard_error
    assert result.standard_error < 0.02 * expected


def test_standard_error_covers_the_spread_of_repeats(generator):
    data = torch.randn(5000, 8, generator=generator)
    results = [snd(batch_norm(), data, 16, samples=40, draws=40, seed=seed) for seed in range(60)]
    spread = torch.tensor([result.value for result in results]).std().item()
    stated = sum(result.standard_error for result in results) / len(results)
    assert 0.6 < spread / stated < 1.6


def test_standard_error_of_known_distances():
    # Only batches differ, then only samples: the error is that of a mean over the one that does.
    distances = torch.tensor([1.0, 2, 3, 6])[:, None].expand(4, 50)
    assert summarize(distances, distances[0], 2).standard_error == pytest.approx(distances[:, 0].std().item() / 2)
    assert summarize(distances.T, distances[:, 0], 2).standard_error == pytest.approx(distances[:, 0].std().item() / 2)


def test_standard_error_of_distances_that_are_sums():
    batches, samples = torch.tensor([0.0, 1, 5]), torch.tensor([0.0, 2, 3, 9])
    distances = batches[:, None] + samples
    expected = (batches.var() / 3 + samples.var() / 4).sqrt().item()
    assert summarize(distances, distances[0], 2).standard_error == pytest.approx(expected)


def test_standard_error_of_independent_distances(generator):
    distances = torch.rand(60, 80, generator=generator)
    expected = distances.std().item() / (60 * 80) ** 0.5
    assert summarize(distances, distances[0], 2).standard_error == pytest.approx(expected, rel=0.2)


def test_seed_repeats_and_generator_moves_on(generator):
    data = torch.randn(100, 4, generator=generator)
    assert snd(batch_norm(), data, 8, seed=3).value == snd(batch_norm(), data, 8, seed=3).value
    assert snd(batch_norm(), data, 8, seed=3).value != snd(batch_norm(), data, 8, seed=4).value
    first, second = (snd(batch_norm(), data, 8, seed=generator).value for _ in range(2))
    assert first != second


def test_global_random_state_is_not_used(generator):
    data = torch.randn(100, 4, generator=generator)
    state = torch.get_rng_state()
    snd(batch_norm(), data, 8)
    assert torch.equal(state, torch.get_rng_state())


def test_a_large_mean_does_not_disturb_fp32(generator):
    data = torch.randn(500, 6, generator=generator)
    small = snd(iter_norm(5), data, 16).value
    assert snd(iter_norm(5), data + 1000, 16).value == pytest.approx(small, rel=1e-3)


@pytest.mark.parametrize("batch_size", [2, 6])
def test_rank_deficient_dbn_is_finite_and_exact_in_fp32(batch_size, generator):
    # 32 channels from a batch of 2: 31 eigenvalues are zero, and eps decides.
    data = 20 * torch.randn(200, 32, generator=generator)
    exact = snd(decorrelated_batch_norm(), data.double(), batch_size, draws=20, samples=20).value
    assert snd(decorrelated_batch_norm(), data, batch_size, draws=20, samples=20).value == pytest.approx(
        exact, rel=1e-3
    )


@pytest.mark.parametrize("solver", ["zca", "cholesky"])
def test_eps_is_not_lost_beside_large_variances(solver):
    # One direction of variance 512, and eps below the spacing of fp32 at the diagonal's 64.
    covariance_of_copies = torch.full((8, 8), 64.0)
    operation = decorrelated_batch_norm(solver, eps=1e-6)
    exact = operation.whitening(covariance_of_copies.double())
    torch.testing.assert_close(operation.whitening(covariance_of_copies), exact.float(), rtol=1e-4, atol=1e-2)


def test_a_layer_in_training_joins_the_sample_to_the_batch(generator):
    data = torch.randn(60, 5, generator=generator)
    layer = nn.BatchNorm1d(5).eval()

    def joined(batch, samples):
        batches = [torch.cat([batch[:-1], sample[None]]) for sample in samples]
        return torch.stack([reference.batch_norm(batch)[-1] for batch in batches])

    result = snd(in_training(layer), data, 10, samples=data[:4], draws=12)
    expected = snd(joined, data, 10, samples=data[:4], draws=12)
    torch.testing.assert_close(result.per_sample, expected.per_sample, rtol=1e-4, atol=1e-5)
    assert not layer.training
    assert layer.num_batches_tracked == 0


def test_a_users_layer_on_images(generator):
    data = torch.randn(30, 6, 4, 4, generator=generator)
    result = snd(in_training(iternorm.IterNorm2d(6, group_size=3)), data, 8, samples=data[:3], draws=10)
    direct = snd(iter_norm(5, group_size=3), data, 8, samples=data[:3], draws=10)
    # The sample inside its own batch makes it a little smaller.
    assert 0.5 * direct.value < result.value < direct.value


def test_operation_of_layers():
    assert operation_of(nn.BatchNorm2d(4, eps=1e-3)) == batch_norm(1e-3)
    assert operation_of(nn.SyncBatchNorm(4)) == batch_norm()
    assert operation_of(iternorm.IterNorm1d(4, num_iters=7, group_size=2)) == iter_norm(7, group_size=2)
    dbn = iternorm.DecorrelatedBatchNorm2d(4, solver="pca", group_size=None, eps=1e-3)
    assert operation_of(dbn) == decorrelated_batch_norm("pca", None, 1e-3)
    assert operation_of(nn.LayerNorm(4)) is None
    words: Any
    for words in ({"correction": 1}, {"shrinkage": 0.1}, {"shuffle": True}):
        other = iternorm.IterNorm1d(4, track_running_stats=False, **words)
        assert operation_of(other) is None, words


@pytest.mark.parametrize(
    ("layer", "channels"),
    [(iternorm.IterNorm1d(10, group_size=4, affine=False), 10), (iternorm.DecorrelatedBatchNorm1d(7, affine=False), 7)],
)
def test_operation_is_what_the_layer_computes(layer, channels, generator):
    x = torch.randn(64, channels, generator=generator, dtype=torch.float64)
    output = layer.double()(x)
    predicted = operation_of(layer).normalized_covariance(covariance(x))
    torch.testing.assert_close(covariance(output), predicted)


def test_labels():
    assert [operation.label for operation in OPERATIONS] == [
        "BN",
        "IterNorm T=5",
        "IterNorm T=0",
        "IterNorm T=3 d=4",
        "DBN",
        "DBN-3 pca",
        "DBN-5 cholesky",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 1}, "batch_size is 1"),
        ({"batch_size": 21}, "20 examples, fewer than batch_size=21"),
        ({"draws": 1}, "draws is 1"),
        ({"samples": 0}, "samples is 0"),
        ({"samples": torch.zeros(3, 5)}, r"\(3, 5\), but \[N, 4"),
        ({"data": torch.full((20, 4), torch.nan)}, "data hold NaN or Inf"),
        ({"samples": torch.full((3, 4), torch.inf)}, "samples hold NaN or Inf"),
        ({"data": torch.zeros(20)}, r"shape \(20,\)"),
        ({"operation": lambda batch, samples: samples[:, :2]}, "operation returned shape"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    call = {"operation": batch_norm(), "data": torch.randn(20, 4), "batch_size": 8, "draws": 3} | arguments
    with pytest.raises(ValueError, match=text):
        snd(call.pop("operation"), call.pop("data"), call.pop("batch_size"), **call)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"solver": "svd"}, "svd"),
        ({"group_size": 0}, "group_size is 0"),
        ({"num_iters": -1}, "num_iters is -1"),
        ({"eps": -1.0}, "eps is -1"),
    ],
)
def test_wrong_operations_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        Whitening(**arguments)


class TestPaper:
    """The claims of Figures 4, 5 and A2 at a reduced size: fewer draws and samples, the paper's batch sizes."""

    @staticmethod
    def snd(operation, dimension, batch_size):
        data = torch.randn(8000, dimension, generator=torch.Generator().manual_seed(0))
        return snd(operation, data, batch_size, samples=200, draws=30)

    @staticmethod
    def condition(operation, dimension, batch_size=1024):
        data = torch.randn(batch_size, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return condition_number(operation.normalized_covariance(covariance(data))).item()

    @pytest.mark.parametrize("dimension", [2, 32, 128])
    def test_dbn_has_condition_number_one(self, dimension):
        assert self.condition(decorrelated_batch_norm(), dimension) == pytest.approx(1, abs=1e-4)

    def test_snd_of_dbn_grows_with_dimension_beyond_that_of_bn(self):
        dbn = [self.snd(decorrelated_batch_norm(), dimension, 1024).value for dimension in (8, 32, 128)]
        bn = [self.snd(batch_norm(), dimension, 1024).value for dimension in (8, 32, 128)]
        assert dbn[0] < dbn[1] < dbn[2]
        assert all(d > 1.3 * b for d, b in zip(dbn, bn, strict=True))
        assert dbn[2] / bn[2] > 2 * dbn[0] / bn[0]

    @pytest.mark.parametrize("dimension", [128, 256])
    def test_iter_norm_has_less_snd_than_bn_in_high_dimension_and_better_conditioning(self, dimension):
        bn, iteration = (self.snd(operation, dimension, 1024) for operation in (batch_norm(), iter_norm(5)))
        assert iteration.value + 4 * iteration.standard_error < bn.value - 4 * bn.standard_error
        assert self.condition(iter_norm(5), dimension) < 0.95 * self.condition(batch_norm(), dimension)

    def test_snd_of_micro_batches_grows_with_dimension_for_bn_only(self):
        bn = [self.snd(batch_norm(), dimension, 2).value for dimension in (2, 16, 128)]
        iteration = [self.snd(iter_norm(5), dimension, 2).value for dimension in (2, 16, 128)]
        assert bn[0] < bn[1] < bn[2]
        assert max(iteration[1:]) < iteration[0]
        assert bn[2] > 10 * iteration[2]

    def test_snd_of_bn_falls_with_batch_size(self):
        values = [self.snd(batch_norm(), 128, batch_size).value for batch_size in (2, 8, 64, 512)]
        assert values == sorted(values, reverse=True)

    def test_more_iterations_condition_better_and_disturb_more(self):
        steps = (1, 3, 5, 7, 9)
        condition = [self.condition(iter_norm(num_iters), 64) for num_iters in steps]
        noise = [self.snd(iter_norm(num_iters), 64, 1024).value for num_iters in steps]
        assert condition == sorted(condition, reverse=True)
        assert noise == sorted(noise)
