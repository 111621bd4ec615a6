"""How the kernels multiply: what an operand is split into, and what torch's user allows."""

import enum
import math

import torch

from iternorm import solvers
from iternorm.backends.triton.runtime import INTERPRETED


class Split(enum.IntEnum):
    """How many bfloat16 parts an operand is split into where an activation is multiplied: `device/products.py`."""

    # One product in fp32, for Triton's interpreter, which has no tensor cores.
    INTERPRETED = 0
    # bfloat16 input, multiplied as it is.
    ONE_PART = 1
    # Three products, good to 2^-16: float16 input, and fp32 input where the user allows TF32.
    TWO_PARTS = 2
    # Six products, as accurate as fp32: fp32 input otherwise.
    THREE_PARTS = 3
    # Two parts of a stream's batch, which one program adds up in thousands: see `device/tools/stream.py`.
    STREAMED = 4


class NewtonSplit(enum.IntEnum):
    """What a matrix of Newton's iteration is split into in groups of up to 64 channels: `device/newton.py`."""

    # One product in fp32, for Triton's interpreter.
    INTERPRETED = 0
    # One float16 has the bits of a TF32, and its products take half the time.
    ONE_HALF = 1
    # Two float16 have 22 bits, enough for seven steps.
    TWO_HALVES = 2
    # Three bfloat16 have fp32's bits and its range, for any number of steps.
    THREE_BFLOAT16 = 3

    @property
    def in_half(self) -> bool:
        """Whether the parts are float16, whose range is small."""
        return self in (NewtonSplit.ONE_HALF, NewtonSplit.TWO_HALVES)

    @property
    def dtype(self) -> torch.dtype:
        """What the iteration's matrices are kept in."""
        if self is NewtonSplit.INTERPRETED:
            return torch.float32
        return torch.bfloat16 if self is NewtonSplit.THREE_BFLOAT16 else torch.float16


def tf32_allowed() -> bool:
    """Whether the user lets products of fp32 matrices on a GPU be TF32.

    There are two ways to say so since torch 2.9, and after the newer the older one's getter fails.
    """
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def split_for(dtype: torch.dtype) -> Split:
    """The split of an activation.

    fp32 input is computed to fp32's accuracy unless the user has allowed TF32 products: then to 2^-16, or in TF32 where
    the memory order allows it. float16 has three bits more than one bfloat16 holds.
    """
    if INTERPRETED:
        return Split.INTERPRETED
    if dtype == torch.bfloat16:
        return Split.ONE_PART
    return Split.THREE_PARTS if dtype == torch.float32 and not tf32_allowed() else Split.TWO_PARTS


def newton_split(split: int, exact: bool, num_iters: int) -> NewtonSplit:
    """How the iteration multiplies, beside an activation of this split.

    In simulation, for data of rank 8 in 64 channels, the error that two float16 parts leave in the output is 1.2e-6 at
    T=7 and 3.9e-6 at T=9. float16's range is enough for twelve steps, see `newton_range`.
    """
    if split == Split.INTERPRETED:
        return NewtonSplit.INTERPRETED
    if exact or num_iters > (7 if split == Split.THREE_PARTS else 12):
        return NewtonSplit.THREE_BFLOAT16
    return NewtonSplit.TWO_HALVES if split == Split.THREE_PARTS else NewtonSplit.ONE_HALF


def newton_range(num_iters: int, size: int = 1) -> float:
    """What the largest sum of a row's magnitudes is scaled to before the iteration's backward: a power of two.

    It bounds the spectral norm. Where the largest entry is scaled to the result instead, `size` times that does. In the
    steps before the last dR grows by 9/4 each, and dZ by 27/8 from the second on. Neither shall exceed 2^15.
    """
    growth = max((num_iters - 1) * math.log2(2.25), (num_iters - 2) * math.log2(3.375))
    return 2.0 ** math.floor(15 - math.log2(size) - growth)


def newton_raised(num_iters: int) -> float:
    """What R, S and Z are multiplied by in float16, a power of two.

    Where a channel is a thousandth of another, so are their entries for both, and float16 would drop much of what is
    near 2^-24, its smallest number. R and S are at most 5/4, and the Z of the last product 1.5^(T-1).
    """
    return 2.0 ** math.floor(15 - max(num_iters - 1, 1) * math.log2(1.5))


def jitter(split: int) -> float:
    """What ZCA's variances are raised by, relative to each: more than the rounding of zero eigenvalues.

    A negative one would grow to infinity in the iteration's many steps. Two parts leave out the product of the lower
    ones, about 2^-20 of the variances; the other products are exact, and their sums in fp32.
    """
    return 2.0**-17 if split == Split.TWO_PARTS else 2.0**-20


def is_watched(num_iters: int) -> bool:
    """Whether the last of so many steps are watched: see `device/newton.py`."""
    return num_iters > solvers.UNWATCHED_STEPS


# Products of float16 matrices: see `matrix_precision`.
HALF = "float16"


def matrix_precision(split: int, num_iters: int) -> str:
    """The products of the iteration of groups above 64 channels: of float16, or of fp32 as `tl.dot` names them.

    float16 has the bits of a TF32, and half the bytes. Its range is enough for twelve steps, see `newton_range`.
    In many steps Z grows large where channels depend on each other, and TF32's rounding would spread from there (in
    simulation 3 to 100 % of the output at T=50 and 256 channels, in three products 0.4 %).
    """
    if split == Split.INTERPRETED:
        return "ieee"
    return "tf32x3" if split == Split.THREE_PARTS or is_watched(num_iters) else HALF
