"""Newton's iteration for groups above 64 channels, all of it one launch: forward and backward.

The programs share the tiles of all matrices. Between two products of the iteration they meet: each waits until all have
come so far. That takes a launch whose programs all run at once (`runtime.Launch`, `cooperative`).

The backward takes the steps of the forward again, and beside each its derivative (math.md, Eq. 11): nothing is kept.
Of float16 matrices, a program computes a tile and its derivative in one pass: both want the same rows.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.iteration.ends import (
    finish,
    finish_trace,
    prepare,
    scale,
    start,
    trace_of_group,
    weight_rows,
)
from iternorm.backends.triton.device.iteration.meeting import meet
from iternorm.backends.triton.device.iteration.rounds import operands_of, take_steps, tile_and_group
from iternorm.backends.triton.device.iteration.steps import combined, store_matrix, store_whitening
from iternorm.backends.triton.device.tiles import follow


@triton.jit
def iterate(
    covariance_ptr,
    work_ptr,
    whitening_ptr,
    counter_ptr,
    eps,
    C,
    count,
    MATRICES: tl.constexpr,
    T: tl.constexpr,
    STRIDE: tl.constexpr,
    WATCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The whitening matrices of covariances without eps. The counter is zero."""
    follow(PDL)
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    items = MATRICES.PAIRS * count
    operands_ptr = operands_of(work_ptr, MATRICES, STRIDE, 2)
    traces_ptr = work_ptr + (6 if WATCHED else 5) * STRIDE
    iterate_ptr = operands_ptr + 4 * STRIDE if T > 1 else whitening_ptr
    for item in range(first, items, programs):
        pair, group = tile_and_group(item, MATRICES.PAIRS)
        trace = trace_of_group(covariance_ptr, eps, C, group, MATRICES)
        start(
            covariance_ptr, work_ptr, operands_ptr + STRIDE, iterate_ptr, trace, eps, C, pair, group, MATRICES, STRIDE
        )  # fmt: skip
        if pair == 0:
            tl.store(traces_ptr + group, trace)
    if T > 1:
        meet(counter_ptr, programs)
        take_steps(work_ptr, operands_ptr, counter_ptr, programs, count, MATRICES, T, STRIDE, False, WATCHED)
        for item in range(first, items, programs):
            pair, group = tile_and_group(item, MATRICES.PAIRS)
            matrix = group * MATRICES.N * MATRICES.N
            r_ptr = operands_ptr + (1 + (T - 1) % 2) * STRIDE + matrix
            z_ptr = r_ptr + 2 * STRIDE
            if MATRICES.HALF:
                exact_z_ptr = work_ptr + STRIDE + matrix
            else:
                exact_z_ptr = z_ptr
            rows, columns, tile, _ = combined(
                z_ptr, r_ptr, exact_z_ptr, -0.5, 1.5, pair, 0, 0, MATRICES, True, False, WATCHED
            )  # fmt: skip
            tile *= tl.rsqrt(tl.load(traces_ptr + group))
            store_whitening(whitening_ptr, group, rows, columns, tile, MATRICES)


