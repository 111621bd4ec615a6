"""Newton's iteration for groups too large for one program: products of whole matrices, one launch each.

The same form as in `iternorm.kernels.newton`. Matrices are ``[G, N, N]``, contiguous, fp32. A launch is a grid of
tiles; what follows a product in the iteration (a factor, a matrix to add) is done in passing, so that T steps are
3 T - 2 launches forward and 3 T - 3 backward.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from iternorm.kernels.launcher import Launch, Launches, on_device
from iternorm.kernels.moments import follow
from iternorm.kernels.shapes import INTERPRETED, large_slots_of, parts, precision

# Small tiles, that there be many: 14 launches at N = 512 took 70 us with tiles of 32x32, 173 with 64x64, on an H200.
BLOCK, WARPS, STAGES = 32, 4, 3


@triton.jit
def load_block(ptr, rows, columns, N: tl.constexpr, WHOLE: tl.constexpr):
    pointers = ptr + rows[:, None] * N + columns[None, :]
    if WHOLE:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(rows[:, None] < N) & (columns[None, :] < N), other=0.0)
    return block


@triton.jit
def load_flipped(ptr, rows, columns, N: tl.constexpr, WHOLE: tl.constexpr):
    """The block of the transposed matrix, read along its rows."""
    return tl.trans(load_block(ptr, columns, rows, N, WHOLE))


@triton.jit
def tile_of(N: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of this program's tile, and where its matrix begins."""
    across = tl.cdiv(N, BLOCK)
    rows = tl.program_id(0) // across * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    return rows, columns, tl.program_id(1).to(tl.int64) * N * N


@triton.jit
def store_block(ptr, rows, columns, block, N: tl.constexpr):
    tl.store(ptr + rows[:, None] * N + columns[None, :], block, mask=(rows[:, None] < N) & (columns[None, :] < N))


@triton.jit
def start(
    covariance_ptr,
    residual_ptr,
    iterate_ptr,
    scale_ptr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """R_0 = Σ / tr Σ, Z_1 = (3 I - R_0)/2, and tr(Σ)^-1/2."""
    follow(PDL)
    rows, columns, group = tile_of(N, BLOCK)
    diagonal = tl.arange(0, PADDED)
    trace = tl.sum(tl.load(covariance_ptr + group + diagonal * (N + 1), mask=diagonal < N, other=0.0), 0)
    residual = load_block(covariance_ptr + group, rows, columns, N, WHOLE) / trace
    store_block(residual_ptr + group, rows, columns, residual, N)
    identity = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
    store_block(iterate_ptr + group, rows, columns, 1.5 * identity - 0.5 * residual, N)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + tl.program_id(1), tl.rsqrt(trace))


