"""The torch.library contracts: schema, fake and real results agree."""

import pytest
import torch
from checks import correlated
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from iternorm import functional, reference

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


def test_operators_are_called_only_where_calls_are_recorded():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def whitened():
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            y = functional.iter_norm(x, training=True, group_size=4, impl="torch")
        torch.testing.assert_close(y, expected)
        return {event.name for event in recorded.events() if event.name.startswith("iternorm::")}

    x = correlated(6, 10, 3, 3)
    expected = reference.iter_norm(x, group_size=4)
    assert whitened() == set()
    with Recorder():
        assert whitened() == {"iternorm::moments", "iternorm::affine"}
    assert {torch.ops.iternorm.moments.default, torch.ops.iternorm.affine.default} <= set(seen)
