"""Running statistics in a kernel: the share of a batch, the average, and the one rule for a batch that is not finite.

A batch with a NaN or an infinity in any channel, or in the matrix that is averaged, leaves all running statistics and
the count of batches unchanged.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
from typing import NamedTuple

import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import load_block, tile_of
from iternorm.backends.triton.device.tiles import follow


class Average(NamedTuple):
    """What is averaged: the constants that a kernel is compiled for."""

    COUNT: bool  # batches are counted
    CUMULATIVE: bool  # every batch has the same share, in place of `momentum`
    COVARIANCE: bool  # the matrix is the covariance, not the whitening matrix
    SIZE: int  # the channels of a group
    WIDTH: int  # the next power of two


@triton.jit
def finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def all_finite(mean_ptr, variance_ptr, eps, C, AVERAGE: tl.constexpr):
    """Whether every channel's mean and variance is finite, and the matrix that is averaged of each group.

    A covariance then is. A whitening matrix is unless the trace is zero, as that of constant channels is with eps=0.
    """
    COUNT: tl.constexpr = 512 // AVERAGE.WIDTH if AVERAGE.WIDTH < 512 else 1
    group = tl.arange(0, COUNT)
    i = tl.arange(0, AVERAGE.WIDTH)[None, :]
    bad = 0
    for start in range(0, C, COUNT * AVERAGE.SIZE):
        first = start + group * AVERAGE.SIZE
        c = first[:, None] + i
        member = (i < AVERAGE.SIZE) & (c < C)
        mean = tl.load(mean_ptr + c, mask=member, other=0.0)
        variance = tl.load(variance_ptr + c, mask=member, other=0.0)
        bad += tl.sum(tl.sum((~(finite(mean) & finite(variance))).to(tl.int32), 1), 0)
        if not AVERAGE.COVARIANCE:
            trace = tl.sum(tl.where(member, variance + eps, 0.0), 1)
            bad += tl.sum(((first < C) & ~((trace > 0.0) & finite(trace))).to(tl.int32), 0)
    return bad == 0


@triton.jit
def share_of_batch(momentum, batches_ptr, AVERAGE: tl.constexpr):
    """The weight of this batch; `batches_ptr` has the number of those before it."""
    if AVERAGE.CUMULATIVE:
        momentum = 1.0 / (tl.load(batches_ptr) + 1).to(tl.float32)
    return momentum


@triton.jit
def blended(old, value, share, keep):
    """The running average with a batch, or as it was unless `keep`, what `all_finite` says."""
    return tl.where(keep, old + share * (value - old), old)


@triton.jit
def blend_mean(running_mean_ptr, channels, member, mean, share, keep):
    old = tl.load(running_mean_ptr + channels, mask=member, other=0.0).to(tl.float32)
    tl.store(running_mean_ptr + channels, blended(old, mean, share, keep), mask=member)


@triton.jit
def copy_count(num_batches_ptr, batches_ptr):
    """The counter, for the programs that read it while one counts this batch; what lies behind the copy is cleared."""
    pair = tl.arange(0, 2)
    tl.store(batches_ptr + pair, tl.where(pair == 0, tl.load(num_batches_ptr), 0))


@triton.jit
def count_batch(num_batches_ptr, batches_ptr, keep):
    """`batches_ptr` has a copy of the counter: other programs read that."""
    tl.store(num_batches_ptr, tl.load(batches_ptr) + keep.to(tl.int64))


@triton.jit
def blend(
    value_ptr,
    mean_ptr,
    variance_ptr,
    running_mean_ptr,
    running_matrix_ptr,
    num_batches_ptr,
    batches_ptr,
    eps,
    momentum,
    C,
    N: tl.constexpr,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    AVERAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The running statistics, by tiles of the matrix; `value` is the batch's whitening or covariance, of N rows."""
    size = tl.minimum(D, C - tl.program_id(1) * D)
    rows, columns, group = tile_of(D, SIDE)
    inside = (rows[:, None] < D) & (columns[None, :] < D)
    matrix_ptrs = running_matrix_ptr + group * D * D + rows[:, None] * D + columns[None, :]
    # Older than the launch before: another batch's, and the moments, from which the whitening matrix was computed.
    old = tl.load(matrix_ptrs, mask=inside, other=0.0).to(tl.float32)
    share = share_of_batch(momentum, batches_ptr, AVERAGE)
    keep = all_finite(mean_ptr, variance_ptr, eps, C, AVERAGE)
    follow(PDL)

    value = load_block(value_ptr + group * N * N, rows, columns, N, False)
    tl.store(matrix_ptrs, blended(old, value, share, keep), mask=inside)
    if tl.program_id(0) < tl.cdiv(D, SIDE):
        # As many programs as the matrix has tiles in a row share the channels.
        member = columns < size
        channels = group * D + columns
        mean = tl.load(mean_ptr + channels, mask=member, other=0.0)
        blend_mean(running_mean_ptr, channels, member, mean, share, keep)
    if AVERAGE.COUNT:
        if (tl.program_id(0) == 0) & (group == 0):
            count_batch(num_batches_ptr, batches_ptr, keep)
