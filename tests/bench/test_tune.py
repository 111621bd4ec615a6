"""`benchmarks/tune_kernels.py` and `tune_iteration.py`: what is timed has the tiles that were asked for."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("in Triton's interpreter", allow_module_level=True)

from iternorm.backends.triton import items, plan, tiling

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
tune = runpy.run_path(str(BENCHMARKS / "tune_kernels.py"))


@pytest.fixture(autouse=True)
def _as_before(precision):
    yield
    plan.tiles_for = tiling.tiles_for
    items.ItemPlan.tiles_of = tune["_OWN_TILES"]
    tune["forget"]()


@pytest.mark.parametrize(
    ("name", "shape", "rows"),
    [
        ("layer", (4, 16, 4, 4), False),
        ("relu", (4, 16, 4, 4), True),
        pytest.param("wide", (2, 130, 8, 8), False, marks=pytest.mark.rare),
        ("samples", (2, 32, 8, 8), True),
        ("stream", (200, 16), True),
    ],
)
def test_a_pass_runs_with_other_tiles_and_gives_the_same(name, shape, rows, precision):
    subject = tune["SUBJECTS"][name]
    tune["use"]()
    calls = tune["passes"](subject, shape, "fp32", rows, "cpu")
    for kernel, part in subject.kernels.items():
        tune["use"]()
        expected = calls[part]()
        own = tune["tiles_of"](kernel)
        other = own._replace(samples=32 if own.samples != 32 else 16, per_sm=3)
        tune["use"](kernel, other)
        found = calls[part]()
        assert tune["tiles_of"](kernel) == other
        first, second = (value if torch.is_tensor(value) else value[0] for value in (found, expected))
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_choices_are_unlike_and_vary_what_their_kernel_knows():
    wide = tune["SUBJECTS"]["wide"]
    for kernel, rows, blocks, depths, orders in [
        ("moments", True, {64, 128}, {64}, {False}),
        ("apply", True, {64, 128}, {32, 64}, {False}),
        ("apply", False, {64, 128}, {32, 64}, {False, True}),
    ]:
        found = wide.choices(kernel, (2, 256, 8, 8), rows)
        assert len(set(found)) == len(found)
        assert {tiles.block for tiles in found} == blocks
        assert {tiles.depth for tiles in found} == depths
        assert {tiles.as_rows for tiles in found} == orders
    # Blocks of 128 channels do not divide 192.
    assert {tiles.block for tiles in wide.choices("apply", (2, 160, 8, 8), False)} == {64}


def test_the_iteration_runs_in_other_blocks_and_gives_the_same(monkeypatch, precision):
    monkeypatch.syspath_prepend(BENCHMARKS)
    iteration = runpy.run_path(str(BENCHMARKS / "tune_iteration.py"))
    monkeypatch.setattr(iteration["tiling"], "blocks_for", tiling.blocks_for)
    covariance = iteration["covariance_of"](20, "highest", "cpu")
    results = []
    for blocks in (None, *iteration["CHOICES"][::13]):
        iteration["use"](blocks)
        results.append([call() for call in iteration["both_ways"](covariance)])
    iteration["use"]()
    (forward, backward), *others = results
    assert len(others) == 2
    for other_forward, other_backward in others:
        torch.testing.assert_close(other_forward[0], forward[0])
        torch.testing.assert_close(other_backward, backward)
