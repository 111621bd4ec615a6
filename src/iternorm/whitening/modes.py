"""What else is looking at a call: a compiler, a dispatch mode, a function transform, a trace.

An eager call goes straight to the functions that compute. A recorded one goes through the dispatcher, whose operators a
graph, a fake tensor or a FLOP counter understands. A transformed one is made of ordinary operators alone, which
`torch.func` and forward-mode differentiation can take apart and `torch.jit.trace` can save.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_TENSORS = (Tensor, nn.Parameter)


def is_transformed() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jvp, ...), forward-mode differentiation or a trace is active."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return is_traced()


def is_traced() -> bool:
    """Whether `torch.jit.trace`, or something that stands on it, records this call."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def is_recorded(*tensors: Tensor) -> bool:
    """Whether operators are looked at one by one: by a compiler, a dispatch mode, or a subclass such as FakeTensor."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return any(type(tensor) not in _TENSORS for tensor in tensors)


def wants_graph(grad: Tensor) -> bool:
    """Asked in a backward: whether its result is differentiated once more, or `grad` is many gradients at once."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or is_transformed() or is_batched(grad)


def is_batched(grad: Tensor) -> bool:
    """Whether it stands for many gradients: ``is_grads_batched=True`` is no transform of `torch.func`."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)  # pyright: ignore[reportAttributeAccessIssue]


def apply_without_transforms(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` less what serves function transforms. Its first tensor is to be `unwrapped`."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def unwrapped(x: Tensor) -> Tensor:
    """The tensor itself, where a function transform that has ended left a wrapper around it."""
    return torch._C._functorch.unwrap_if_dead(x)  # pyright: ignore[reportAttributeAccessIssue]


def constant_in_graphs(function):
    """Called while a graph is made, not traced into it: `torch.compiler.assume_constant_result` less its imports."""
    function._dynamo_marked_constant = True
    return function


def is_mapped(x: Tensor) -> bool:
    """Whether vmap maps over `x`, which then has no memory format to ask for."""
    if not torch._C._are_functorch_transforms_active():
        return False
    return torch._C._functorch.is_batchedtensor(x)  # pyright: ignore[reportAttributeAccessIssue]


def is_exporting() -> bool:
    """Whether `torch.export` records this call."""
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_exporting() if hasattr(torch.compiler, "is_exporting") else is_exporting_in_torch_2_6()


@constant_in_graphs
def is_exporting_in_torch_2_6() -> bool:
    """Whether torch 2.6 exports this call. Later versions answer by themselves, and need no special treatment."""
    if hasattr(torch.compiler, "is_exporting"):
        return False
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().export