@triton.jit
def wide_weight_gradient(
    gradient_ptr,
    whitening_ptr,
    grad_weight_ptr,
    C,
    MATRICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """d(γ) alone, where the covariance wants no gradient: one program a row of tiles."""
    follow(PDL)
    group = tl.program_id(1).to(tl.int64)
    weight_rows(gradient_ptr, whitening_ptr, grad_weight_ptr, tl.program_id(0), C, group, MATRICES)


@triton.jit
def iterate_backward(
    gradient_ptr,
    covariance_ptr,
    whitening_ptr,
    weight_ptr,
    grad_weight_ptr,
    work_ptr,
    out_ptr,
    counter_ptr,
    eps,
    factor,
    C,
    count,
    MATRICES: tl.constexpr,
    T: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    WATCHED: tl.constexpr,
    TOGETHER: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The symmetric gradient for the covariance, times a factor, given that for W, or diag(γ) W with `AFFINE`.

    d(γ) is written too. The counter is zero. The gradient may lie in slot 0 of the work in fp32, which is written after
    it has been read, and the result in slot 1, which is read before.
    """
    follow(PDL)
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    items = MATRICES.PAIRS * count
    # With `HALF` slot 0 is left to the gradient, and R, Z, dR and dZ in fp32 follow.
    exact_ptr = work_ptr + STRIDE
    operands_ptr = operands_of(work_ptr, MATRICES, STRIDE, 5)
    # dR_0 and dZ_1, 5 slots behind R_0 and Z_1; after the slots what each tile adds to the gradient of the trace.
    d_residual_ptr = operands_ptr + 6 * STRIDE
    d_iterate_ptr = operands_ptr + 9 * STRIDE
    sums_ptr = work_ptr + (11 if WATCHED else 10) * STRIDE
    traces_ptr = sums_ptr + items
    scales_ptr = traces_ptr + count
    levels_ptr = scales_ptr + count
    if MATRICES.HALF:
        prepared_ptr = exact_ptr + 2 * STRIDE
    else:
        prepared_ptr = d_residual_ptr
    for item in range(first, items, programs):
        pair, group = tile_and_group(item, MATRICES.PAIRS)
        trace = trace_of_group(covariance_ptr, eps, C, group, MATRICES)
        if pair == 0:
            tl.store(traces_ptr + group, trace)
        prepare(
            gradient_ptr, covariance_ptr, whitening_ptr, weight_ptr, grad_weight_ptr, prepared_ptr, d_iterate_ptr,
            sums_ptr, levels_ptr, trace, eps, C, pair, group, MATRICES, AFFINE,
        )  # fmt: skip
        if T > 1:
            start(
                covariance_ptr, exact_ptr, operands_ptr + STRIDE, operands_ptr + 4 * STRIDE, trace, eps, C, pair,
                group, MATRICES, STRIDE,
            )  # fmt: skip
    arrivals = programs
    meet(counter_ptr, arrivals)
    if MATRICES.HALF:
        for item in range(first, items, programs):
            pair, group = tile_and_group(item, MATRICES.PAIRS)
            scale(
                prepared_ptr, d_residual_ptr, d_iterate_ptr, levels_ptr, scales_ptr, pair, group, MATRICES, STRIDE,
                TOGETHER, LARGEST,
            )  # fmt: skip
        arrivals += programs
        meet(counter_ptr, arrivals)
    if MATRICES.HALF:
        result_ptr = exact_ptr + 3 * STRIDE
    else:
        # The place of dZ_T: of the two, that which does not hold dZ_{T-1}.
        result_ptr = operands_ptr + (8 + T % 2) * STRIDE
    if T > 1:
        arrivals = take_steps(exact_ptr, operands_ptr, counter_ptr, arrivals, count, MATRICES, T, STRIDE, True, WATCHED)
        for item in range(first, items, programs):
            pair, group = tile_and_group(item, MATRICES.PAIRS)
            matrix = group * MATRICES.N * MATRICES.N
            r_ptr = operands_ptr + (1 + (T - 1) % 2) * STRIDE + matrix
            z_ptr = r_ptr + 2 * STRIDE
            if MATRICES.HALF:
                exact_z_ptr = exact_ptr + STRIDE + matrix
                e_shift = 2 * STRIDE
            else:
                exact_z_ptr = z_ptr
                e_shift = 5 * STRIDE
            rows, columns, _, tile = combined(
                z_ptr, r_ptr, exact_z_ptr, -0.5, 1.5, pair, 5 * STRIDE, e_shift, MATRICES, False, True, WATCHED
            )  # fmt: skip
            if MATRICES.HALF:
                tile *= 1.0 / tl.load(scales_ptr + group)
                # All of E's tile has been read.
                tl.debug_barrier()
            store_matrix(result_ptr + matrix, rows, columns, tile, MATRICES)
            trace = tl.load(traces_ptr + group)
            finish_trace(covariance_ptr, sums_ptr, tile, trace, eps, C, pair, group, MATRICES)
        arrivals += programs
        meet(counter_ptr, arrivals)
    for item in range(first, items, programs):
        pair, group = tile_and_group(item, MATRICES.PAIRS)
        trace = tl.load(traces_ptr + group)
        finish(result_ptr, sums_ptr, out_ptr, trace, factor, C, pair, group, MATRICES, TOGETHER)
