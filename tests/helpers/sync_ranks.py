"""One rank of the synchronization tests: `python sync_ranks.py SCENARIO RANK WORLD_SIZE FOLDER`.

Every rank runs the same cases in the same order and saves what it got; tests/layers/test_sync.py compares that with one
process on the concatenated batch. A start of gloo takes seconds, so one start serves many cases.
"""

import copy
import datetime as dt
import os
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import iternorm
from iternorm.whitening.processes import collective


@dataclass(frozen=True)
class Case:
    """A layer and the batches of the ranks: `counts` samples of `shape` each."""

    counts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    words: dict = field(default_factory=dict)
    mean: float = 0.5
    steps: int = 2
    layer: str = "IterNorm"


CASES = {
    "ragged groups": Case((5, 3, 4), (10, 3, 2), words={"group_size": 4}),
    "empty rank": Case((5, 0, 1), (6,), words={"group_size": 3, "momentum": None}),
    "first rank empty": Case((0, 4, 3), (5, 2), words={"group_size": None}),
    "running covariance": Case((2, 3, 4), (6, 2, 2, 2), words={"group_size": 4, "running": "covariance"}),
    "no affine, no statistics": Case((2, 2, 2), (6, 4), words={"affine": False, "track_running_stats": False}),
    "fp32": Case((16, 9, 7), (12, 4, 4), torch.float32, {"group_size": 8}),
    "fp32, large mean": Case((16, 9, 7), (12, 4, 4), torch.float32, {"group_size": 8}, mean=1000.0),
    "correction and shrinkage": Case((5, 3, 4), (6, 3), words={"group_size": 4, "correction": 1, "shrinkage": 0.1}),
    "zca": Case((5, 3, 4), (10, 3, 2), words={"group_size": 4}, layer="DecorrelatedBatchNorm"),
    "cholesky, W-MSE": Case(
        (7, 0, 9),
        (6,),
        words={"group_size": None, "solver": "cholesky", "eps": 0.0, "correction": 1, "running": "covariance"},
        layer="DecorrelatedBatchNorm",
    ),
    "pca": Case(
        (9, 8, 7),
        (6, 2),
        words={"solver": "pca", "running": "covariance", "shrinkage": 0.2},
        layer="DecorrelatedBatchNorm",
    ),
    "fp32, large mean, empty rank": Case((0, 20, 12), (12, 4, 4), torch.float32, {"group_size": 8}, mean=1000.0),
}


COMPILED = ("ragged groups", "empty rank", "cholesky, W-MSE")


def synchronized(case: Case):
    return prepared(getattr(iternorm, f"Sync{case.layer}")(case.shape[0], dtype=case.dtype, **case.words))


def batches(case: Case):
    """For each step the inputs of all ranks concatenated, and the gradients of their outputs."""
    generator = torch.Generator().manual_seed(7)
    channels = case.shape[0]
    mix = torch.randn(channels, channels, generator=generator, dtype=torch.float64) / channels**0.5 + torch.eye(
        channels
    )
    shape = (sum(case.counts), *case.shape)
    for _ in range(case.steps):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = torch.einsum("ij,nj...->ni...", mix, x) + case.mean
        yield x.to(case.dtype), torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)


def prepared(layer):
    """The layer with a scale and a shift that are not 1 and 0."""
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 1.5, layer.num_features))
            layer.bias.copy_(torch.linspace(-1, 1, layer.num_features))
    return layer


def run_steps(layer, inputs, forward=None):
    """Outputs and gradients by step, and the buffers at the end."""
    results = []
    for x, grad in inputs:
        x = x.clone().requires_grad_()
        y = (layer if forward is None else forward)(x)
        layer.zero_grad()
        y.backward(grad)
        results.append({"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    return results, {name: b.clone() for name, b in layer.named_buffers()}


def own(case: Case, rank: int):
    start = sum(case.counts[:rank])
    return [(x[start : start + case.counts[rank]], g[start : start + case.counts[rank]]) for x, g in batches(case)]


class CountCollectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def error_of(function, *args) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 3))
    return iternorm.convert_sync_iternorm(iternorm.convert_batchnorm(model.double(), group_size=4))


def network_batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(12, 3, 6, 6, generator=generator, dtype=torch.float64)


