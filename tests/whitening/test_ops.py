"""The torch.library contracts: schema, fake and real results agree."""

import pytest
import torch
from checks import correlated

from iternorm.whitening import ops

OPCHECKS = ("test_schema", "test_faketensor")


def inputs(shape, memory):
    x = correlated(*shape, dtype=torch.float32)
    if memory == "channels_last":
        return x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    if memory == "strided":
        return torch.stack([x, x], -1)[..., 0]
    return x


@pytest.mark.parametrize(
    ("shape", "memory"),
    [
        ((6, 10), "contiguous"),
        ((6, 10, 3), "strided"),
        ((6, 10, 3, 3), "contiguous"),
        ((6, 10, 3, 3), "channels_last"),
        ((6, 10, 3, 3), "strided"),
        ((6, 10, 2, 3, 2), "channels_last"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_keep_their_contracts(shape, memory, dtype):
    x, grad = inputs(shape, memory).to(dtype), inputs(shape, "contiguous").to(dtype)
    mean, offset = torch.randn(2, 10)
    matrix = torch.randn(3, 4, 4)
    namespace = torch.ops.iternorm
    for op, args in (
        (namespace.moments, (x, 4)),
        (namespace.cross_moments, (grad, x, mean, 4)),
        (namespace.affine, (x, matrix, offset, 4)),
        (namespace.affine_pair, (grad, x, matrix, matrix, offset, 4)),
    ):
        torch.library.opcheck(op.default, args, test_utils=OPCHECKS)


def test_operators_and_plain_functions_are_the_same_code():
    x = correlated(6, 10, 3, 3)
    for direct, dispatched in zip(ops._moments_op._init_fn(x, 4), torch.ops.iternorm.moments(x, 4), strict=True):
        torch.testing.assert_close(direct, dispatched, rtol=0, atol=0)
