"""What several test files measure: data with a known spectrum, errors, peak memory, the state of a layer."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from iternorm import DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d, IterNorm3d
from iternorm.whitening import dispatch

# Shapes on both sides of every choice that the verbs on the CPU make: planes longer and shorter than a group, ragged
# groups, odd sizes, one sample, one position, two dimensions; (shape, group_size).
SHAPES = [
    ((6, 8, 5, 5), 4),
    ((6, 10, 5, 5), 4),
    ((3, 70, 9, 9), 64),
    ((3, 70, 2, 2), 64),
    ((7, 65, 9, 9), 65),
    ((1, 8, 9, 9), 4),
    ((9, 8, 1, 1), 3),
    ((33, 12), 5),
    ((33, 12), 12),
    ((5, 6, 7), 6),
    ((2, 6, 3, 4, 5), 4),
    ((4, 1, 3, 3), 1),
    ((6, 9, 5, 5), 1),
    ((6, 9, 5, 5), 4),
]


def skip_without_kernels() -> None:
    """Skip a test where the Triton kernels run neither on a GPU nor in Triton's interpreter."""
    if dispatch.NO_TRITON:
        pytest.skip(dispatch.NO_TRITON)
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")


def covariance_with(eigenvalues: Tensor, *batch: int) -> Tensor:
    """Random symmetric matrices ``[*batch, d, d]`` with the given eigenvalues."""
    size = len(eigenvalues)
    vectors = torch.linalg.qr(torch.randn(*batch, size, size, dtype=eigenvalues.dtype))[0]
    matrix = vectors @ (eigenvalues[:, None] * vectors.mT)
    return (matrix + matrix.mT) / 2


def correlated(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random activation ``[N, C, ...]`` whose channels are mixed and have means of their own."""
    x = torch.randn(*shape, dtype=torch.float64)
    channels = shape[1]
    mixing = torch.eye(channels, dtype=torch.float64) + 0.5 * torch.randn(channels, channels, dtype=torch.float64) / (
        channels**0.5
    )
    mean = torch.randn(channels, dtype=torch.float64).view(1, -1, *(1,) * (len(shape) - 2))
    return (torch.einsum("ij,nj...->ni...", mixing, x) + mean).to(dtype).contiguous()


def channels_last(x: Tensor) -> Tensor:
    """The activation in channels_last memory, of four or five dimensions."""
    return x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.ndim])


def layer_for(shape: tuple[int, ...], **arguments):
    """An IterNorm in Triton's kernels for an activation of this shape, with random parameters."""
    rank = {2: IterNorm1d, 3: IterNorm1d, 4: IterNorm2d, 5: IterNorm3d}[len(shape)]
    layer = rank(shape[1], **{"impl": "triton", **arguments})
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.normal_(layer.bias)
    return layer


def orders_of(channels: Sequence[int], group_size: int) -> Iterator[list[int]]:
    """Orders of the channels, such that all ways to put them into groups occur."""
    if len(channels) <= group_size:
        yield list(channels)
        return
    for group in itertools.combinations(channels, group_size):
        others = [channel for channel in channels if channel not in group]
        yield from ([*group, *order] for order in orders_of(others, group_size))


def groups_between(x: Tensor, y: Tensor, layer: nn.Module, group_size: int) -> frozenset[frozenset[int]] | None:
    """The groups of channels in which the layer makes y ``[N, C]`` of x, or None if there are none."""
    for order in orders_of(range(x.shape[1]), group_size):
        if torch.allclose(layer(x[:, order]), y[:, order], rtol=1e-4, atol=1e-5):
            return frozenset(frozenset(order[i : i + group_size]) for i in range(0, len(order), group_size))
    return None


def samples_of(x: Tensor) -> Tensor:
    """``[N, C, ...]`` as ``[C, m]``."""
    return x.transpose(0, 1).flatten(1)


def by_group(x, group_size):
    """Each group as ``[d, m]`` in fp64."""
    return [g.transpose(0, 1).flatten(1).double() for g in x.split(group_size, 1)]


def padded(matrices, size):
    """Matrices of up to ``[d, d]`` as ``[G, d, d]``, with zeros."""
    return torch.stack([torch.nn.functional.pad(m, (0, size - len(m), 0, size - len(m))) for m in matrices])


def covariance_of(x: Tensor) -> Tensor:
    """The biased covariance ``[C, C]`` of an activation."""
    centered = samples_of(x)
    centered = centered - centered.mean(1, keepdim=True)
    return centered @ centered.T / centered.shape[1]


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """‖actual - expected‖ / ‖expected‖ in fp64."""
    # A gradient or a statistic that is not there is an error of its own.
    assert actual is not None
    assert expected is not None
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN if one is: Python's `max` may pass it over."""
    return float(torch.tensor(list(errors)).max())


def layer_2d(solver, *args, **kwargs):
    """IterNorm for Newton's iteration, DBN for the exact solvers."""
    if solver == "newton":
        return IterNorm2d(*args, **kwargs)
    return DecorrelatedBatchNorm2d(*args, solver=solver, **kwargs)


def state_of(layer: nn.Module) -> dict[str, Tensor]:
    """A copy of parameters and buffers, to compare with later."""
    return {name: value.detach().clone() for name, value in layer.state_dict().items()}


def assert_same_state(layer: nn.Module, state: dict[str, Tensor]) -> None:
    now = layer.state_dict()
    assert now.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(now[name], value, rtol=0, atol=0, msg=f"{name} was changed")


def peak_bytes(function) -> int:
    """The largest amount of memory that the CPU allocator held during the call beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  (missing in torch's stub)
        peak = max(peak, held)
    del kept
    return peak


def ended_well(code: int, errors: str) -> bool:
    """Whether processes that torchrun started have done their work; what they did is for the test to look at.

    torch keeps a gloo group that DDP has used beyond `destroy_process_group`. A thread of it that lets go of a tensor
    while the interpreter goes down aborts the process, all work being done (seen once in about twenty runs on a busy
    machine; pytorch/pytorch#179291 describes it).
    """
    return code == 0 or "terminate called without an active exception" in errors
