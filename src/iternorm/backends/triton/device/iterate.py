"""Newton's iteration for groups above 64 channels, all of it one launch: forward and backward.

The programs share the tiles of all matrices. Between two products of the iteration they meet: each waits until all have
come so far. That takes a launch whose programs all run at once (`runtime.Launch`, `cooperative`).
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.ends import finish, prepare, start
from iternorm.backends.triton.device.newton import total
from iternorm.backends.triton.device.steps import (
    add_products,
    differentiate,
    empty_tile,
    finished_step,
    load_matrix,
    multiply,
    place_of,
    settle,
    step,
    store_matrix,
    store_whitening,
    symmetrize,
)
from iternorm.backends.triton.device.tiles import follow


@triton.jit
def tile_and_group(item, TILES: tl.constexpr):
    """Which tile of which group's matrix an item of work is."""
    return item % TILES, tl.cast(item // TILES, tl.int64)


@triton.jit
def meet(counter_ptr, arrivals):
    """Wait until programs have arrived so often in all. What they wrote before can be read after it."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while seen < arrivals:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def iterate(
    covariance_ptr,
    saved_ptr,
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
    """The whitening matrices of covariances without eps.

    R_0..R_{T-1} and Z_1..Z_{T-1} are left at `saved_ptr`, one every `STRIDE`. The counter is zero.
    """
    follow(PDL)
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    TILES: tl.constexpr = MATRICES.TILES
    items = TILES * count
    between_ptr = work_ptr
    following_ptr = work_ptr + STRIDE
    scale_ptr = work_ptr + 2 * STRIDE
    iterates_ptr = saved_ptr + (T - 1) * STRIDE
    for item in range(first, items, programs):
        tile, group = tile_and_group(item, TILES)
        if T > 1:
            start(covariance_ptr, saved_ptr, scale_ptr, iterates_ptr + STRIDE, eps, C, tile, group, MATRICES)
        else:
            start(covariance_ptr, saved_ptr, scale_ptr, whitening_ptr, eps, C, tile, group, MATRICES)
    if T > 1:
        arrivals = programs
        meet(counter_ptr, arrivals)
        for k in range(1, T):
            before_ptr = saved_ptr + (k - 1) * STRIDE
            # S = 1/4 R² - 3/2 R, and beside it Z of the step before, which wants no more than R either.
            both = tl.where(k > 1, 2 * items, items)
            for item in range(first, both, programs):
                tile, group = tile_and_group(item % items, TILES)
                if item < items:
                    step(before_ptr, before_ptr, before_ptr, between_ptr, 0.25, -1.5, tile, group, MATRICES, False)
                else:
                    z_ptr = iterates_ptr + (k - 1) * STRIDE
                    step(z_ptr, before_ptr, z_ptr, z_ptr + STRIDE, -0.5, 1.5, tile, group, MATRICES, WATCHED)
            arrivals += programs
            meet(counter_ptr, arrivals)
            # R <- R S + 9/4 R.
            for item in range(first, items, programs):
                tile, group = tile_and_group(item, TILES)
                if WATCHED:
                    step(before_ptr, between_ptr, before_ptr, following_ptr, 1.0, 2.25, tile, group, MATRICES, False)
                else:
                    after_ptr = before_ptr + STRIDE
                    step(before_ptr, between_ptr, before_ptr, after_ptr, 1.0, 2.25, tile, group, MATRICES, False)
            arrivals += programs
            meet(counter_ptr, arrivals)
            if WATCHED:
                for item in range(first, items, programs):
                    tile, group = tile_and_group(item, TILES)
                    settle(following_ptr, before_ptr, before_ptr + STRIDE, tile, group, MATRICES)
                arrivals += programs
                meet(counter_ptr, arrivals)
        last_ptr, last_z_ptr = saved_ptr + (T - 1) * STRIDE, iterates_ptr + (T - 1) * STRIDE
        for item in range(first, items, programs):
            tile, group = tile_and_group(item, TILES)
            rows, columns, matrix = place_of(tile, group, MATRICES)
            acc = add_products(last_z_ptr, last_ptr, tile, group, empty_tile(MATRICES), MATRICES)
            residual_ptr, z_ptr = last_ptr + matrix, last_z_ptr + matrix
            acc = finished_step(acc, residual_ptr, z_ptr, -0.5, 1.5, rows, columns, MATRICES, WATCHED)
            acc *= tl.load(scale_ptr + group)
            store_whitening(whitening_ptr, group, rows, columns, acc, MATRICES)


@triton.jit
def wide_weight_gradient(
    gradient_ptr,
    covariance_ptr,
    whitening_ptr,
    weight_ptr,
    grad_weight_ptr,
    work_ptr,
    eps,
    C,
    MATRICES: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """d(γ) alone, where the covariance wants no gradient: one program a tile."""
    follow(PDL)
    sums_ptr = work_ptr + 5 * STRIDE
    prepare(
        gradient_ptr, covariance_ptr, whitening_ptr, weight_ptr, grad_weight_ptr, work_ptr, work_ptr + STRIDE, sums_ptr,
        eps, C, tl.program_id(0), tl.program_id(1).to(tl.int64), MATRICES, AFFINE,
    )  # fmt: skip


@triton.jit
def iterate_backward(
    gradient_ptr,
    covariance_ptr,
    whitening_ptr,
    weight_ptr,
    grad_weight_ptr,
    saved_ptr,
    work_ptr,
    out_ptr,
    counter_ptr,
    eps,
    factor,
    C,
    count,
    MATRICES: tl.constexpr,
    NARROW: tl.constexpr,
    T: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    WATCHED: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """The symmetric gradient for the covariance, times a factor, given that for W, or diag(γ) W with `AFFINE`.

    d(γ) is written too. `NARROW` is `MATRICES` for the products that need the most registers. The counter is zero.
    """
    follow(PDL)
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    TILES: tl.constexpr = MATRICES.TILES
    items = TILES * count
    # dR, dZ, the next dR and dZ, dR R, and what each tile adds to the gradient of the trace.
    shared_ptr = work_ptr + 4 * STRIDE
    sums_ptr = work_ptr + 5 * STRIDE
    iterates_ptr = saved_ptr + (T - 1) * STRIDE
    for item in range(first, items, programs):
        tile, group = tile_and_group(item, TILES)
        prepare(
            gradient_ptr, covariance_ptr, whitening_ptr, weight_ptr, grad_weight_ptr, work_ptr, work_ptr + STRIDE,
            sums_ptr, eps, C, tile, group, MATRICES, AFFINE,
        )  # fmt: skip
    arrivals = programs
    meet(counter_ptr, arrivals)
    if T > 1:
        for item in range(first, items, programs):
            tile, group = tile_and_group(item, TILES)
            multiply(work_ptr, saved_ptr, shared_ptr, tile, group, MATRICES)
        arrivals += programs
        meet(counter_ptr, arrivals)
        for k in range(1, T):
            before_ptr, residual_ptr = saved_ptr + (k - 1) * STRIDE, saved_ptr + k * STRIDE
            # Each of dR and dZ has two places, which take turns.
            turn = (k - 1) % 2
            d_iterate_ptr, next_d_iterate_ptr = work_ptr + (1 + 2 * turn) * STRIDE, work_ptr + (3 - 2 * turn) * STRIDE
            if WATCHED:
                turn = 0
            d_residual_ptr, d_following_ptr = work_ptr + 2 * turn * STRIDE, work_ptr + (2 - 2 * turn) * STRIDE
            for item in range(first, items, programs):
                tile, group = tile_and_group(item, TILES)
                differentiate(shared_ptr, before_ptr, d_residual_ptr, d_following_ptr, tile, group, NARROW)
            arrivals += programs
            meet(counter_ptr, arrivals)
            if WATCHED:
                for item in range(first, items, programs):
                    tile, group = tile_and_group(item, TILES)
                    symmetrize(d_following_ptr, d_residual_ptr, tile, group, MATRICES)
                arrivals += programs
                meet(counter_ptr, arrivals)
                d_following_ptr = d_residual_ptr
            # dZ <- 3/2 dZ - 1/2 (dZ R + Z dR), and beside it dR R of the next step, which wants no more either.
            both = tl.where(k < T - 1, 2 * items, items)
            for item in range(first, both, programs):
                tile, group = tile_and_group(item % items, TILES)
                if item < items:
                    rows, columns, matrix = place_of(tile, group, MATRICES)
                    acc = add_products(d_iterate_ptr, residual_ptr, tile, group, empty_tile(MATRICES), MATRICES)
                    acc = add_products(iterates_ptr + k * STRIDE, d_following_ptr, tile, group, acc, MATRICES)
                    r_ptr, e_ptr = residual_ptr + matrix, d_iterate_ptr + matrix
                    acc = finished_step(acc, r_ptr, e_ptr, -0.5, 1.5, rows, columns, MATRICES, WATCHED)
                    store_matrix(next_d_iterate_ptr + matrix, rows, columns, acc, MATRICES)
                    if k == T - 1:
                        place = sums_ptr + group * TILES + tile
                        normalized = load_matrix(saved_ptr + matrix, rows, columns, MATRICES)
                        tl.store(place, tl.load(place) + total(acc * normalized))
                else:
                    multiply(d_following_ptr, residual_ptr, shared_ptr, tile, group, MATRICES)
            arrivals += programs
            meet(counter_ptr, arrivals)
    LAST: tl.constexpr = 3 if T > 1 and T % 2 == 0 else 1
    for item in range(first, items, programs):
        tile, group = tile_and_group(item, TILES)
        d_iterate_ptr = work_ptr + LAST * STRIDE
        finish(d_iterate_ptr, covariance_ptr, sums_ptr, out_ptr, eps, factor, C, tile, group, MATRICES, TOGETHER)
