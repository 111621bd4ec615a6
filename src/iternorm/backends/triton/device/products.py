"""Products of fp32 tiles in the tensor cores' smaller formats."""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false
import triton
import triton.language as tl


@triton.jit
def halves(x):
    """x rounded to bfloat16, and what that leaves of it in fp32. A NaN may become a zero, which leaves NaN.

    In integers: for a conversion there and back the compiler takes slow instructions.
    """
    bits = x.to(tl.int32, bitcast=True) + 0x8000
    upper = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return upper, x - (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """The bfloat16 parts of x, largest first; those that are not there stand for the last."""
    if PARTS == 1:
        first = x.to(tl.bfloat16)
        second, third = first, first
    else:
        first, left = halves(x)
        if PARTS == 2:
            second = left.to(tl.bfloat16)
            third = second
        else:
            second, left = halves(left)
            third = left.to(tl.bfloat16)
    return first, second, third


@triton.jit
def above(a, b):
    """[a; b]."""
    return tl.join(a, b).permute(2, 0, 1).reshape(2 * a.shape[0], a.shape[1])


@triton.jit
def dot_of_parts(a1, a2, a3, b1, b2, b3, acc, PARTS: tl.constexpr):
    """acc + a b of matrices in parts, the small products first, in fp32; 0 is one product in fp32."""
    if PARTS == 0:
        acc = tl.dot(a1, b1, acc, input_precision="ieee")
    else:
        if PARTS == 3:
            acc = tl.dot(a1, b3, acc)
            acc = tl.dot(a3, b1, acc)
            acc = tl.dot(a2, b2, acc)
        if PARTS > 1:
            acc = tl.dot(a1, b2, acc)
            acc = tl.dot(a2, b1, acc)
        acc = tl.dot(a1, b1, acc)
    return acc


@triton.jit
def split_dot(a, b, acc, PARTS: tl.constexpr):
    """acc + a b for fp32 a and b as products of `PARTS` bfloat16 parts each, in fp32; 0 is one product in fp32.

    Two parts (three products) are good to 2^-16, better than TF32; three (six products) to fp32's own rounding. Tensor
    cores take bfloat16 operands in either memory order, TF32 only in one.
    """
    if PARTS == 0:
        acc = dot_of_parts(a, a, a, b, b, b, acc, PARTS)
    else:
        a1, a2, a3 = in_parts(a, PARTS)
        b1, b2, b3 = in_parts(b, PARTS)
        acc = dot_of_parts(a1, a2, a3, b1, b2, b3, acc, PARTS)
    return acc


@triton.jit
def as_tf32(x):
    """x rounded to what tensor cores take of an fp32 operand. They would truncate it."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def for_truncation(x):
    """x such that truncated to TF32 it is nearly what rounding gives: larger by a third of the last place at 1.0.

    One instruction where rounding takes four. The average error is zero and its deviation 0.31 of the last place, where
    rounding's is 0.29.
    """
    return x * (1.0 + 2.0**-10 / 3.0)


@triton.jit
def truncated(x):
    """The upper part of x, as tensor cores take it of an fp32 operand, and the rest of it."""
    upper = (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return upper, x - upper


@triton.jit
def on_channels(matrix, tile, acc, ROWS: tl.constexpr, PARTS: tl.constexpr, ROUNDED: tl.constexpr = False):
    """acc + matrix x for the samples x of a tile; the matrix is transposed already where tiles are rows.

    A tile of one part goes in as it is, and so does a matrix that is rounded to bfloat16 already, or with `ROUNDED` to
    TF32.
    Rows are what TF32's left operand wants: one product in place of three; for three parts, three products of two TF32
    parts in place of six. The tile's parts are truncated, which is quick, and the matrix's rounded, so that errors do
    not all have one sign: they are 1.5e-7 of the result in simulation, as fp32's own rounding is.
    """
    if ROWS and PARTS == 2:
        if not ROUNDED:
            matrix = as_tf32(matrix)
        acc = tl.dot(for_truncation(tile), matrix, acc, input_precision="tf32")
    elif ROWS and PARTS == 3:
        upper, lower = truncated(tile)
        matrix_upper = as_tf32(matrix)
        matrix_lower = matrix - matrix_upper
        acc = tl.dot(upper, matrix_lower, acc, input_precision="tf32")
        acc = tl.dot(lower, matrix_upper, acc, input_precision="tf32")
        acc = tl.dot(upper, matrix_upper, acc, input_precision="tf32")
    elif ROWS:
        acc = split_dot(tile, matrix, acc, PARTS)
    else:
        acc = split_dot(matrix, tile, acc, PARTS)
    return acc
