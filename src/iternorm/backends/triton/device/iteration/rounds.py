"""The products of the iteration, shared among all programs, which meet after each.

In the work memory there are first, with `HALF`, R and Z in fp32, and backward dR and dZ; then the matrices that
products take: S in slot 0, R_k in slot 1 + k % 2, Z_k in slot 3 + k % 2, and backward their derivatives 5 slots behind
them. With `WATCHED` the next R is in the slot after all of these until it is settled.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.iteration.meeting import meet
from iternorm.backends.triton.device.iteration.steps import (
    combined,
    load_matrix,
    pair_at,
    settle,
    stacked_products,
    store_matrix,
    store_symmetric,
    symmetrized,
)


@triton.jit
def tile_and_group(item, PAIRS: tl.constexpr):
    """Which tile on or below the diagonal of which group's matrix an item of work is."""
    return item % PAIRS, tl.cast(item // PAIRS, tl.int64)


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
        store_symmetric(out_ptr, rows, columns, MATRICES.RAISED * tile, MATRICES)
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
