"""The linear factors of the coupled iteration: Newton's, and those that are best for an interval.

A step multiplies the root by h(M) = a I + b M and M by h(M)^p (docs/math.md, section 8). Newton's a and b are the same
in every step. The minimax ones depend on where the eigenvalues of M may still lie.
"""

from functools import lru_cache

# The interval is taken this much wider than it is while eigenvalues are spread. A step sends its upper end to its lower
# one, and what is sent down there keeps few digits: so nothing may lie at the very end. Of 1.02 to 1.2, tried for
# p = 1, 2 and 4 in fp32 and fp64, this had the smallest errors, and it costs a step or two.
_MARGIN = 1.2
_SPREAD = 0.1


def minimax_step(p: int, lower: float, upper: float) -> tuple[float, float, float]:
    """The a and b for which x^(1/p) (a + b x) is nearest to 1 on [lower, upper], and how far from 1 it gets.

    The error of the best such function has equal size and alternating sign at three points (Chebyshev): at both ends,
    and where the derivative vanishes. Equal values at the ends give b / a, the third point follows, and a makes the
    error there the opposite of that at the ends.
    """
    root = 1 / p
    if upper - lower < 1e-6 * upper:
        # Both ends are one point, where the quotient below has this limit.
        ratio = 1 / ((p + 1) * (lower + upper) / 2)
    else:
        ratio = (upper**root - lower**root) / (upper ** (1 + root) - lower ** (1 + root))
    between = 1 / ((p + 1) * ratio)
    at_end, at_peak = (x**root * (1 - ratio * x) for x in (lower, between))
    a = 2 / (at_end + at_peak)
    return a, -a * ratio, a * at_peak - 1


@lru_cache
def minimax_coefficients(p: int, lower: float, tolerance: float) -> tuple[tuple[float, float], ...]:
    """A pair (a, b) for each step, each the best for the interval that the steps before have left.

    Args:
        p: of the root A^(-1/p).
        lower: a lower bound of the eigenvalues, whose upper bound is 1.
        tolerance: the steps end where all eigenvalues of M lie within this distance of 1.

    Example:
        >>> [(round(a, 3), round(b, 3)) for a, b in minimax_coefficients(2, 0.01, 1e-3)]
        [(3.694, -2.8), (1.883, -0.554), (1.602, -0.514), (1.507, -0.501), (1.5, -0.5)]
    """
    steps, upper = [], 1.0
    while max(1 - lower, upper - 1) > tolerance:
        a, b, error = minimax_step(p, lower, upper * (_MARGIN if lower < _SPREAD else 1))
        steps.append((a, b))
        lower, upper = (1 - error) ** p, (1 + error) ** p
    return tuple(steps)


@lru_cache
def newton_coefficients(p: int, lower: float, tolerance: float) -> tuple[tuple[float, float], ...]:
    """Newton's a = 1 + 1/p and b = -1/p, as many times as `lower` needs to come within `tolerance` of 1."""
    a, b = 1 + 1 / p, -1 / p
    steps = 0
    while 1 - lower > tolerance:
        lower *= (a + b * lower) ** p
        steps += 1
    return ((a, b),) * steps
