"""Newton's iteration for groups above 64 channels, all of it one launch: forward and backward.

The programs share the tiles of all matrices. Between two products of the iteration they meet: each waits until all have
come so far. That takes a launch whose programs all run at once (`runtime.Launch`, `cooperative`).

The backward takes the steps of the forward again, and beside each its derivative (math.md, Eq. 11): nothing is kept.
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.device.ends import finish, finish_trace, prepare, start
from iternorm.backends.triton.device.steps import combined, settle, store_symmetric, store_whitening
from iternorm.backends.triton.device.tiles import follow


@triton.jit
def tile_and_group(item, TILES: tl.constexpr):
    """Which tile of which group's matrix an item of work is: of all tiles, or of those on and below the diagonal."""
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
def step(
    a_ptr, b_ptr, e_ptr, out_ptr, alpha, gamma, item, end, items, shift,
    MATRICES: tl.constexpr, DERIVED: tl.constexpr, WATCHED: tl.constexpr,
):  # fmt: skip
    """This program's share of alpha A B + gamma E, or of its derivative: see `combined`.

    Items of work that are done between two meetings are counted through. This program begins at `item`, the step ends
    before `end`, and where the program goes on after it is returned.
    """
    programs = tl.num_programs(0)
    for i in range(item, end, programs):
        pair, group = tile_and_group(i % items, MATRICES.PAIRS)
        at = group * MATRICES.N * MATRICES.N
        rows, columns, tile = combined(
            a_ptr + at, b_ptr + at, e_ptr + at, alpha, gamma, pair, shift, MATRICES, DERIVED, WATCHED
        )  # fmt: skip
        target_ptr = out_ptr + at
        if DERIVED:
            target_ptr += shift
        store_symmetric(target_ptr, rows, columns, tile, MATRICES)
    return item + tl.cdiv(tl.maximum(end - item, 0), programs) * programs


