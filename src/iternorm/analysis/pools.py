"""What is kept of a stream of activations to estimate batch noise: sums of mini-groups, and single samples."""

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from iternorm.analysis.operations import AffineMaps, Whitening
from iternorm.whitening import groups


class Sums(NamedTuple):
    """Sums over the samples of one mini-group, or of many in a leading dimension."""

    # The samples; the name hides a method of tuple that nobody calls.
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    # [C]: the sum of x
    first: Tensor
    # By block size, by part of `groups.parts`: [G, d, d], the sums of x xᵀ of each block of channels
    second: dict[int, list[Tensor]]


class SamplePool:
    """A uniform sample of the examples of a stream (Vitter's algorithm R), one random position of each.

    Args:
        size: Samples to keep.
        seed: Decides which.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        self.seen = 0
        self._rows: Tensor | None = None
        self._random = random.Random(seed)

    def add(self, x: Tensor) -> None:
        """Offer the examples of an activation ``[N, C, ...]``."""
        flat = x.flatten(2) if x.ndim > 2 else x[..., None]
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self._rows is None:
            self._rows = torch.zeros(self.size, x.shape[1], dtype=dtype, device=x.device)
        slots: dict[int, tuple[int, int]] = {}
        for example in range(x.shape[0]):
            slot = self.seen if self.seen < self.size else self._random.randrange(self.seen + 1)
            self.seen += 1
            if slot < self.size:
                slots[slot] = (example, self._random.randrange(flat.shape[2]))
        if slots:
            examples, positions = torch.tensor(list(slots.values()), device=x.device).unbind(1)
            self._rows[torch.tensor(list(slots), device=x.device)] = flat[examples, :, positions].to(dtype)

    @property
    def samples(self) -> Tensor:
        """The kept samples ``[N, C]``."""
        assert self._rows is not None
        return self._rows[: min(self.seen, self.size)]


class StatisticsPool:
    """Sums of mini-groups of examples over all their positions, from which the statistics of batches are assembled.

    A batch of B examples is B / `examples` mini-groups. Mini-groups are formed in the order of the stream, and a
    uniform sample of them is kept (algorithm R). Sums are fp64 and about the mean of the first examples: their
    differences are covariances, and those of a large mean would have few common digits.

    Args:
        examples: Examples in a mini-group.
        size: Mini-groups to keep.
        group_sizes: Group sizes of the operations that will be asked for (None is all channels); only the second
            moments inside these groups are kept.
        seed: Decides which stay.
    """

    def __init__(self, examples: int, size: int, group_sizes: Iterable[int | None], seed: int):
        self.examples = examples
        self.size = size
        self.seen = 0
        self._group_sizes = tuple(group_sizes)
        # [C, 1]: subtracted from all samples
        self._origin: Tensor | None = None
        self._kept: Sums | None = None
        self._unfinished: Sums | None = None
        self._unfinished_examples = 0
        self._random = random.Random(seed)

    @property
    def num_examples(self) -> int:
        """Examples that batches are drawn from."""
        return self.examples * min(self.seen, self.size)

    def add(self, x: Tensor) -> None:
        """Offer the examples of an activation ``[N, C, ...]``."""
        start, stop = 0, x.shape[0]
        while start < stop:
            count = min(self.examples - self._unfinished_examples, stop - start)
            part = x[start : start + count]
            start += count
            if count == self.examples:
                slot = self._next_slot()
                if slot is not None:
                    self._keep(slot, self._sums(part))
                continue
            sums = self._sums(part)
            self._unfinished = sums if self._unfinished is None else _added(self._unfinished, sums)
            self._unfinished_examples += count
            if self._unfinished_examples == self.examples:
                slot = self._next_slot()
                if slot is not None:
                    self._keep(slot, self._unfinished)
                self._unfinished, self._unfinished_examples = None, 0

    def draw(self, batch_size: int, draws: int, generator: torch.Generator) -> Tensor:
        """Batches as mini-groups ``[draws, batch_size / examples]``, cut from random orders of all of them."""
        each, available = batch_size // self.examples, min(self.seen, self.size)
        if each * self.examples != batch_size or each > available:
            raise ValueError(f"no batch of {batch_size} can be made of {available} mini-groups of {self.examples}")
        orders = [torch.randperm(available, generator=generator) for _ in range(-(-draws // (available // each)))]
        batches = [order[: available // each * each].view(-1, each) for order in orders]
        return torch.cat(batches)[:draws]

    @property
    def center(self) -> Tensor:
        """The mean ``[C]`` of all that is kept."""
        assert self._origin is not None
        return self._origin.squeeze(1) + self._offset

    @property
    def _offset(self) -> Tensor:
        """The mean ``[C]`` of all that is kept, less the origin."""
        assert self._kept is not None
        return self._kept.first.sum(0) / self._kept.count.sum()

    def fits(
        self, operation: Whitening, batches: Tensor, dtype: torch.dtype, budget: int
    ) -> Iterator[list[AffineMaps]]:
        """The maps of an operation for batches of mini-groups ``[draws, q]``, as many at a time as fit the budget.

        They apply to samples less `center`: in fp32 a large mean would leave A x and c few common digits.
        """
        assert self._kept is not None
        count, first, _ = self._kept
        num_channels = first.shape[1]
        parts = groups.parts(num_channels, operation.group_size)
        second = self._blocks(operation.group_size)
        offset = self._offset
        # As in `Whitening.fit`, a decomposition is fed with fp64.
        working = dtype if operation.solver == "newton" else torch.float64
        # Sums, covariance, whitening matrix and their temporaries, in fp64.
        draw_bytes = 48 * sum(part.count * part.size**2 for part in parts)
        for chunk in batches.split(max(1, budget // draw_bytes)):
            # A product with zeros and ones adds the chosen mini-groups without a copy of each.
            chosen = torch.zeros(len(chunk), len(first), dtype=first.dtype, device=first.device)
            chosen.scatter_(1, chunk.to(first.device), 1)
            total = (chosen @ count)[:, None]
            mean = chosen @ first / total
            covariances = []
            for part, block in zip(parts, second, strict=True):
                moment = (chosen @ block.flatten(1) / total).unflatten(1, block.shape[1:])
                middle = mean[:, part.channels].unflatten(1, (part.count, part.size))
                covariances.append((moment - middle[..., :, None] * middle[..., None, :]).to(working))
            maps = operation.maps((mean - offset).to(working), covariances)
            yield [AffineMaps(block.linear.to(dtype), block.shift.to(dtype)) for block in maps]

    def _sums(self, x: Tensor) -> Sums:
        by_channel = x.transpose(0, 1)
        rows = (
            torch.empty(by_channel.shape, dtype=torch.float64, device=x.device).copy_(by_channel).flatten(1)
        )  # [C, m]
        if self._origin is None:
            self._origin = rows.mean(1, keepdim=True)
        rows -= self._origin
        second = {}
        for size in _block_sizes(self._group_sizes, len(rows)):
            blocks = [rows[p.channels].unflatten(0, (p.count, p.size)) for p in groups.parts(len(rows), size)]
            second[size] = [block @ block.mT for block in blocks]
        return Sums(rows.new_tensor(float(rows.shape[1])), rows.sum(1), second)

    def _next_slot(self) -> int | None:
        slot = self.seen if self.seen < self.size else self._random.randrange(self.seen + 1)
        self.seen += 1
        return slot if slot < self.size else None

    def _keep(self, slot: int, sums: Sums) -> None:
        if self._kept is None:
            second = {size: [_repeated(block, self.size) for block in blocks] for size, blocks in sums.second.items()}
            self._kept = Sums(_repeated(sums.count, self.size), _repeated(sums.first, self.size), second)
        self._kept.count[slot] = sums.count
        self._kept.first[slot] = sums.first
        for size, blocks in sums.second.items():
            for kept, block in zip(self._kept.second[size], blocks, strict=True):
                kept[slot] = block

    def _blocks(self, group_size: int | None) -> list[Tensor]:
        """Second moments ``[Q, G, d, d]`` by part for a group size, cut from the larger blocks that are kept."""
        assert self._kept is not None
        size = groups.effective_size(self._kept.first.shape[1], group_size)
        kept = next(blocks for known, blocks in self._kept.second.items() if known % size == 0)
        full, rest = [], []
        for block in kept:
            if block.shape[-1] == size:
                full.append(block)
                continue
            fitting = block.shape[-1] // size
            inner = block[..., : fitting * size, : fitting * size]
            if fitting:
                grid = inner.unflatten(-1, (fitting, size)).unflatten(-3, (fitting, size))  # [Q, n, a, d, a, d]
                full.append(grid.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3).flatten(1, 2))
            if block.shape[-1] % size:
                rest.append(block[..., fitting * size :, fitting * size :])
        return ([torch.cat(full, 1) if len(full) > 1 else full[0]] if full else []) + rest


def _block_sizes(group_sizes: Iterable[int | None], num_channels: int) -> list[int]:
    """The fewest block sizes that every group size divides."""
    sizes: list[int] = []
    for size in sorted({groups.effective_size(num_channels, size) for size in group_sizes}, reverse=True):
        if not any(known % size == 0 for known in sizes):
            sizes.append(size)
    return sizes


def statistics_bytes(num_channels: int, group_sizes: Iterable[int | None]) -> int:
    """Bytes that one mini-group takes in a `StatisticsPool`."""
    return 8 * num_channels * (1 + sum(_block_sizes(group_sizes, num_channels)))


def _repeated(value: Tensor, size: int) -> Tensor:
    return value.new_zeros(size, *value.shape)


def _added(a: Sums, b: Sums) -> Sums:
    second = {size: [x + y for x, y in zip(a.second[size], b.second[size], strict=True)] for size in a.second}
    return Sums(a.count + b.count, a.first + b.first, second)
