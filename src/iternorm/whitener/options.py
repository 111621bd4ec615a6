"""The parameters of a whitener, and what they may be."""

from typing import Any, NamedTuple

from iternorm import solvers
from iternorm.whitening import validation


class Options(NamedTuple):
    """The estimator's parameters, checked."""

    solver: str
    n_components: int | None
    eps: float
    shrinkage: float
    num_iters: int
    correction: int
    tol: float | None


def check(parameters: dict[str, Any]) -> Options:
    """The parameters of a `Whitener`, checked where they are used: they may have been set since it was made."""
    solver = parameters["solver"]
    if solver not in solvers.SOLVERS:
        known = ", ".join(map(repr, solvers.SOLVERS))
        raise ValueError(f"solver={solver!r} is not known; choose one of {known}")
    components = parameters["n_components"]
    if components is not None:
        components = validation.integer("n_components", components, "how many directions to keep, or None")
        if components < 1:
            raise ValueError(f"n_components={components} must be at least 1; None keeps all directions")
        if solver not in ("zca", "pca"):
            raise ValueError(f'n_components={components} needs solver="zca" or "pca"; {solver!r} keeps all')
    eps = validation.number("eps", parameters["eps"], "one from 0 on")
    shrinkage = validation.number("shrinkage", parameters["shrinkage"], "one from 0 to 1")
    tol = parameters["tol"]
    if tol is not None:
        tol = validation.number("tol", tol, "a share of the largest variance, or None")
    for name, value, limit in (("eps", eps, float("inf")), ("shrinkage", shrinkage, 1), ("tol", tol or 0.0, 1)):
        if not 0 <= value <= limit or value == float("inf"):
            raise ValueError(f"{name}={value} must be from 0 to {limit}, and finite")
    correction = validation.integer("correction", parameters["correction"], "0 or 1")
    if correction not in (0, 1):
        raise ValueError(f"correction={correction} is not known; 0 is the biased covariance, 1 the unbiased one")
    steps = validation.check_num_iters(parameters["num_iters"])
    return Options(solver, components, eps, shrinkage, steps, correction, tol)
