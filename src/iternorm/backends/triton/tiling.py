"""The tiles of each kernel: how many samples, warps and stages, and how many programs share the samples.

The numbers are what benchmarks/tune_kernels.py found best over its shapes on an H200, the one GPU they were timed on.
Other GPUs begin with the same, and take smaller ones where they have less shared memory (`Tiles.smaller`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from iternorm.backends.triton.layout import BLOCK, LARGEST_NEWTON, LARGEST_TILE, Layout
from iternorm.backends.triton.precision import HALF, Split


class Tiles(NamedTuple):
    samples: int  # of a tile
    warps: int
    stages: int
    per_sm: int  # programs for each multiprocessor
    # Of wide groups.
    block: int = BLOCK  # channels that a program has
    depth: int = BLOCK  # channels that a map multiplies at a time
    as_rows: bool = False  # samples are the rows of a map's tiles in contiguous memory too

    def smaller(self) -> "Tiles | None":
        """The next that ask for less shared memory, for a GPU that has less than an H200; None if there are none."""
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        # A tile is an operand of a matrix product, which takes sixteen at least.
        return self._replace(samples=self.samples // 2) if self.samples > 16 else None


@dataclass(frozen=True)
class Rule:
    """Tiles, and when they are taken; None is either way."""

    tiles: Tiles
    split: Split | None = None
    rows: bool | None = None
    most: int | None = None  # samples of all groups
    least: int = 0  # values of the activation, padding included
    narrowest: int = 0  # channels of a group
    bytes_of_64: int | None = None  # a tile has 64 channels, of values of so many bytes

    def suits(self, split: int, rows: bool, samples: int, padded: int, bytes_of_64: int) -> bool:
        pairs = ((self.split, split), (self.rows, rows), (self.bytes_of_64, bytes_of_64))
        return (
            all(wanted is None or wanted == given for wanted, given in pairs)
            and (self.most is None or samples <= self.most)
            and samples * padded >= self.least
            and padded >= self.narrowest
            and (padded <= LARGEST_TILE or padded % self.tiles.block == 0)
        )


@dataclass(frozen=True)
class Tuning:
    """The tiles of one kernel on one class of GPUs: the first rule that suits is taken.

    Attributes:
        why: What the numbers come from.
        up_to_64: Rules for groups of up to 64 channels.
        up_to_128: For groups of 65 to 128.
        wide: For wider groups, which are computed in blocks of channels.
    """

    why: str
    up_to_64: tuple[Rule, ...]
    up_to_128: tuple[Rule, ...]
    wide: tuple[Rule, ...]


# So many samples of all groups do not keep all multiprocessors busy.
FEW = 2048 * 64 - 1
# Of so many, each has four small tiles.
FEWEST = 2**15
ONE, TWO, THREE = Split.ONE_PART, Split.TWO_PARTS, Split.THREE_PARTS
# Two parts of rows, and three parts, take smaller tiles.
_APPLIED_64 = (
    Rule(Tiles(128, 4, 4, 2), ONE),
    Rule(Tiles(64, 4, 4, 2), THREE),
    Rule(Tiles(64, 4, 4, 2), rows=True),
    Rule(Tiles(128, 4, 3, 2)),
)
# Of fewer values, there are fewer large tiles of maps than multiprocessors.
MANY = 2**21
# Three parts of a matrix, of 128x128 too, which ask for more shared memory than there is.
_APPLIED_IN_BLOCKS = (
    Rule(Tiles(128, 8, 3, 2, block=128, depth=32), THREE, least=MANY),
    Rule(Tiles(128, 8, 3, 1, as_rows=True), THREE, least=MANY),
    Rule(Tiles(64, 4, 3, 2), THREE),
)
_BACKWARD_IN_BLOCKS = (
    Rule(Tiles(128, 8, 3, 1, block=128, depth=32), THREE, rows=False, least=MANY),
    Rule(Tiles(128, 8, 4, 1, depth=32, as_rows=True), THREE, least=MANY),
    Rule(Tiles(64, 4, 2, 4), THREE),
)
HOPPER = {
    "moments": Tuning(
        why="bound by memory: large tiles of bfloat16, smaller ones where parts need registers",
        # Of a stream, few programs: each leaves a partial matrix to the join.
        up_to_64=(
            Rule(Tiles(64, 4, 4, 2), Split.STREAMED),
            Rule(Tiles(128, 4, 4, 2), ONE, most=FEW),
            Rule(Tiles(128, 4, 6, 1), ONE, rows=True, most=2**19, bytes_of_64=2),
            Rule(Tiles(128, 4, 4, 2), ONE),
            Rule(Tiles(64, 4, 3, 2), most=FEW),
            Rule(Tiles(128, 4, 4, 1), TWO, rows=True, most=2**19, bytes_of_64=4),
            Rule(Tiles(64, 4, 3, 2)),
        ),
        up_to_128=(
            Rule(Tiles(128, 8, 3, 1), Split.STREAMED),
            Rule(Tiles(64, 8, 4, 1), ONE),
            Rule(Tiles(32, 8, 3, 1), THREE),
            Rule(Tiles(32, 8, 4, 1)),
        ),
        wide=(
            Rule(Tiles(64, 8, 3, 1, block=128), rows=True, least=2**23, narrowest=512),
            Rule(Tiles(128, 4, 3, 1), most=2**11),
            Rule(Tiles(128, 4, 3, 1), ONE, rows=True),
            Rule(Tiles(64, 4, 4, 1), ONE),
            Rule(Tiles(64, 4, 3, 1)),
        ),
    ),
    "cross_moments": Tuning(
        why="reads two activations, so one program a multiprocessor in bfloat16",
        up_to_64=(
            Rule(Tiles(64, 4, 4, 1), ONE, most=FEW),
            Rule(Tiles(64, 4, 5, 1), ONE, rows=True, most=2**20, bytes_of_64=2),
            Rule(Tiles(128, 4, 4, 1), ONE),
            Rule(Tiles(64, 4, 5, 1), TWO, rows=True, most=2**18, bytes_of_64=4),
            Rule(Tiles(64, 4, 3, 2)),
        ),
        up_to_128=(Rule(Tiles(64, 8, 4, 1), ONE), Rule(Tiles(32, 8, 4, 1))),
        wide=(Rule(Tiles(64, 8, 3, 1, block=128)), Rule(Tiles(64, 4, 3, 2))),
    ),
    "whiten": Tuning(
        why="two programs hide each other's iteration, unless there is little else to do; smaller tiles of few samples",
        up_to_64=(
            # float16 with a residual takes 1.04 of the time with them.
            Rule(Tiles(64, 4, 4, 1), ONE, rows=True, most=FEWEST, bytes_of_64=2),
            Rule(Tiles(64, 4, 4, 1), rows=True, most=FEWEST, bytes_of_64=4),
            Rule(Tiles(64, 4, 4, 2), ONE, most=FEW),
            # These tiles take 1.2 to 1.4 of the time of float16's, 1.1 of narrow groups'.
            Rule(Tiles(128, 4, 4, 1), TWO, rows=True, bytes_of_64=4),
            *_APPLIED_64,
        ),
        up_to_128=(),
        wide=(),
    ),
    "apply": Tuning(
        why="as `whiten`, without its iteration",
        up_to_64=_APPLIED_64,
        up_to_128=(*_APPLIED_IN_BLOCKS, Rule(Tiles(64, 8, 4, 1), ONE), Rule(Tiles(64, 8, 3, 1))),
        wide=(
            Rule(Tiles(128, 8, 4, 2, block=128), ONE, rows=True, least=2**23, narrowest=512),
            Rule(Tiles(128, 4, 3, 2, block=128), ONE, rows=False, least=MANY),
            Rule(Tiles(128, 4, 3, 2), ONE),
            Rule(Tiles(64, 4, 4, 2, block=128, depth=32), TWO, rows=True, least=MANY),
            Rule(Tiles(64, 4, 4, 2, depth=32, as_rows=True), TWO),
            *_APPLIED_IN_BLOCKS,
            Rule(Tiles(64, 4, 3, 2)),
        ),
    ),
    "whiten_backward": Tuning(
        why="the iteration's matrices take most of the shared memory: two programs only of many small tiles",
        up_to_64=(
            Rule(Tiles(128, 4, 3, 1), ONE, rows=True, most=FEW),
            Rule(Tiles(128, 4, 5, 1), ONE, rows=True, most=2**20, bytes_of_64=2),
            Rule(Tiles(128, 4, 3, 1), ONE, rows=True),
            Rule(Tiles(128, 4, 4, 1), ONE),
            Rule(Tiles(64, 4, 4, 1), TWO, rows=True, bytes_of_64=4),
            Rule(Tiles(64, 4, 6, 1), TWO, rows=True, bytes_of_64=2),
            Rule(Tiles(64, 4, 3, 1), most=FEW),
            Rule(Tiles(64, 4, 3, 2), TWO),
            Rule(Tiles(128, 8, 3, 1), rows=True),
            Rule(Tiles(64, 4, 2, 2)),
        ),
        up_to_128=(),
        wide=(),
    ),
    "apply_backward": Tuning(
        why="applies two matrices: in parts, few stages and many programs",
        up_to_64=(),
        up_to_128=(*_BACKWARD_IN_BLOCKS, Rule(Tiles(64, 4, 3, 1), ONE), Rule(Tiles(32, 8, 3, 1))),
        wide=(
            Rule(Tiles(128, 8, 3, 2, block=128), ONE, rows=True, least=MANY),
            Rule(Tiles(128, 4, 3, 2, block=128, depth=32), ONE, rows=False, least=MANY),
            Rule(Tiles(128, 8, 3, 1), ONE, rows=True),
            Rule(Tiles(128, 4, 4, 2, depth=32), ONE),
            Rule(Tiles(128, 8, 3, 2, block=128, depth=32, as_rows=True), TWO, least=MANY),
            Rule(Tiles(64, 4, 3, 2, depth=32, as_rows=True), TWO),
            *_BACKWARD_IN_BLOCKS,
            Rule(Tiles(64, 4, 2, 4)),
        ),
    ),
}


# The most samples that a program adds up in tensor cores, which truncate: 6e-5 of their covariance.
LONGEST_SUM = 2**14


class Blocks(NamedTuple):
    """How the iteration above 64 channels multiplies."""

    side: int  # of a tile of the result
    depth: int  # of the blocks that a product goes through
    stages: int
    warps: int
    joined: bool = False  # S and Z in one pass, see `device/iteration/rounds.py`; in float16 only


def blocks_for(size: int, precision: str) -> Blocks:
    """The blocks for matrices of so many rows, forward and backward.

    Small tiles, so that there are enough for a GPU. benchmarks/tune_iteration.py times others.
    """
    if precision == HALF:
        # From 512 rows on there is a tile for every multiprocessor of an H200 without Z's own.
        return Blocks(side=32, depth=64 if size % 64 == 0 else 32, stages=4, warps=4, joined=size >= 512)
    # At a depth of 64 three products of TF32 run out of registers (seen in the compiler's report, not timed).
    depth = 32 if size % 64 != 0 or precision == "tf32x3" else 64
    return Blocks(side=32, depth=depth, stages=4 if depth == 32 else 3, warps=2 if size >= 512 else 4)


def tiles_for(kernel: str, layout: Layout, split: int, third: bool = False, value_bytes: int = 0) -> Tiles:
    """The tiles of a kernel, which may go over a `third` activation: a residual forward, the output backward.

    A value has `value_bytes`; 0 takes what suits any.
    """
    tuning, samples = HOPPER[kernel], layout.samples * layout.num_groups
    up_to_64 = layout.padded <= LARGEST_NEWTON
    rules = tuning.up_to_64 if up_to_64 else tuning.wide if layout.wide else tuning.up_to_128
    bytes_of_64 = value_bytes if layout.padded == 64 else 0
    tiles = next(rule.tiles for rule in rules if rule.suits(split, layout.rows, samples, layout.padded, bytes_of_64))
    if up_to_64 and kernel.endswith("moments") and samples < 2048 * tiles.samples:
        # Each program adds a partial matrix to be reduced: with few tiles for each, fewer programs are faster.
        tiles = tiles._replace(per_sm=1)
    return _with_third_tile(kernel, tiles, split, up_to_64, samples) if third else tiles


def has_few_samples(layout: Layout) -> bool:
    """Whether there are too few samples to keep all multiprocessors busy."""
    return layout.samples * layout.num_groups <= FEW


def _with_third_tile(kernel: str, tiles: Tiles, split: int, up_to_64: bool, samples: int) -> Tiles:
    backward = kernel not in ("apply", "whiten")
    if backward and split == ONE and up_to_64:
        # Of half the samples, to keep them in registers.
        if kernel == "cross_moments":
            return Tiles(64, 4, 3, 1 if samples < 2048 * 128 else 2)
        return tiles._replace(samples=64) if samples <= FEW else Tiles(64, 4, 2, 2)
    if backward and up_to_64 and (samples <= FEW or (split == TWO and kernel == "cross_moments")):
        return tiles._replace(stages=min(tiles.stages, 3))
    # The stages of two loads leave room for a second program.
    return tiles._replace(stages=max(1, tiles.stages - 1))


def programs(layout: Layout, tiles: Tiles, num_sms: int, others: int = 0, blocks: int = 1) -> int:
    """How many programs share the samples of a block of a group, none without any unless there are no samples.

    There are so many `blocks`, and `others` need room too.
    """
    total = max(1, -(-layout.samples // tiles.samples))
    wanted = max(1, num_sms * tiles.per_sm // (layout.num_groups * blocks) - others)
    each = -(-total // wanted)
    return -(-total // each)
