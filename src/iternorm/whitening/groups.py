"""How the channels of a layer are divided into groups that are whitened together."""

from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """A run of groups of one size: all full groups are one part, a smaller last group is another."""

    start: int
    stop: int
    first: int
    # The groups; the name hides a method of tuple that nobody calls.
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    size: int

    @property
    def channels(self) -> slice:
        return slice(self.start, self.stop)

    def of(self, matrices: Tensor) -> Tensor:
        """This part's matrices, ``[count, size, size]``, as a view of the padded ``[G, d, d]``."""
        return matrices[self.first : self.first + self.count, : self.size, : self.size]


def effective_size(num_features: int, group_size: int | None) -> int:
    """The number of channels in a full group: all of them when `group_size` is None or larger."""
    return num_features if group_size is None else min(group_size, num_features)


def num_groups(num_features: int, group_size: int | None) -> int:
    """The number of groups, a smaller last one included."""
    return -(-num_features // effective_size(num_features, group_size))


def parts(num_features: int, group_size: int | None) -> list[Part]:
    """Channels in order, full groups first, the remainder as a last smaller group."""
    size = effective_size(num_features, group_size)
    count = num_features // size
    full = count * size
    result = [Part(0, full, 0, count, size)]
    if full < num_features:
        result.append(Part(full, num_features, count, 1, num_features - full))
    return result


def pad(matrices: list[Tensor]) -> Tensor:
    """Join the matrices of all parts into one ``[G, d, d]``; what a smaller last group leaves free is zero."""
    if len(matrices) == 1:
        return matrices[0]
    size = matrices[0].shape[-1]
    padded = [torch.nn.functional.pad(m, (0, size - m.shape[-1], 0, size - m.shape[-1])) for m in matrices]
    return torch.cat(padded)


def pad_vector(values: Tensor, group_size: int | None) -> Tensor:
    """``[C]`` as ``[G, d]``, zeros at the end of a smaller last group."""
    size = effective_size(len(values), group_size)
    missing = -len(values) % size
    return torch.nn.functional.pad(values, (0, missing)).view(-1, size) if missing else values.view(-1, size)


def unpad_vector(values: Tensor, num_features: int) -> Tensor:
    """``[G, d]`` as ``[C]``: only the last group can be smaller, so the padding is at the end."""
    return values.flatten()[:num_features]
