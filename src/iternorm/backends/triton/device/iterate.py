"""Newton's iteration for groups above 64 channels, all of it one launch: forward and backward.

The programs share the tiles of all matrices. Between two products of the iteration they meet: each waits until all have
come so far. That takes a launch whose programs all run at once (`runtime.Launch`, `cooperative`).

The backward takes the steps of the forward again, and beside each its derivative (math.md, Eq. 11): nothing is kept.
Of float16 matrices, a program computes a tile and its derivative in one pass: both want the same rows.

In the work memory there are first, with `HALF`, R and Z in fp32, and backward dR and dZ; then the matrices that
products take: S in slot 0, R_k in slot 1 + k % 2, Z_k in slot 3 + k % 2, and backward their derivatives 5 slots behind
them. With `WATCHED` the next R is in the slot after all of these until it is settled.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.ends import (
    finish,
    finish_trace,
    prepare,
    scale,
    start,
    trace_of_group,
    weight_rows,
)
from iternorm.backends.triton.device.steps import (
    combined,
    load_matrix,
    pair_at,
    settle,
    stacked_products,
    store_matrix,
    store_symmetric,
    store_whitening,
    symmetrized,
)
from iternorm.backends.triton.device.tiles import follow
from iternorm.backends.triton.runtime import INTERPRETED

# One program has nobody to wait for.
ALONE = tl.constexpr(INTERPRETED)


@triton.jit
def tile_and_group(item, PAIRS: tl.constexpr):
    """Which tile on or below the diagonal of which group's matrix an item of work is."""
    return item % PAIRS, tl.cast(item // PAIRS, tl.int64)


@triton.jit
def arrived(counter_ptr):
    """How often programs have arrived, for the first thread; the others, who will wait for it, see enough."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred %first;
        .reg .b32 %thread;
        mov.u32 %thread, %tid.x;
        setp.eq.u32 %first, %thread, 0;
        mov.b32 $0, 0x7fffffff;
        @%first ld.acquire.gpu.global.b32 $0, [$1];
        }""",
        "=r,l", [counter_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def meet(counter_ptr, arrivals):
    """Wait until programs have arrived so often in all. What they wrote before can be read after it."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")
    if not ALONE:
        while arrived(counter_ptr) < arrivals:
            pass
    tl.debug_barrier()


@triton.jit
def operands_of(work_ptr, MATRICES: tl.constexpr, STRIDE: tl.constexpr, EXACT: tl.constexpr):
    """Where the matrices that products take begin: with `HALF` behind so many in fp32."""
    operands_ptr = work_ptr
    if MATRICES.HALF:
        operands_ptr = (work_ptr + EXACT * STRIDE).to(tl.pointer_type(tl.float16))
    return operands_ptr


@triton.jit
def store_results(
    out_ptr, d_out_ptr, e_ptr, e_shift, rows, columns, tile, d_tile,
    MATRICES: tl.constexpr, VALUE: tl.constexpr, DERIVED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Store a tile and its derivative; with `HALF` what later steps add (`KEPT`) takes the place of E in fp32."""
    if MATRICES.HALF and KEPT:
        # All of E's tile has been read.
        tl.debug_barrier()
        store_matrix(e_ptr, rows, columns, tile, MATRICES)
        if DERIVED:
            store_matrix(e_ptr + e_shift, rows, columns, d_tile, MATRICES)
    if VALUE:
        store_symmetric(out_ptr, rows, columns, tile, MATRICES)
    if DERIVED:
        store_symmetric(d_out_ptr, rows, columns, d_tile, MATRICES)


@triton.jit
def share_of_step(
    a_ptr, b_ptr, e_ptr, out_ptr, d_out_ptr, alpha, gamma, item, begin, items, shift, e_shift,
    MATRICES: tl.constexpr, VALUE: tl.constexpr, DERIVED: tl.constexpr, WATCHED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """This program's share of alpha A B + gamma E, or of its derivative, or of both: see `combined`.

    Items of work that are done between two meetings are counted through. Of these, so many `items` from `begin` are
    done here. This program's first is `item` or later ones, and where it goes on is returned.
    """
    programs = tl.num_programs(0)
    end = begin + items
    for i in range(item, end, programs):
        pair, group = tile_and_group(i - begin, MATRICES.PAIRS)
        at = group * MATRICES.N * MATRICES.N
        rows, columns, tile, d_tile = combined(
            a_ptr + at, b_ptr + at, e_ptr + at, alpha, gamma, pair, shift, e_shift, MATRICES, VALUE, DERIVED, WATCHED
        )  # fmt: skip
        store_results(
            out_ptr + at, d_out_ptr + at, e_ptr + at, e_shift, rows, columns, tile, d_tile,
            MATRICES, VALUE, DERIVED, KEPT,
        )  # fmt: skip
    return item + tl.cdiv(tl.maximum(end - item, 0), programs) * programs


@triton.jit
def step(
    a_ptr, b_ptr, e_ptr, out_ptr, d_out_ptr, alpha, gamma, item, begin, items, shift, e_shift,
    MATRICES: tl.constexpr, DERIVED: tl.constexpr, WATCHED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """This program's share of alpha A B + gamma E and of its derivative, and where it goes on: see `share_of_step`.

    In fp32 the derivatives, which take twice as long, come first, and are items of their own.
    """
    if DERIVED and not MATRICES.HALF:
        item = share_of_step(
            a_ptr, b_ptr, e_ptr, out_ptr, d_out_ptr, alpha, gamma, item, begin, items, shift, e_shift,
            MATRICES, False, True, WATCHED, KEPT,
        )  # fmt: skip
        item = share_of_step(
            a_ptr, b_ptr, e_ptr, out_ptr, d_out_ptr, alpha, gamma, item, begin + items, items, shift, e_shift,
            MATRICES, True, False, WATCHED, KEPT,
        )  # fmt: skip
    else:
        item = share_of_step(
            a_ptr, b_ptr, e_ptr, out_ptr, d_out_ptr, alpha, gamma, item, begin, items, shift, e_shift,
            MATRICES, True, DERIVED, WATCHED, KEPT,
        )  # fmt: skip
    return item


@triton.jit
def joined_step(
    r_ptr, exact_ptr, square_ptr, next_z_ptr, items, shift,
    MATRICES: tl.constexpr, STRIDE: tl.constexpr, DERIVED: tl.constexpr,
):  # fmt: skip
    """This program's share of S = 1/4 R² - 3/2 R and of Z <- 3/2 Z - 1/2 Z R, and of their derivatives, with `HALF`.

    Where there are enough tiles for all multiprocessors: less is read than by a step for each.
    """
    e_shift: tl.constexpr = 2 * STRIDE
    for i in range(tl.program_id(0), items, tl.num_programs(0)):
        pair, group = tile_and_group(i, MATRICES.PAIRS)
        at = group * MATRICES.N * MATRICES.N
        rows, columns, row, column = pair_at(pair, MATRICES)
        r = load_matrix(exact_ptr + at, rows, columns, MATRICES)
        z = load_matrix(exact_ptr + STRIDE + at, rows, columns, MATRICES)
        d_r = r
        d_z = z
        if DERIVED:
            d_r = load_matrix(exact_ptr + e_shift + at, rows, columns, MATRICES)
            d_z = load_matrix(exact_ptr + STRIDE + e_shift + at, rows, columns, MATRICES)
        rr, d_rr, zr, d_zr = stacked_products(
            r_ptr + at, r_ptr + at, row, column, shift, 2 * STRIDE, MATRICES, DERIVED, True
        )  # fmt: skip
        square = symmetrized(0.25 * rr - 1.5 * r, row, column)
        following = symmetrized(1.5 * z - 0.5 * zr, row, column)
        d_square = square
        d_following = following
        if DERIVED:
            d_square = symmetrized(0.25 * d_rr - 1.5 * d_r, row, column)
            d_following = symmetrized(1.5 * d_z - 0.5 * d_zr, row, column)
        store_results(
            square_ptr + at, square_ptr + shift + at, exact_ptr + at, e_shift, rows, columns, square, d_square,
            MATRICES, True, DERIVED, False,
        )  # fmt: skip
        store_results(
            next_z_ptr + at, next_z_ptr + shift + at, exact_ptr + STRIDE + at, e_shift, rows, columns, following,
            d_following, MATRICES, True, DERIVED, True,
        )  # fmt: skip


@triton.jit
def take_steps(
    exact_ptr, operands_ptr, counter_ptr, arrivals, count,
    MATRICES: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr, DERIVED: tl.constexpr, WATCHED: tl.constexpr,
):  # fmt: skip
    """From R_0 and Z_1 to R_{T-1} and Z_{T-1}, and the arrivals at meetings so far."""
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    items = MATRICES.PAIRS * count
    shift = 5 * STRIDE
    square_ptr = operands_ptr
    for k in range(1, T):
        r_ptr = operands_ptr + (1 + (k - 1) % 2) * STRIDE
        next_r_ptr = operands_ptr + (1 + k % 2) * STRIDE
        z_ptr = r_ptr + 2 * STRIDE
        next_z_ptr = next_r_ptr + 2 * STRIDE
        if MATRICES.HALF:
            exact_r_ptr = exact_ptr
            exact_z_ptr = exact_ptr + STRIDE
            e_shift = 2 * STRIDE
        else:
            exact_r_ptr = r_ptr
            exact_z_ptr = z_ptr
            e_shift = shift
        # S = 1/4 R² - 3/2 R, and beside it Z of the step before, which wants no more than R either.
        if MATRICES.JOINED and k > 1:
            joined_step(
                r_ptr, exact_ptr, square_ptr, next_z_ptr, items, shift, MATRICES, STRIDE, DERIVED
            )  # fmt: skip
        else:
            item = step(
                r_ptr, r_ptr, exact_r_ptr, square_ptr, square_ptr + shift, 0.25, -1.5, first, 0, items, shift,
                e_shift, MATRICES, DERIVED, False, False,
            )  # fmt: skip
            if not MATRICES.JOINED:
                begin = 2 * items if DERIVED and not MATRICES.HALF else items
                more = tl.where(k > 1, items, 0)
                step(
                    z_ptr, r_ptr, exact_z_ptr, next_z_ptr, next_z_ptr + shift, -0.5, 1.5, item, begin, more, shift,
                    e_shift, MATRICES, DERIVED, WATCHED, True,
                )  # fmt: skip
        arrivals += programs
        meet(counter_ptr, arrivals)
        # R <- R S + 9/4 R.
        if WATCHED:
            following_ptr = operands_ptr + (10 if DERIVED else 5) * STRIDE
        else:
            following_ptr = next_r_ptr
        step(
            r_ptr, square_ptr, exact_r_ptr, following_ptr, next_r_ptr + shift, 1.0, 2.25, first, 0, items, shift,
            e_shift, MATRICES, DERIVED, False, True,
        )  # fmt: skip
        arrivals += programs
        meet(counter_ptr, arrivals)
        if WATCHED:
            for i in range(first, items, programs):
                pair, group = tile_and_group(i, MATRICES.PAIRS)
                settle(following_ptr, r_ptr, next_r_ptr, pair, group, MATRICES)
            arrivals += programs
            meet(counter_ptr, arrivals)
    return arrivals


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
