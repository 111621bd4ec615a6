"""What a rank of the synchronization tests does with the Triton kernels: `sync_ranks.py kernels ...` runs it.

Without a GPU they run in Triton's interpreter, which the environment must ask for.
"""

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from sync_ranks import Case, CountCollectives, error_of, own, prepared, run_steps, synchronized

import iternorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = torch.float32


def case(counts, shape, mean=0.5, steps=2, layer="IterNorm", **words) -> Case:
    # Few steps of Newton: the interpreter is slow.
    few = {"num_iters": 2} if layer == "IterNorm" else {}
    return Case(counts, shape, FP32, {"impl": "triton", **few, **words}, mean, steps, layer)


CASES = {
    "ragged groups": case((5, 3, 4), (6, 3, 2), group_size=4),
    "empty rank": case((5, 0, 2), (6,), group_size=3, momentum=None),
    "first rank empty": case((0, 4, 3), (5, 2), group_size=None),
    "large mean, empty rank": case((0, 9, 7), (12, 3, 3), mean=1000.0, steps=1, group_size=8),
    "running covariance": case((2, 3, 4), (6, 2, 2, 2), steps=1, group_size=4, running="covariance"),
    "no affine, no statistics": case((2, 2, 2), (6, 4), steps=1, affine=False, track_running_stats=False),
    "a full tile": case((3, 4, 5), (16, 5, 3), steps=1, group_size=16),
    "zca": case((5, 3, 4), (6, 3, 2), steps=1, layer="DecorrelatedBatchNorm", group_size=4),
}
# Their matrices are large, minutes in the interpreter: for a GPU alone.
LARGE = {
    "above 64 channels": case((1, 0, 2), (70, 9, 9), steps=1, group_size=68),
    "wide": case((1, 0, 1), (140, 9, 9), steps=1, group_size=130),
}
COMPILED = ("empty rank",)
FROM_CPP = case((5, 3, 4), (6, 2, 2), group_size=4)
RESIDUAL = replace(CASES["ragged groups"], steps=1)


def steps_of(cases: dict[str, Case], rank: int) -> dict:
    return {name: run_steps(on_device(synchronized(c)), inputs(c, rank)) for name, c in cases.items()}


def everything(rank: int) -> dict:
    results: dict = steps_of(CASES, rank)
    for name in COMPILED:
        results["compiled", name] = compiled(CASES[name], rank)
    ragged = CASES["ragged groups"]
    # What the ranks send each other does not depend on what computes it.
    mixed = replace(ragged, words={**ragged.words, "impl": "torch" if rank == 1 else "triton"})
    results["another backend"] = run_steps(on_device(synchronized(mixed)), inputs(mixed, rank))
    for activation in (None, "relu"):
        results["residual", activation] = with_residual(RESIDUAL, rank, activation)
    if DEVICE == "cpu":
        for debugged in (False, True):
            results["from C++", debugged] = from_cpp(FROM_CPP, rank, debugged)
    results["collectives"] = collectives(ragged, rank)
    layer = iternorm.SyncIterNorm(6, impl="triton").to(DEVICE)
    results["one value"] = error_of(layer, torch.randn(int(rank == 0), 6, device=DEVICE))
    y = layer(torch.randn(4, 6, requires_grad=True, device=DEVICE))
    results["second derivative"] = error_of(
        lambda: torch.autograd.grad(y.sum(), [*layer.parameters()], create_graph=True)
    )
    parameters = list(layer.parameters())
    results["weight alone"] = torch.autograd.grad(layer(torch.randn(4, 6, device=DEVICE)).sum(), parameters)[1].cpu()
    results["refused"] = error_of(lambda: iternorm.SyncIterNorm(6, impl="reference"))
    return results


def on_device(layer):
    return layer.to(DEVICE)


def inputs(case: Case, rank: int):
    return [tuple(t.to(DEVICE) for t in pair) for pair in own(case, rank)]


def compiled(case: Case, rank: int):
    layer = on_device(synchronized(case))
    # As in `sync_ranks.compiled`: the partitioner decides in which pass a collective runs, without a code generator.
    run = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    return run_steps(layer, inputs(case, rank), run)


def residual_of(x: torch.Tensor) -> torch.Tensor:
    """Something of the same shape that is different for every sample."""
    return (3 * x).cos()


def with_residual(case: Case, rank: int, activation):
    """Steps of `relu(layer(x) + z)`, with the gradient of z too."""
    layer = prepared(iternorm.SyncIterNorm(case.shape[0], activation=activation, **case.words)).to(DEVICE)
    return residual_steps(layer, inputs(case, rank))


def residual_steps(layer, batches):
    results = []
    for x, grad in batches:
        x, z = x.clone().requires_grad_(), residual_of(x).requires_grad_()
        y = layer(x, residual=z)
        layer.zero_grad()
        y.backward(grad)
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"y": y.detach(), "x": x.grad, "z": z.grad, **gradients})
    return results, {name: b.clone() for name, b in layer.named_buffers()}


def from_cpp(case: Case, rank: int, debugged: bool):
    """Steps in a group of the user's, launched from C++ but for the first; and how many launches those were."""
    import pytest
    from driver import Driver
    from torch._C._distributed_c10d import DebugLevel, set_debug_level

    # As TORCH_DISTRIBUTED_DEBUG=DETAIL does. Functional collectives of torch 2.11 fail in such a group.
    set_debug_level(DebugLevel.DETAIL if debugged else DebugLevel.OFF)
    group = dist.new_group()
    set_debug_level(DebugLevel.OFF)
    with pytest.MonkeyPatch.context() as patch:
        driver = Driver(patch)
        layer = prepared(iternorm.SyncIterNorm(case.shape[0], process_group=group, **case.words))
        # What has to be copied before it is read is launched from Python.
        batches = [tuple(t.contiguous() for t in pair) for pair in inputs(case, rank)]
        return run_steps(layer, batches), len(driver.launched)


def collectives(case: Case, rank: int) -> dict[str, list[str]]:
    layer = on_device(synchronized(case))
    (x, grad), *_ = inputs(case, rank)
    layer(x)
    x = x.clone().requires_grad_()
    with CountCollectives() as forward:
        y = copy.deepcopy(layer)(x)
    with CountCollectives() as backward:
        y.backward(grad)
    return {"forward": forward.names, "backward": backward.names}
