"""What ranks of a process group send each other, and what they make of what they get.

Forward a rank sends its count of samples, its mean ``[C]`` and its covariance ``[G, D, D]``, one after the other in
fp32, and gets those of all ranks. Backward it sends Σ dy ``[C]`` and Σ dy (x - mean)ᵀ ``[G, D, D]``, and gets their
sums over the ranks. That is what `iternorm.whitening.processes.collective` sends too: ranks may use different backends.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.blocks import for_each
from iternorm.backends.triton.device.tiles import follow


@triton.jit
def sent_places(ptr, C, COUNTED: tl.constexpr):
    """Where the vector and the matrices are in what is sent; a count may come first."""
    vector = ptr
    if COUNTED:
        vector += 1
    return vector, vector + C


@triton.jit(do_not_specialize=["ranks"])
def merge(
    gathered_ptr,
    covariance_ptr,
    mean_ptr,
    variance_ptr,
    num_batches_ptr,
    batches_ptr,
    C,
    ranks,
    D: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
    PB: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Mean, covariance and variance of all ranks' samples, and their number; one program a row, `PB` ranks at a time.

    The arithmetic of `collective.merge_moments`: means are summed as differences from the largest rank's, and the
    covariance takes the outer products of what is left of them. With `COUNT` the number of batches is copied, as in
    `reduce_moments`.
    """
    follow(PDL)
    row = tl.program_id(0)
    group = tl.program_id(1)
    size = tl.minimum(D, C - group * D)
    length = (1 + C + tl.num_programs(1) * D * D).to(tl.int64)

    total = 0.0
    largest = -1.0
    pilot = 0
    for start in range(0, ranks, PB):
        r = start + tl.arange(0, PB)
        counts = tl.load(gathered_ptr + r * length, mask=r < ranks, other=0.0)
        total += tl.sum(counts, 0)
        most = tl.max(counts, 0)
        # The first of the largest, so that all ranks choose the same.
        pilot = tl.where(most > largest, tl.min(tl.where(counts == most, r, ranks), 0), pilot)
        largest = tl.maximum(largest, most)
    # All ranks may be empty.
    scale = 1.0 / tl.maximum(total, 1.0)
    means_ptr, matrices_ptr = sent_places(gathered_ptr, C, True)
    means_ptr += group * D
    matrices_ptr += (group * D + row) * D
    pilot_row = tl.load(means_ptr + pilot * length + row, mask=row < size, other=0.0)
    left = 0.0
    for start in range(0, ranks, PB):
        r = start + tl.arange(0, PB)
        share = scale * tl.load(gathered_ptr + r * length, mask=r < ranks, other=0.0)
        means = tl.load(means_ptr + r * length + row, mask=(r < ranks) & (for_each(row, r) < size), other=0.0)
        left += tl.sum(share * (means - pilot_row), 0)
    mean_row = pilot_row + left

    for begin in range(0, BD, BC):
        columns = begin + tl.arange(0, BC)
        member = columns < size
        inside = (columns < D) & (for_each(row, columns) < D)
        pilots = tl.load(means_ptr + pilot * length + columns, mask=member, other=0.0)
        mean = tl.zeros([BC], dtype=tl.float32)
        for start in range(0, ranks, PB):
            r = start + tl.arange(0, PB)
            share = scale * tl.load(gathered_ptr + r * length, mask=r < ranks, other=0.0)
            there = (r < ranks)[:, None] & member[None, :]
            means = tl.load(means_ptr + (r * length)[:, None] + columns[None, :], mask=there, other=0.0)
            mean += tl.sum(share[:, None] * (means - pilots[None, :]), 0)
        mean += pilots
        line = tl.zeros([BC], dtype=tl.float32)
        for start in range(0, ranks, PB):
            r = start + tl.arange(0, PB)
            share = scale * tl.load(gathered_ptr + r * length, mask=r < ranks, other=0.0)
            there = (r < ranks)[:, None] & member[None, :]
            means = tl.load(means_ptr + (r * length)[:, None] + columns[None, :], mask=there, other=0.0)
            own = tl.load(means_ptr + r * length + row, mask=(r < ranks) & (for_each(row, r) < size), other=0.0)
            there = (r < ranks)[:, None] & inside[None, :]
            block = tl.load(matrices_ptr + (r * length)[:, None] + columns[None, :], mask=there, other=0.0)
            block += (own - mean_row)[:, None] * (means - mean[None, :])
            line += tl.sum(share[:, None] * block, 0)
        tl.store(covariance_ptr + (group * BD + row) * BD + columns, line, mask=columns < BD)
        tl.store(variance_ptr + group * D + columns, line, mask=member & (columns == row))
        if row == 0:
            tl.store(mean_ptr + group * D + columns, mean, mask=member)
    if (row == 0) & (group == 0):
        pair = tl.arange(0, 2)
        batches = tl.zeros([2], dtype=tl.int64)
        if COUNT:
            batches += tl.load(num_batches_ptr)
        tl.store(batches_ptr + pair, tl.where(pair == 0, batches, total.to(tl.int64)))


@triton.jit(do_not_specialize=["M"])
def unpack(
    sent_ptr,
    batches_ptr,
    matrix_ptr,
    vector_ptr,
    M,
    C,
    D: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Σ dy (x - mean)ᵀ and Σ dy of all ranks as the kernels after it read them, one program a row.

    Those divide by the samples of this rank, so that sums over all ranks are scaled by the share that it has of them.
    """
    follow(PDL)
    row = tl.program_id(0)
    group = tl.program_id(1)
    share = M.to(tl.float32) / tl.maximum(tl.load(batches_ptr + 1), 1).to(tl.float32)
    sums_ptr, matrices_ptr = sent_places(sent_ptr, C, False)
    for begin in range(0, BD, BC):
        columns = begin + tl.arange(0, BC)
        inside = (columns < D) & (for_each(row, columns) < D)
        line = tl.load(matrices_ptr + (group * D + row) * D + columns, mask=inside, other=0.0)
        tl.store(matrix_ptr + (group * BD + row) * BD + columns, share * line, mask=columns < BD)
        if row == 0:
            member = columns < tl.minimum(D, C - group * D)
            sums = tl.load(sums_ptr + group * D + columns, mask=member, other=0.0)
            tl.store(vector_ptr + group * D + columns, share * sums, mask=member)


@triton.jit
def sent_weight_gradient(
    sent_ptr,
    whitening_ptr,
    grad_weight_ptr,
    C,
    D: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    """d(γ) of this rank, one program a channel, where the reduction has no whole row of the matrix."""
    follow(PDL)
    row = tl.program_id(0)
    group = tl.program_id(1)
    _, matrices_ptr = sent_places(sent_ptr, C, False)
    place = (group * D + row) * D
    gradient = 0.0
    for begin in range(0, D, BC):
        columns = begin + tl.arange(0, BC)
        line = tl.load(matrices_ptr + place + columns, mask=columns < D, other=0.0)
        gradient += tl.sum(line * tl.load(whitening_ptr + place + columns, mask=columns < D, other=0.0), 0)
    tl.store(grad_weight_ptr + group * D + row, gradient, mask=row < C - group * D)
