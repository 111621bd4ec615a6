"""The coefficients of the iteration, recomputed without the formula that gives them."""

import math

import pytest
import torch

from iternorm.linalg import minimax_coefficients
from iternorm.linalg.coefficients import _MARGIN, minimax_step, newton_coefficients


def worst_error(p, a, b, lower, upper):
    x = torch.logspace(math.log10(lower), math.log10(upper), 20001, dtype=torch.float64)
    x = torch.cat([x, torch.linspace(lower, upper, 20001, dtype=torch.float64)])
    return (x ** (1 / p) * (a + b * x) - 1).abs().max()


def by_exchange(p, lower, upper):
    """Remez' exchange: level the error on three points, move the middle one to where the error is largest, repeat."""
    points = torch.tensor([lower, (lower * upper) ** 0.5, upper], dtype=torch.float64)
    grid = torch.linspace(lower, upper, 200001, dtype=torch.float64)
    a = b = 0.0
    for _ in range(30):
        signs = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
        system = torch.stack([points ** (1 / p), points ** (1 + 1 / p), signs], 1)
        a, b, _ = torch.linalg.solve(system, torch.ones(3, dtype=torch.float64)).tolist()
        # The function rises and falls again: its error is largest where it is itself.
        points[1] = grid[(grid ** (1 / p) * (a + b * grid)).argmax()]
    return a, b


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("lower", "upper"), [(1e-3, 1.0), (0.05, 1.2), (0.4, 1.5), (0.9, 1.1)])
def test_a_step_is_what_the_exchange_algorithm_finds(p, lower, upper):
    a, b, error = minimax_step(p, lower, upper)
    # The grid places the middle point to 5e-6.
    assert (a, b) == pytest.approx(by_exchange(p, lower, upper), rel=1e-7)
    assert error == pytest.approx(float(worst_error(p, a, b, lower, upper)), rel=1e-6)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_no_other_pair_is_better(p):
    a, b, error = minimax_step(p, 0.01, 1.0)
    for da in (-1e-3, 0, 1e-3):
        for db in (-1e-3, 0, 1e-3):
            assert worst_error(p, a + da, b + db, 0.01, 1.0) >= error - 1e-12


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("lower", [1e-2, 1e-6, 1e-15])
def test_the_steps_bring_the_whole_interval_to_one(p, lower):
    x = torch.logspace(math.log10(lower), 0, 10001, dtype=torch.float64)
    upper = 1.0
    for a, b in minimax_coefficients(p, lower, 1e-4):
        # Each pair is the best for the interval that is left, widened while it is long.
        best = minimax_step(p, lower, upper * (_MARGIN if lower < 0.1 else 1))
        assert (a, b) == best[:2]
        lower, upper = (1 - best[2]) ** p, (1 + best[2]) ** p
        x = x * (a + b * x) ** p
        assert lower * (1 - 1e-9) <= x.min()
        assert x.max() <= upper * (1 + 1e-9)
    assert (x - 1).abs().max() <= 1e-4


def test_equal_ends_give_newtons_step():
    for p in (1, 2, 4):
        assert minimax_step(p, 1.0, 1.0)[:2] == pytest.approx((1 + 1 / p, -1 / p))
        assert minimax_step(p, 1 - 1e-7, 1 + 1e-7)[:2] == pytest.approx((1 + 1 / p, -1 / p), rel=1e-6)


def test_minimax_takes_about_half_of_newtons_steps():
    for p in (1, 2, 4):
        for lower in (1e-4, 1e-6):
            assert len(minimax_coefficients(p, lower, 1e-2)) <= 0.6 * len(newton_coefficients(p, lower, 1e-2))
    assert len(minimax_coefficients(2, 1e-6, 1e-2)) == 10