@triton.jit
def combine(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    e_ptr,
    scale_ptr,
    out_ptr,
    alpha,
    gamma,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    SECOND: tl.constexpr,
    ADDED: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """alpha (A B + C D) + gamma E, times a factor of the group; the second product, E and the factor where wanted."""
    follow(PDL)
    rows, columns, group = tile_of(N, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for begin in tl.range(0, N, DEPTH, num_stages=STAGES):
        depth = begin + tl.arange(0, DEPTH)
        left = load_block(a_ptr + group, rows, depth, N, WHOLE)
        right = load_block(b_ptr + group, depth, columns, N, WHOLE)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        if SECOND:
            left = load_block(c_ptr + group, rows, depth, N, WHOLE)
            right = load_block(d_ptr + group, depth, columns, N, WHOLE)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
    acc = alpha * acc
    if ADDED:
        acc += gamma * load_block(e_ptr + group, rows, columns, N, WHOLE)
    if SCALED:
        acc *= tl.load(scale_ptr + tl.program_id(1))
    store_block(out_ptr + group, rows, columns, acc, N)


@triton.jit
def differentiate(
    shared_ptr,
    residual_ptr,
    d_residual_ptr,
    out_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """dR of the next step from S = dR R: 9/4 dR - 3/2 (S + Sᵀ) + 1/4 (S R + R (S + Sᵀ)), symmetric but for rounding."""
    follow(PDL)
    rows, columns, group = tile_of(N, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for begin in tl.range(0, N, DEPTH, num_stages=STAGES):
        depth = begin + tl.arange(0, DEPTH)
        left = load_block(shared_ptr + group, rows, depth, N, WHOLE)
        right = load_block(residual_ptr + group, depth, columns, N, WHOLE)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        left = load_block(residual_ptr + group, rows, depth, N, WHOLE)
        right = load_block(shared_ptr + group, depth, columns, N, WHOLE)
        right += load_flipped(shared_ptr + group, depth, columns, N, WHOLE)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    both = load_block(shared_ptr + group, rows, columns, N, WHOLE)
    both += load_flipped(shared_ptr + group, rows, columns, N, WHOLE)
    acc = 0.25 * acc - 1.5 * both + 2.25 * load_block(d_residual_ptr + group, rows, columns, N, WHOLE)
    store_block(out_ptr + group, rows, columns, acc, N)


def solve(covariance: Tensor, num_iters: int, saved: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The whitening matrices of covariances ``[G, N, N]`` with eps, for two steps or more, and what the backward needs.

    The result is part of `saved` ``[2 T + 1, G, N, N]``, which is made unless it is given.
    """
    count, size, _ = covariance.shape
    products = _products(count, size, covariance.device, precision(parts(torch.float32)))
    covariance = covariance.contiguous()
    if saved is None:
        saved = covariance.new_empty(large_slots_of(num_iters), count, size, size)
    scale = covariance.new_empty(count)
    at = products.places(saved)
    residuals, iterates, between = at[:num_iters], at[num_iters : 2 * num_iters], at[-1]
    source, factor = products.place(covariance), products.place(scale)
    calls = [("start", (source, residuals[0], iterates[0], factor))]
    for k in range(1, num_iters):
        before, residual = residuals[k - 1], residuals[k]
        calls.append(products.combine(before, before, 0.25, before, -1.5, between))
        calls.append(products.combine(before, between, 1.0, before, 2.25, residual))
        last = factor if k == num_iters - 1 else None
        calls.append(products.combine(iterates[k - 1], residual, -0.5, iterates[k - 1], 1.5, iterates[k], scale=last))
    products.run(calls)
    return saved[2 * num_iters - 1], saved


def solve_backward(grad: Tensor, covariance: Tensor, whitening: Tensor, saved: Tensor, num_iters: int) -> Tensor:
    """The symmetric gradient for the covariance, given the gradient for the whitening matrix (math.md, Eq. 10-12)."""
    count, size, _ = covariance.shape
    products = _products(count, size, covariance.device, precision(parts(torch.float32)))
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    # dR and dZ in turns, and S.
    work = covariance.new_empty(5, count, size, size)
    torch.add(grad, grad.mT, out=work[0]).mul_(0.5 * trace.rsqrt())
    torch.mul(work[0], -0.5, out=work[1])
    at, places = products.places(saved), products.places(work)
    d_residual, d_iterate, other_residual, other_iterate, shared = places
    calls = []
    for k in range(1, num_iters):
        before, residual, iterate = at[k - 1], at[k], at[num_iters + k - 1]
        calls.append(products.combine(d_residual, before, 1.0, None, 0.0, shared))
        calls.append(("differentiate", (shared, before, d_residual, other_residual)))
        d_residual, other_residual = other_residual, d_residual
        calls.append(products.combine(d_iterate, residual, -0.5, d_iterate, 1.5, other_iterate, (iterate, d_residual)))
        d_iterate, other_iterate = other_iterate, d_iterate
    products.run(calls)
    result = work[1 if num_iters % 2 else 3]
    through_trace = (result * saved[0] + 0.5 * grad * whitening).sum((-2, -1))
    result.diagonal(dim1=-2, dim2=-1).sub_(through_trace[:, None])
    return result / trace


@functools.cache
def _products(count: int, size: int, device: torch.device, precision: str) -> "_Products":
    return _Products(count, size, device, precision)


class _Products:
    """The launches for matrices of one size and precision."""

    def __init__(self, count: int, size: int, device: torch.device, precision: str):
        tiles = -(-size // BLOCK)
        self.device = device
        self.quick = device.type == "cuda" and not INTERPRETED
        self._grid = (tiles * tiles, count)
        depth = 64 if size % 64 == 0 else 32
        self._start = {"N": size, "PADDED": triton.next_power_of_2(size), "BLOCK": BLOCK, "WHOLE": size % BLOCK == 0}
        self._words: dict[str, Any] = {"N": size, "BLOCK": BLOCK, "DEPTH": depth, "STAGES": STAGES}
        self._words |= {"WHOLE": size % depth == 0, "PRECISION": precision}
        self._launches = Launches(self._make, device)

    def place(self, tensor: Tensor) -> Any:
        return tensor.data_ptr() if self.quick else tensor

    def places(self, tensor: Tensor) -> list[Any]:
        """The matrices along the first axis."""
        if not self.quick:
            return list(tensor)
        base, step = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
        return [base + k * step for k in range(tensor.shape[0])]

    def combine(self, a, b, alpha, e, gamma, out, second=None, scale=None) -> tuple[str, tuple]:
        """The call for alpha (a b + second) + gamma e, scaled."""
        absent = 0 if self.quick else None
        name = f"combine{second is not None:d}{e is not None:d}{scale is not None:d}"
        c, d = second or (absent, absent)
        return name, (a, b, c, d, absent if e is None else e, absent if scale is None else scale, out, alpha, gamma)

    def run(self, calls: list[tuple[str, tuple]]) -> None:
        names, arguments = tuple(name for name, _ in calls), tuple(values for _, values in calls)
        with on_device(self.device):
            stream = torch._C._cuda_getCurrentRawStream(self.device.index) if self.quick else None
            self._launches.run(stream, names, arguments)

    def _make(self, name: str) -> Launch:
        fp32 = torch.float32
        if name == "start":
            return Launch(start, self._grid, (fp32,) * 4, (), (), (), self._start, WARPS, self.device)
        if name == "differentiate":
            return Launch(differentiate, self._grid, (fp32,) * 4, (), (), (), self._words, WARPS, self.device)
        second, added, scaled = (digit == "1" for digit in name.removeprefix("combine"))
        wanted = (True, True, second, second, added, scaled, True)
        pointers = tuple(fp32 if want else None for want in wanted)
        words = {**self._words, "SECOND": second, "ADDED": added, "SCALED": scaled}
        return Launch(combine, self._grid, pointers, (0.5, 0.5), (), (), words, WARPS, self.device)
