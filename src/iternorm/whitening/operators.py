"""The verbs as torch.library operators: a schema and a fake for each, so that graphs can hold them.

An eager call goes straight to the function of an operator. The dispatcher is asked only where a compiler, a dispatch
mode or a fake tensor looks at each call.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import dispatch, groups, modes
from iternorm.whitening.graphs import flops


def call(op, *args):
    """An operator in eager mode is its Python function: the dispatcher is needed only where calls are recorded."""
    if not modes.is_recorded(args[0]):
        return op._init_fn(*args)
    flops.announce()
    return op(*args)


def no_autocast(x: Tensor):
    """Autocast would turn the products of fp32 statistics into half precision."""
    # The meta device knows no autocast.
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


def matrices_like(x: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Memory for a matrix a group, ``[G, d, d]``."""
    size = groups.effective_size(x.shape[1], group_size)
    return x.new_empty(groups.num_groups(x.shape[1], group_size), size, size, dtype=dtype)


@torch.library.custom_op("iternorm::moments", mutates_args=())
def moments(x: Tensor, group_size: int, impl: str = "torch") -> tuple[Tensor, Tensor]:
    """The verb `moments` of a backend as an operator."""
    with no_autocast(x):
        return dispatch.verbs_for(impl, group_size, x).moments(x, group_size)


@moments.register_fake
def _(x, group_size, impl="torch"):
    dtype = torch_verbs.compute_dtype(x.dtype)
    return x.new_empty(x.shape[1], dtype=dtype), matrices_like(x, group_size, dtype)


@torch.library.custom_op("iternorm::cross_moments", mutates_args=())
def cross_moments(grad: Tensor, x: Tensor, mean: Tensor, group_size: int, impl: str = "torch") -> tuple[Tensor, Tensor]:
    """The verb `cross_moments` of a backend as an operator."""
    with no_autocast(x):
        return dispatch.verbs_for(impl, group_size, grad, x).cross_moments(grad, x, mean, group_size)


@cross_moments.register_fake
def _(grad, x, mean, group_size, impl="torch"):
    return torch.empty_like(mean), matrices_like(x, group_size, mean.dtype)


@torch.library.custom_op("iternorm::affine", mutates_args=())
def apply(x: Tensor, matrix: Tensor, offset: Tensor, group_size: int, impl: str = "torch") -> Tensor:
    """The verb `apply` of a backend as an operator."""
    with no_autocast(x):
        return dispatch.verbs_for(impl, group_size, x).apply(x, matrix, offset, group_size)


@apply.register_fake
def _(x, matrix, offset, group_size, impl="torch"):
    return torch_verbs.empty_output(x)


@torch.library.custom_op("iternorm::affine_pair", mutates_args=())
def apply_backward(
    grad: Tensor, x: Tensor, first: Tensor, second: Tensor, offset: Tensor, group_size: int, impl: str = "torch"
) -> Tensor:
    """The verb `apply_backward` of a backend as an operator."""
    with no_autocast(x):
        return dispatch.verbs_for(impl, group_size, grad, x).apply_backward(grad, x, first, second, offset, group_size)


@apply_backward.register_fake
def _(grad, x, first, second, offset, group_size, impl="torch"):
    return torch_verbs.empty_output(x)