@triton.jit
def take_steps(
    work_ptr, counter_ptr, arrivals, count,
    MATRICES: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr, DERIVED: tl.constexpr, WATCHED: tl.constexpr,
):  # fmt: skip
    """From R_0 and Z_1 to R_{T-1} and Z_{T-1}, and the arrivals at meetings so far.

    S is in slot 0 of the work, R_k in slot 1 + k % 2, Z_k in slot 3 + k % 2. With `DERIVED` derivatives come 5
    slots behind their matrices. With `WATCHED` the next R is in the slot after all of these until it is settled.
    """
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    items = MATRICES.PAIRS * count
    tiles = MATRICES.TILES * count
    shift = 5 * STRIDE
    square_ptr = work_ptr
    following_ptr = work_ptr + (10 if DERIVED else 5) * STRIDE
    for k in range(1, T):
        r_ptr = work_ptr + (1 + (k - 1) % 2) * STRIDE
        next_r_ptr = work_ptr + (1 + k % 2) * STRIDE
        z_ptr = r_ptr + 2 * STRIDE
        next_z_ptr = next_r_ptr + 2 * STRIDE
        # S = 1/4 R² - 3/2 R, and beside it Z of the step before, which wants no more than R either. Derivatives, which
        # take twice as long, come first.
        more = tl.where(k > 1, items, 0)
        item = first
        end = items
        if DERIVED:
            item = step(r_ptr, r_ptr, r_ptr, square_ptr, 0.25, -1.5, item, end, items, shift, MATRICES, True, False)
            end += more
            item = step(z_ptr, r_ptr, z_ptr, next_z_ptr, -0.5, 1.5, item, end, items, shift, MATRICES, True, WATCHED)
            end += items
        item = step(r_ptr, r_ptr, r_ptr, square_ptr, 0.25, -1.5, item, end, items, shift, MATRICES, False, False)
        end += more
        step(z_ptr, r_ptr, z_ptr, next_z_ptr, -0.5, 1.5, item, end, items, shift, MATRICES, False, WATCHED)
        arrivals += programs
        meet(counter_ptr, arrivals)
        # R <- R S + 9/4 R.
        item = first
        end = items
        if DERIVED:
            item = step(r_ptr, square_ptr, r_ptr, next_r_ptr, 1.0, 2.25, item, end, items, shift, MATRICES, True, False)
            end += items
        if WATCHED:
            step(r_ptr, square_ptr, r_ptr, following_ptr, 1.0, 2.25, item, end, items, shift, MATRICES, False, False)
            arrivals += programs
            meet(counter_ptr, arrivals)
            for i in range(first, tiles, programs):
                tile, group = tile_and_group(i, MATRICES.TILES)
                settle(following_ptr, r_ptr, next_r_ptr, tile, group, MATRICES)
        else:
            step(r_ptr, square_ptr, r_ptr, next_r_ptr, 1.0, 2.25, item, end, items, shift, MATRICES, False, False)
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
    residual_ptr = work_ptr + STRIDE
    scale_ptr = work_ptr + (6 if WATCHED else 5) * STRIDE
    for item in range(first, MATRICES.TILES * count, programs):
        tile, group = tile_and_group(item, MATRICES.TILES)
        if T > 1:
            start(covariance_ptr, residual_ptr, work_ptr + 4 * STRIDE, scale_ptr, eps, C, tile, group, MATRICES)
        else:
            start(covariance_ptr, residual_ptr, whitening_ptr, scale_ptr, eps, C, tile, group, MATRICES)
    if T > 1:
        meet(counter_ptr, programs)
        take_steps(work_ptr, counter_ptr, programs, count, MATRICES, T, STRIDE, False, WATCHED)
        for item in range(first, MATRICES.PAIRS * count, programs):
            pair, group = tile_and_group(item, MATRICES.PAIRS)
            r_ptr = work_ptr + (1 + (T - 1) % 2) * STRIDE + group * MATRICES.N * MATRICES.N
            z_ptr = r_ptr + 2 * STRIDE
            rows, columns, tile = combined(z_ptr, r_ptr, z_ptr, -0.5, 1.5, pair, 0, MATRICES, False, WATCHED)
            tile *= tl.load(scale_ptr + group)
            store_whitening(whitening_ptr, group, rows, columns, tile, MATRICES)
            store_whitening(whitening_ptr, group, columns, rows, tl.trans(tile), MATRICES)


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
    prepare(
        gradient_ptr, covariance_ptr, whitening_ptr, weight_ptr, grad_weight_ptr, work_ptr + STRIDE,
        work_ptr + 2 * STRIDE, work_ptr + 3 * STRIDE, eps, C, tl.program_id(0), tl.program_id(1).to(tl.int64), MATRICES,
        AFFINE,
    )  # fmt: skip


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
    PDL: tl.constexpr,
):
    """The symmetric gradient for the covariance, times a factor, given that for W, or diag(γ) W with `AFFINE`.

    d(γ) is written too. The counter is zero. The gradient may lie in slot 0 of the work, which is written after it has
    been read, and the result in slot 1, which is read before.
    """
    follow(PDL)
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles = MATRICES.TILES * count
    # dR_0 and dZ_1, 5 slots behind R_0 and Z_1; after the slots what each tile adds to the gradient of the trace.
    d_residual_ptr = work_ptr + 6 * STRIDE
    d_iterate_ptr = work_ptr + 9 * STRIDE
    sums_ptr = work_ptr + (11 if WATCHED else 10) * STRIDE
    for item in range(first, tiles, programs):
        tile, group = tile_and_group(item, MATRICES.TILES)
        prepare(
            gradient_ptr, covariance_ptr, whitening_ptr, weight_ptr, grad_weight_ptr, d_residual_ptr, d_iterate_ptr,
            sums_ptr, eps, C, tile, group, MATRICES, AFFINE,
        )  # fmt: skip
        if T > 1:
            scale_ptr = sums_ptr + tiles
            residual_ptr = work_ptr + STRIDE
            start(covariance_ptr, residual_ptr, work_ptr + 4 * STRIDE, scale_ptr, eps, C, tile, group, MATRICES)
    arrivals = programs
    meet(counter_ptr, arrivals)
    if T > 1:
        arrivals = take_steps(work_ptr, counter_ptr, arrivals, count, MATRICES, T, STRIDE, True, WATCHED)
        # The place of dZ_T: of the two, that which does not hold dZ_{T-1}.
        d_iterate_ptr = work_ptr + (8 + T % 2) * STRIDE
        for item in range(first, MATRICES.PAIRS * count, programs):
            pair, group = tile_and_group(item, MATRICES.PAIRS)
            matrix = group * MATRICES.N * MATRICES.N
            r_ptr = work_ptr + (1 + (T - 1) % 2) * STRIDE + matrix
            z_ptr = r_ptr + 2 * STRIDE
            rows, columns, tile = combined(z_ptr, r_ptr, z_ptr, -0.5, 1.5, pair, 5 * STRIDE, MATRICES, True, WATCHED)
            store_symmetric(d_iterate_ptr + matrix, rows, columns, tile, MATRICES)
            finish_trace(covariance_ptr, sums_ptr, tile, eps, C, pair, group, MATRICES)
        arrivals += programs
        meet(counter_ptr, arrivals)
    for item in range(first, tiles, programs):
        tile, group = tile_and_group(item, MATRICES.TILES)
        finish(d_iterate_ptr, covariance_ptr, sums_ptr, out_ptr, eps, factor, C, tile, group, MATRICES, TOGETHER)