def everything(rank: int, size: int) -> dict:
    results: dict = {}
    for name, case in CASES.items():
        results[name] = run_steps(synchronized(case), own(case, rank))

    for name in COMPILED:
        results["compiled", name] = compiled(CASES[name], rank)
    case = CASES["ragged groups"]
    results["collectives"] = collectives(case, rank)
    # As on a GPU, where gloo cannot gather.
    with mock.patch.object(collective, "gathers_by_sum", return_value=True):
        results["gathered by a sum"] = run_steps(synchronized(case), own(case, rank))

    # Ranks 0 and 1 are one group, rank 2 is alone in another.
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    layer = iternorm.SyncIterNorm(10, process_group=pair if rank < 2 else alone, dtype=case.dtype, group_size=4)
    results["subgroup"] = run_steps(prepared(copy.deepcopy(layer)), own(case, rank))

    layer = iternorm.SyncIterNorm(5 if rank == 2 else 6)
    results["disagree"] = error_of(layer, torch.randn(4, 5 if rank == 2 else 6))
    results["disagree, input"] = error_of(iternorm.SyncIterNorm(6), torch.randn(4, 5 if rank == 1 else 6))
    kind = iternorm.SyncDecorrelatedBatchNorm
    results["disagree, solver"] = error_of(kind(6, solver="pca" if rank else "zca"), torch.randn(40, 6))
    layer = iternorm.SyncIterNorm(6, group_size=3 if rank else 2)
    results["disagree, group_size"] = error_of(layer, torch.randn(40, 6))
    layer = iternorm.SyncIterNorm(6, num_iters=6 if rank else 5)
    results["disagree, num_iters"] = error_of(layer, torch.randn(40, 6))
    x = torch.randn(40, 6, dtype=torch.float64 if rank else torch.float32)
    results["disagree, fp64"] = error_of(iternorm.SyncIterNorm(6), x)
    # Ranks that agreed in one group are asked once more in another.
    layer = iternorm.SyncIterNorm(6)
    layer(torch.randn(4, 6))
    layer.num_iters, layer.process_group = 5 + rank, dist.new_group([0, 1, 2])
    results["disagree, in another group"] = error_of(layer, torch.randn(4, 6))
    torch.manual_seed(rank)
    layer = kind(6, group_size=2, track_running_stats=False, shuffle=True)
    results["shuffled"] = [(x, layer(x).detach()) for x in torch.randn(4, 40, 6)]
    results["one value"] = error_of(iternorm.SyncIterNorm(6), torch.randn(int(rank == 0), 6))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Each rank has fewer values than a group has channels; all ranks together have enough.
        iternorm.SyncIterNorm(8)(torch.randn(6, 8))
    results["warnings of a small part"] = [str(warning.message) for warning in caught]

    layer = iternorm.SyncIterNorm(6)
    y = layer(torch.randn(4, 6, requires_grad=True))
    results["second derivative"] = error_of(
        lambda: torch.autograd.grad(y.sum(), [*layer.parameters()], create_graph=True)
    )

    model = nn.parallel.DistributedDataParallel(network())
    share = network_batch().split([6, 4, 2])[rank]
    model(share).square().sum().backward()
    results["ddp"] = {name: p.grad for name, p in model.module.named_parameters()}

    layer = iternorm.SyncIterNorm(10, group_size=4, dtype=case.dtype)
    iternorm.recalibrate(layer, [x for x, _ in own(case, rank)], progress=False)
    results["recalibrated"] = layer.state_dict()
    # No batch reaches the last layer. SyncBatchNorm itself runs on GPUs only.
    reached, inputs = nn.SyncBatchNorm(10, dtype=case.dtype), [x for x, _ in own(case, rank)]
    mixed = nn.ModuleList([reached, iternorm.SyncIterNorm(10)])
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(nn.SyncBatchNorm, "forward", lambda _, x: x):
        warnings.simplefilter("always")
        iternorm.recalibrate(mixed, inputs, forward=lambda _, x: reached(x), progress=False)
    results["recalibrated, mixed"] = reached.state_dict(), [str(warning.message) for warning in caught]

    # torch 2.6 shards on GPUs only.
    if hasattr(torch.cpu.Stream, "record_event"):
        results["fsdp"] = sharded(share, size)
    return results


def compiled(case: Case, rank: int):
    layer = synchronized(case)
    # The default backend without its code generator, which takes most of a minute on three ranks: the partitioner is
    # the same, and decides in which pass a collective runs.
    return run_steps(layer, own(case, rank), torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition"))


def collectives(case: Case, rank: int) -> dict[str, list[str]]:
    layer = iternorm.SyncIterNorm(case.shape[0], dtype=case.dtype, **case.words)
    (x, grad), *_ = own(case, rank)
    layer(x)
    x = x.clone().requires_grad_()
    with CountCollectives() as forward:
        y = layer(x)
    with CountCollectives() as backward:
        y.backward(grad)
    layer.eval()
    with CountCollectives() as evaluation:
        layer(x)
    return {"forward": forward.names, "backward": backward.names, "eval": evaluation.names}


def sharded(share, size: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model(share).square().sum().backward()
    gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in gradients.items()}


def broken(rank: int, size: int) -> dict:
    """Rank 1 dies, rank 2 stops answering; rank 0 says what it got and after how long."""
    limit = dt.timedelta(seconds=4)
    dead, silent = dist.new_group([0, 1], timeout=limit), dist.new_group([0, 2], timeout=limit)
    x = torch.randn(4, 6)
    dist.barrier()
    if rank == 1:
        os._exit(1)
    if rank == 2:
        time.sleep(30)
        os._exit(1)
    results = {}
    for name, group in (("dead", dead), ("silent", silent)):
        layer = iternorm.SyncIterNorm(6, process_group=group)
        start = time.monotonic()
        results[name] = error_of(layer, x), time.monotonic() - start
    return results


def kernels(rank: int, size: int) -> dict:
    import sync_kernels

    if not torch.cuda.is_available():
        import interpreter

        interpreter.patch_once()
    return sync_kernels.everything(rank)


def large_kernels(rank: int, size: int) -> dict:
    import sync_kernels

    return sync_kernels.steps_of(sync_kernels.LARGE, rank)


SCENARIOS = {
    "everything": (everything, 120),
    "broken": (broken, 60),
    "kernels": (kernels, 300),
    "large kernels": (large_kernels, 600),
}


def main() -> None:
    scenario, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    function, seconds = SCENARIOS[scenario]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=dt.timedelta(seconds=seconds),
    )
    torch.save(function(rank, size), folder / f"{rank}.pt")
    if scenario != "broken":
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(0)


if __name__ == "__main__":
    main()
