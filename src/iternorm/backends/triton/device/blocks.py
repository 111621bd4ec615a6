"""Blocks of matrices in memory: where they are, loads and stores."""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def for_each(scalar, indices):
    """A number, once for each index: the interpreter of Triton 3.9 cannot join the mask of a scalar to that of many."""
    return scalar + tl.zeros_like(indices)


@triton.jit
def load_block(ptr, rows, columns, N: tl.constexpr, EVEN: tl.constexpr):
    pointers = ptr + rows[:, None] * N + columns[None, :]
    if EVEN:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(rows[:, None] < N) & (columns[None, :] < N), other=0.0)
    return block


@triton.jit
def store_block(ptr, rows, columns, block, N: tl.constexpr, EVEN: tl.constexpr):
    pointers = ptr + rows[:, None] * N + columns[None, :]
    if EVEN:
        tl.store(pointers, block)
    else:
        tl.store(pointers, block, mask=(rows[:, None] < N) & (columns[None, :] < N))


@triton.jit
def tile_at(index, N: tl.constexpr, SIDE: tl.constexpr):
    """Rows and columns of a tile of a matrix."""
    across = tl.cdiv(N, SIDE)
    side = tl.arange(0, SIDE)
    return index // across * SIDE + side, index % across * SIDE + side


@triton.jit
def tile_of(N: tl.constexpr, SIDE: tl.constexpr):
    """Rows and columns of this program's tile, and the number of its matrix."""
    rows, columns = tile_at(tl.program_id(0), N, SIDE)
    return rows, columns, tl.program_id(1).to(tl.int64)


@triton.jit
def below_diagonal(index):
    """Row and column of the tile of this index, of those on and below the diagonal."""
    # The row whose first tile is the k (k + 1) / 2 -th; a hundredth more than rounding could take away. Right for up to
    # 99 rows of tiles, where there are 32 at most.
    row = (0.5 * tl.sqrt(8.0 * tl.cast(index, tl.float32) + 1.0) - 0.49).to(tl.int32)
    return row, index - row * (row + 1) // 2
