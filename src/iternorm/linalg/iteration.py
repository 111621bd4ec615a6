"""The coupled iteration X <- X h(M), M <- M h(M)^p for A^(-1/p), and its derivative: matrix products only.

Everything here is a batch ``[B, d, d]`` of symmetric matrices whose eigenvalues are at most 1. Where there are kernels
(`iternorm.backends.triton.tools.roots`) they take the place of `iterate`.
"""

import torch
from torch import Tensor

Steps = tuple[tuple[float, float], ...]


def iterate(matrix: Tensor, steps: Steps, p: int, damping: float) -> Tensor:
    """`matrix`^(-1/p).

    `damping` keeps eigenvalues that rounding has made negative from growing. To first order, it is taken back at the
    end (Eq. 31).
    """
    current, root = _shifted(matrix, damping), None
    for k, (a, b) in enumerate(steps):
        factor = _shifted(b * current, a)
        root = factor if root is None else torch.bmm(root, factor)
        if k < len(steps) - 1:
            current = _symmetric(torch.bmm(current, _power(factor, p)))
    assert root is not None
    root = _symmetric(root)
    return _symmetric(torch.baddbmm(root, root, _power(root, p), alpha=damping / p))


def derivative(matrix: Tensor, direction: Tensor, steps: Steps, p: int, damping: float) -> Tensor:
    """The derivative of `iterate` at `matrix` in a symmetric `direction`.

    A function of a symmetric matrix has a self-adjoint derivative, so this is the backward too (docs/math.md,
    section 8).
    """
    current, tangent = _shifted(matrix, damping), direction
    root = d_root = None
    for k, (a, b) in enumerate(steps):
        factor, d_factor = _shifted(b * current, a), b * tangent
        if root is None or d_root is None:
            root, d_root = factor, d_factor
        else:
            d_root = torch.baddbmm(torch.bmm(d_root, factor), root, d_factor)
            root = torch.bmm(root, factor)
        if k < len(steps) - 1:
            power, d_power = _power_derivative(factor, d_factor, p)
            tangent = _symmetric(torch.baddbmm(torch.bmm(tangent, power), current, d_power))
            current = _symmetric(torch.bmm(current, power))
    assert root is not None
    assert d_root is not None
    root, d_root = _symmetric(root), _symmetric(d_root)
    power, d_power = _power_derivative(root, d_root, p)
    product = torch.baddbmm(torch.bmm(d_root, power), root, d_power)
    return _symmetric(torch.add(d_root, product, alpha=damping / p))


def _power(matrix: Tensor, p: int) -> Tensor:
    if p == 1:
        return matrix
    half = _power(matrix, p // 2)
    square = torch.bmm(half, half)
    return square if p % 2 == 0 else torch.bmm(square, matrix)


def _power_derivative(matrix: Tensor, tangent: Tensor, p: int) -> tuple[Tensor, Tensor]:
    if p == 1:
        return matrix, tangent
    half, d_half = _power_derivative(matrix, tangent, p // 2)
    product = torch.bmm(half, d_half)
    square, d_square = torch.bmm(half, half), product + product.mT
    if p % 2 == 0:
        return square, d_square
    return torch.bmm(square, matrix), torch.baddbmm(torch.bmm(d_square, matrix), square, tangent)


def _shifted(matrix: Tensor, value: float) -> Tensor:
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.add(matrix, identity, alpha=value)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
