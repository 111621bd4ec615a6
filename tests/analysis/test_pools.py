"""What is kept of a stream: sums that make the statistics of batches, and single samples."""

import pickle

import pytest
import torch

from iternorm.analysis import batch_norm, decorrelated_batch_norm, iter_norm
from iternorm.analysis.pools import SamplePool, StatisticsPool, statistics_bytes

OPERATIONS = [
    batch_norm(),
    iter_norm(3, group_size=8),
    iter_norm(3, group_size=4),
    decorrelated_batch_norm(group_size=6),
    decorrelated_batch_norm("cholesky"),
]


# Of 23, groups of 4 are cut from two blocks of 8 and one of 7.
@pytest.mark.parametrize("channels", [6, 20, 23, 27])
@pytest.mark.parametrize("split", [[24], [3, 9, 12], [1, 1, 5, 6, 11]])
@pytest.mark.parametrize("positions", [(), (2, 3)])
def test_maps_are_those_of_the_examples(channels, split, positions, generator):
    data = torch.randn(24, channels, *positions, generator=generator, dtype=torch.float64) * 3 + 100
    pool = StatisticsPool(3, 50, [operation.group_size for operation in OPERATIONS], seed=0)
    for batch in data.split(split):
        pool.add(batch)
    assert pool.num_examples == 24
    batches = pool.draw(12, 5, generator)
    assert batches.shape == (5, 4)
    rows = data.flatten(2).mT if positions else data[:, None]
    examples = rows.unflatten(0, (8, 3))[batches].flatten(1, 3)
    for operation in OPERATIONS:
        for budget in (1, 2**30):
            chunks = list(pool.fits(operation, batches, torch.float64, budget))
            assert len(chunks) == (5 if budget == 1 else 1)
            expected = operation.fit(examples - pool.center)
            for part, block in enumerate(expected):
                linear = torch.cat([chunk[part].linear for chunk in chunks])
                # Twelve examples do not fill 27 channels: what is divided by √eps keeps fewer digits.
                torch.testing.assert_close(linear, block.linear, rtol=1e-5, atol=1e-5 * block.linear.abs().max().item())
                shift = torch.cat([chunk[part].shift for chunk in chunks])
                torch.testing.assert_close(shift, block.shift, rtol=1e-5, atol=1e-5 * block.shift.abs().max().item())


def test_examples_of_another_size_count_by_their_positions(generator):
    small, large = torch.randn(2, 3, 2, generator=generator), torch.randn(2, 3, 5, generator=generator)
    pool = StatisticsPool(4, 10, [None], seed=0)
    pool.add(small)
    pool.add(large)
    ((block,),) = pool.fits(iter_norm(5), pool.draw(4, 1, generator), torch.float64, 2**20)
    rows = torch.cat([x.mT.flatten(0, 1) for x in (small, large)])
    expected = iter_norm(5).fit(rows[None].double() - rows.double().mean(0))[0]
    torch.testing.assert_close(block.linear, expected.linear)
    torch.testing.assert_close(block.shift, expected.shift)


def test_fp32_maps_survive_a_large_mean(generator):
    data = torch.randn(64, 6, generator=generator, dtype=torch.float64) + 1000
    pool = StatisticsPool(4, 50, [None], seed=0)
    pool.add(data)
    batches = pool.draw(16, 3, generator)
    (exact,), (single,) = (
        next(pool.fits(iter_norm(5), batches, dtype, 2**20)) for dtype in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(single.linear.double(), exact.linear, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(single.shift.double(), exact.shift, rtol=1e-4, atol=1e-5)


def test_maps_do_not_change_where_the_data_are_far_from_zero(generator):
    far = torch.randn(64, 6, generator=generator, dtype=torch.float64) + 1e8
    maps = []
    for data in (far, far - 1e8):
        pool = StatisticsPool(4, 50, [None], seed=0)
        pool.add(data)
        maps += next(pool.fits(iter_norm(5), torch.arange(12).view(3, 4), torch.float64, 2**20))
    # The means of far data have 1e-8 left of a deviation.
    torch.testing.assert_close(maps[0].linear, maps[1].linear, rtol=0, atol=1e-6)
    torch.testing.assert_close(maps[0].shift, maps[1].shift, rtol=0, atol=1e-6)
    torch.testing.assert_close(pool.center, far.mean(0) - 1e8, rtol=0, atol=1e-6)


def test_a_batch_holds_different_groups_and_all_are_used(generator):
    pool = StatisticsPool(2, 6, [1], seed=0)
    pool.add(torch.randn(12, 2, generator=generator))
    batches = pool.draw(4, 9, generator)
    assert batches.shape == (9, 2)
    assert all(len(set(batch)) == 2 for batch in batches.tolist())
    # Each three in a row are one order of all six.
    assert sorted(batches[:3].flatten().tolist()) == list(range(6))


@pytest.mark.parametrize("batch_size", [3, 14])
def test_batches_that_cannot_be_made_are_refused(batch_size, generator):
    pool = StatisticsPool(2, 6, [1], seed=0)
    pool.add(torch.randn(12, 2, generator=generator))
    with pytest.raises(ValueError, match=f"no batch of {batch_size} can be made of 6 mini-groups of 2"):
        pool.draw(batch_size, 3, generator)


def test_memory_does_not_grow_and_is_what_is_said(generator):
    sizes = [1, 4, 8, 3]
    pool = StatisticsPool(2, 5, sizes, seed=0)
    kept = []
    for _ in range(2):
        for _ in range(10):
            pool.add(torch.randn(7, 480, 3, generator=generator))
        kept.append(len(pickle.dumps(pool)))
    assert pool.seen == 70
    assert pool.num_examples == 10
    # Groups of 4 and of 1 are cut from those of 8.
    assert statistics_bytes(480, sizes) == statistics_bytes(480, [8, 3])
    # A pickle has a few thousand bytes of its own.
    assert kept == pytest.approx([5 * statistics_bytes(480, sizes)] * 2, rel=0.05)


def every_example_is_equally_likely(kept, trials, expected):
    counts = torch.zeros(40)
    for trial in range(trials):
        counts[kept(trial)] += 1
    deviation = (trials * expected * (1 - expected)) ** 0.5
    assert (counts - trials * expected).abs().max() < 4.2 * deviation


def test_statistics_are_of_a_uniform_sample():
    def kept(seed):
        pool = StatisticsPool(1, 10, [1], seed)
        # Each example has a channel of its own, which shows in the mean of what is kept.
        for batch in torch.eye(40).split([7, 13, 20]):
            pool.add(batch)
        return pool.center.nonzero().flatten()

    every_example_is_equally_likely(kept, 400, 1 / 4)


def test_samples_are_uniform():
    def kept(seed):
        pool = SamplePool(10, seed)
        for batch in torch.arange(40.0)[:, None].split([7, 13, 20]):
            pool.add(batch)
        return pool.samples.flatten().long()

    every_example_is_equally_likely(kept, 400, 1 / 4)


def test_samples_are_taken_at_every_position():
    pool = SamplePool(300, 0)
    pool.add(torch.arange(6.0).view(1, 1, 2, 3).expand(300, 2, 2, 3))
    counts = pool.samples[:, 0].long().bincount(minlength=6)
    assert pool.samples.shape == (300, 2)
    assert (counts - 50).abs().max() < 4 * (300 * 5 / 36) ** 0.5
