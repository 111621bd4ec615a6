"""Running statistics in a kernel: the share of a batch, the average, and the one rule for a batch that is not finite.

A batch with a NaN or an infinity in any channel leaves all running statistics and the count of batches unchanged.
The moments of a stream have no rate: they are those of all batches so far, in fp64.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from typing import NamedTuple

import triton
import triton.language as tl

from iternorm.backends.triton.device.steps import load_block, tile_of
from iternorm.backends.triton.device.tiles import follow


class Average(NamedTuple):
    """What is averaged: the constants that a kernel is compiled for."""

    COUNT: bool  # batches are counted
    CUMULATIVE: bool  # every batch has the same share, in place of `momentum`
    COVARIANCE: bool  # the matrix is the covariance, not the whitening matrix


@triton.jit
def finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def all_finite(mean_ptr, variance_ptr, C):
    """Whether every channel's mean and variance is finite: then so is every whitening matrix."""
    bad = 0
    for start in range(0, C, 512):
        c = start + tl.arange(0, 512)
        mean = tl.load(mean_ptr + c, mask=c < C, other=0.0)
        variance = tl.load(variance_ptr + c, mask=c < C, other=0.0)
        bad += tl.sum((~(finite(mean) & finite(variance))).to(tl.int32), 0)
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
    keep = all_finite(mean_ptr, variance_ptr, C)
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


@triton.jit(do_not_specialize=["seen", "M", "num_programs", "samples_per_program"])
def join_stream(
    workspace_ptr,
    mean_ptr,
    covariance_ptr,
    joined_ptr,
    seen,
    M,
    num_programs,
    samples_per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    PB: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Covariance ``[D, D]``, mean ``[D]`` and a probe of `seen` samples and a batch of M, one program a row.

    The partials of `partial_moments` are moved to a common anchor as in `reduce_moments`. In fp64 the mean keeps all
    digits of the anchor and of the sums about it, however many deviations it is from zero. The probe is finite if the
    batch and its squares are. `FIRST` says that nothing was seen before.
    """
    follow(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BD)
    member = columns < D
    sums_ptr = workspace_ptr + num_programs * BD * BD
    pilots_ptr = sums_ptr + num_programs * BD

    line = tl.zeros([BD], dtype=tl.float64)
    total = tl.zeros([BD], dtype=tl.float64)
    probe = tl.zeros([BD], dtype=tl.float64)
    anchor = tl.load(pilots_ptr + columns).to(tl.float64)
    anchor_row = tl.load(pilots_ptr + row).to(tl.float64)
    for start in range(0, num_programs, PB):
        p = start + tl.arange(0, PB)
        present = p < num_programs
        mask = present[:, None] & member[None, :]
        place = p[:, None] * BD + columns[None, :]
        block = tl.load(workspace_ptr + (p * BD + row)[:, None] * BD + columns[None, :], mask=mask, other=0.0)
        s = tl.load(sums_ptr + place, mask=mask, other=0.0).to(tl.float64)
        delta = tl.load(pilots_ptr + place, mask=mask, other=0.0).to(tl.float64)
        delta = tl.where(mask, delta - anchor[None, :], 0.0)
        s_row = tl.load(sums_ptr + p * BD + row, mask=present, other=0.0).to(tl.float64)
        delta_row = tl.load(pilots_ptr + p * BD + row, mask=present, other=0.0).to(tl.float64)
        delta_row = tl.where(present, delta_row - anchor_row, 0.0)
        count = tl.maximum(tl.minimum(M - p * samples_per_program, samples_per_program), 0).to(tl.float64)
        moved = s_row[:, None] * delta + delta_row[:, None] * (s + count[:, None] * delta)
        line += tl.sum(block.to(tl.float64) + moved, 0)
        total += tl.sum(s + count[:, None] * delta, 0)
        if row == 0:
            squares = tl.load(workspace_ptr + place * BD + columns[None, :], mask=mask, other=0.0)
            probe += tl.sum(squares.to(tl.float64), 0)

    total = total / M
    total_row = tl.sum(tl.where(columns == row, total, 0.0), 0)
    covariance = line / M - total_row * total
    mean = anchor + total
    if not FIRST:
        share = M / (seen + M).to(tl.float64)
        old = tl.load(mean_ptr + columns, mask=member, other=0.0)
        change = mean - old
        change_row = anchor_row + total_row - tl.load(mean_ptr + row)
        before = tl.load(covariance_ptr + row * D + columns, mask=member, other=0.0)
        covariance = before + share * (covariance - before + (1.0 - share) * change_row * change)
        mean = old + share * change
    tl.store(joined_ptr + row * D + columns, covariance, mask=member)
    if row == 0:
        # The mean begins at 16 bytes.
        mean_at = joined_ptr + D * D + D % 2
        tl.store(mean_at + columns, mean, mask=member)
        tl.store(mean_at + D, tl.sum(tl.where(member, probe + total, 0.0), 0))
