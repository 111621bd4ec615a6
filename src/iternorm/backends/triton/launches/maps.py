"""The launches that apply matrices to an activation: in eval, and in training of groups above 64 channels.

Matrices of up to 128x128 stay on chip. Larger ones are applied block by block, and prepared by a launch before that.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from triton import OutOfResources

from iternorm.backends.triton.device.apply import apply_backward, apply_forward
from iternorm.backends.triton.device.wide.apply import wide_apply, wide_apply_backward
from iternorm.backends.triton.device.wide.operands import backward_operands, forward_operands
from iternorm.backends.triton.layout import LARGEST_TILE
from iternorm.backends.triton.precision import Split
from iternorm.backends.triton.runtime import Launch

if TYPE_CHECKING:
    from iternorm.backends.triton.plan import Plan

# Rows of a matrix that a program prepares.
_ROWS = 4


class Maps:
    """Such launches of a plan."""

    def __init__(self, plan: "Plan"):
        self._plan = plan
        layout, split = plan.layout, plan.key.split
        # Matrices of 128x128 in three parts ask for more shared memory than there is.
        self._must_be_blocks = layout.wide or (layout.padded == LARGEST_TILE and split == Split.THREE_PARTS)
        # What prepared matrices are in.
        self.operand = torch.bfloat16 if split == Split.ONE_PART else torch.float32

    @property
    def makers(self) -> dict[str, Callable[[], Launch]]:
        """What makes each launch."""
        return {
            "apply": self._apply,
            "apply_backward": self._apply_backward,
            "operands": self._operands,
            "backward_operands": self._backward_operands,
        }

    def in_blocks(self, name: str) -> bool:
        """Whether a launch applies matrices block by block, as `operands` or `backward_operands` prepares them."""
        return self._plan.launches[name].kernel in (wide_apply, wide_apply_backward)

    def _apply(self) -> Launch:
        plan, fp32 = self._plan, torch.float32
        dtype, weight, bias = plan.key.dtype, plan.key.weight, plan.key.bias
        constants = {"WEIGHT": weight is not None, "AFTER": plan.after}
        activations = (dtype, dtype, plan.residual)
        if not self._must_be_blocks:
            whole = {**constants, "BIAS": bias is not None}
            launch = self._whole("apply", apply_forward, (*activations, fp32, fp32, weight, bias), whole)
            if launch is not None:
                return launch
        return self._by_block("apply", wide_apply, (*activations, self.operand, fp32, weight, fp32), constants)

    def _apply_backward(self) -> Launch:
        plan, fp32 = self._plan, torch.float32
        dtype, weight, masks = plan.key.dtype, plan.key.weight, plan.masks
        activations = (dtype, dtype, dtype if masks else None, dtype)
        if not self._must_be_blocks:
            whole = {"RELU": masks, "WEIGHT": weight is not None}
            launch = self._whole("apply_backward", apply_backward, (*activations, *(fp32,) * 4, weight), whole)
            if launch is not None:
                return launch
        pointers = (*activations, self.operand, self.operand, fp32, fp32)
        return self._by_block("apply_backward", wide_apply_backward, pointers, {"RELU": masks})

    def _whole(self, name: str, function, pointers: tuple, constants: dict[str, Any]) -> Launch | None:
        """A kernel that has the matrices on chip; None if the GPU has no room for matrices of 128x128."""
        try:
            return self._plan.passes(name, function, pointers, constants)
        except OutOfResources:
            if self._plan.layout.padded < LARGEST_TILE:
                raise
            return None

    def _by_block(self, name: str, function, pointers: tuple, constants: dict[str, Any]) -> Launch:
        blocks = self._plan.layout.padded // self._plan.tiles_of(name).block
        return self._plan.passes(name, function, pointers, constants, blocks=blocks)

    def _operands(self) -> Launch:
        weight, bias, fp32 = self._plan.key.weight, self._plan.key.bias, torch.float32
        pointers = (fp32, fp32, weight, bias, self.operand, fp32)
        constants = {"WEIGHT": weight is not None, "BIAS": bias is not None}
        return self._prepares("apply", forward_operands, pointers, (), constants)

    def _backward_operands(self) -> Launch:
        weight, fp32 = self._plan.key.weight, torch.float32
        pointers = (*(fp32,) * 4, weight, self.operand, self.operand, fp32)
        samples = self._plan.layout.samples
        return self._prepares("apply_backward", backward_operands, pointers, (samples,), {"WEIGHT": weight is not None})

    def _prepares(self, name: str, function, pointers: tuple, integers: tuple[int, ...], constants: dict) -> Launch:
        """Matrices for the launch of this name: a few rows to a program, all columns."""
        plan, layout = self._plan, self._plan.layout
        columns = 1 << (layout.padded - 1).bit_length()
        words = {"TILE": plan.launches[name].constants["TILE"], **constants, "ROWS": _ROWS, "COLUMNS": columns}
        grid, integers = (layout.padded // _ROWS, layout.num_groups), (*integers, layout.channels)
        return Launch(function, grid, pointers, (), integers, (len(integers) - 1,), words, 4, plan.key.device)
