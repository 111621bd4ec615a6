"""Roots of symmetric positive definite matrices, batched and differentiable."""

from iternorm.linalg.coefficients import minimax_coefficients
from iternorm.linalg.roots import inverse_root, sqrt

__all__ = ["inverse_root", "minimax_coefficients", "sqrt"]
