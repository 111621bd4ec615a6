"""The launches before and after the collectives of a synchronized layer: `device/exchange.py` has the kernels.

A program has a row of a group's matrix each, and goes over its columns.
"""

from collections.abc import Callable
from typing import Any

import torch

from iternorm.backends.triton.device.exchange import merge, sent_weight_gradient, unpack
from iternorm.backends.triton.layout import BLOCK, Layout
from iternorm.backends.triton.runtime import Launch


class Exchange:
    """Launches for the moments of one layer, and the sizes of what is sent.

    Args:
        layout: of the activation.
        ranks: how many exchange moments.
        counts: whether batches are counted.
        device: where the launches run.
    """

    def __init__(self, layout: Layout, ranks: int, counts: bool, device: torch.device):
        self._layout, self._ranks, self._counts, self._device = layout, ranks, counts, device
        # The numbers that are sent backward; forward a count comes first.
        self.sums = layout.channels + layout.num_groups * layout.group_size**2
        # Two vectors at the end of a backward's workspace, the summed gradient and a gradient of the weight that nobody
        # wants. Each begins at 16 bytes.
        self.vectors = 2 * (-(-layout.channels // 4) * 4)

    @property
    def makers(self) -> dict[str, Callable[[], Launch]]:
        return {"merge": self._merge, "unpack": self._unpack, "sent_weight_gradient": self._sent_weight_gradient}

    def _merge(self) -> Launch:
        layout, fp32 = self._layout, torch.float32
        # As many ranks at a time as a program has registers for.
        together = min(1 << (self._ranks - 1).bit_length(), 4096 // self._block)
        constants = {"BD": layout.padded, "PB": together, "COUNT": self._counts}
        pointers = (*(fp32,) * 4, torch.int64 if self._counts else None, torch.int64)
        integers = (layout.channels, self._ranks)
        return self._launch(merge, layout.padded, pointers, integers, (0,), constants, False)

    def _unpack(self) -> Launch:
        layout, fp32 = self._layout, torch.float32
        pointers, integers = (fp32, torch.int64, fp32, fp32), (layout.samples, layout.channels)
        return self._launch(unpack, layout.padded, pointers, integers, (1,), {"BD": layout.padded}, False)

    def _sent_weight_gradient(self) -> Launch:
        layout, pointers = self._layout, (torch.float32,) * 3
        return self._launch(sent_weight_gradient, layout.group_size, pointers, (layout.channels,), (0,), {}, True)

    def _launch(self, kernel, rows, pointers, integers, specialized, constants: dict[str, Any], dependent) -> Launch:
        """What follows a collective is not a dependent launch: the launch before it is not one of ours."""
        constants = {"D": self._layout.group_size, **constants, "BC": self._block}
        grid = (rows, self._layout.num_groups)
        return Launch(kernel, grid, pointers, (), integers, specialized, constants, 4, self._device, dependent)

    @property
    def _block(self) -> int:
        """The columns that a program has at a time."""
        return BLOCK if self._layout.wide else self._layout.padded
