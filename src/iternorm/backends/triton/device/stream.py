"""A batch of a stream: the partial moments of its programs, joined to what was seen before, in fp64."""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.tiles import follow


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
