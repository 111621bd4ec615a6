"""Roots of matrices, moments of a stream and whitening of samples on a GPU: what is timed, and against what."""

import math
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from iternorm.timing.gpu.cases import CudaCandidate, Shape
from iternorm.timing.gpu.clock import Gpu, reason
from iternorm.timing.gpu.comparison import run_case
from iternorm.timing.turns import in_turns

ROOTS = tuple((shape, p) for shape in ((64, 256, 256), (16, 1024, 1024)) for p in (2, 4))
STREAMS = ((2**20, 64), (2**20, 128), (2**22, 64), (2**22, 128))
LAYERS: tuple[Shape, ...] = ((64, 64, 32, 32), (256, 64, 32, 32), (64, 256, 32, 32))
CONDITION = 1e3
OURS, EIGH, SHAMPOO, CANS = "inverse_root", "torch.linalg.eigh", "Shampoo's Newton", "Emerging-Optimizers"
READ, PARTIAL_FIT = "x.sum()", "Whitener.partial_fit"
ITER_NORM = "IterNorm2d"
PER_SAMPLE = ("GroupWhitening2d", "InstanceWhitening2d")
# A folder with the packages distributed_shampoo (facebookresearch/optimizers) and emerging_optimizers (NVIDIA-NeMo).
FOREIGN = "ITERNORM_FOREIGN"
# Steps in one timing, and timings of what is slow.
STEPS, SLOW_STEPS, SLOW_ROUNDS = 10, 1, 3


def run_roots(shape: tuple[int, int, int], p: int, gpu: Gpu, rounds: int) -> dict:
    """Time the inverse p-th root of matrices of condition number 1000, in fp32 without TF32, and measure its error."""
    matrices = matrices_of(shape, gpu.device)
    exact = by_eigh(matrices.double(), p)
    rows = []
    candidates = {OURS: partial(_ours, p=p), EIGH: partial(by_eigh, p=p), **foreign_roots(p)}
    for name, function in candidates.items():
        row = new_row(name, slow=name not in (OURS, CANS))
        rows.append(row)
        row["step"] = partial(function, matrices)
        try:
            root = row["step"]()
            row["error"] = float((root.double() - exact).norm() / exact.norm())
        except Exception as error:
            row["failed"] = reason(error)
    time_rows(rows, gpu, rounds)
    return {"shape": list(shape), "p": p, "condition": CONDITION, "rows": _with_ratios(rows, OURS)}


def run_stream(shape: tuple[int, int], gpu: Gpu, rounds: int, copy_gb_per_s: float) -> dict:
    """Time a batch of a stream against one read of it. A whitener has seen a batch before, so it merges."""
    from iternorm.whitener.estimator import Whitener

    generator = torch.Generator(gpu.device).manual_seed(0)
    x = torch.randn(shape, device=gpu.device, generator=generator)
    whitener = Whitener()
    rows = [new_row(READ), new_row(PARTIAL_FIT)]
    rows[0]["step"], rows[1]["step"] = partial(torch.sum, x), partial(whitener.partial_fit, x)
    time_rows(rows, gpu, rounds)
    # A copy reads and writes: its bandwidth counts both.
    read_ms = x.numel() * x.element_size() / copy_gb_per_s / 1e6
    for row in rows:
        row["ratio_to_memory"] = None if row["step_ms"] is None else row["step_ms"] / read_ms
    return {"shape": list(shape), "dtype": "float32", "read_ms": read_ms, "rows": _with_ratios(rows, READ)}


def run_layers(shape: Shape, dtype: torch.dtype, gpu: Gpu, rounds: int, copy_gb_per_s: float) -> dict:
    """Time forward and backward of the layers over a sample and of IterNorm2d, in both layouts."""
    from iternorm.layers import norms, per_sample

    makers = {ITER_NORM: norms.IterNorm2d, **{name: getattr(per_sample, name) for name in PER_SAMPLE}}
    candidates = [CudaCandidate(name, partial(make, shape[1]), exact=True) for name, make in makers.items()]
    return run_case(shape, dtype, candidates, gpu, copy_gb_per_s, rounds)


def matrices_of(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Symmetric matrices with eigenvalues from 1 / CONDITION to 1 in random directions, rounded to fp32."""
    generator = torch.Generator(device).manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(shape, device=device, dtype=torch.float64, generator=generator))[0]
    eigenvalues = torch.logspace(-math.log10(CONDITION), 0, shape[-1], device=device, dtype=torch.float64)
    matrices = (vectors * eigenvalues) @ vectors.mT
    return ((matrices + matrices.mT) / 2).float()


def by_eigh(matrices: Tensor, p: int) -> Tensor:
    """The inverse root as everybody writes it."""
    eigenvalues, vectors = torch.linalg.eigh(matrices)
    return (vectors * eigenvalues.pow(-1 / p)[..., None, :]) @ vectors.mT


def _ours(matrices: Tensor, p: int) -> Tensor:
    from iternorm.linalg import inverse_root

    return inverse_root(matrices, p)


def foreign_roots(p: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The inverse roots of others, where the folder that `FOREIGN` names has their packages."""
    folder = os.environ.get(FOREIGN)
    if not folder:
        return {}
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found: dict[str, Callable[[Tensor], Tensor]] = {SHAMPOO: partial(_shampoo, p=p)}
    if p == 2:
        found[CANS] = _cans
    return found


def _shampoo(matrices: Tensor, p: int) -> Tensor:
    from fractions import Fraction

    from distributed_shampoo.preconditioner import matrix_functions  # pyright: ignore[reportMissingImports]
    from distributed_shampoo.preconditioner.matrix_functions_types import (  # pyright: ignore[reportMissingImports]
        CoupledNewtonConfig,
    )

    config = CoupledNewtonConfig()
    return torch.stack([matrix_functions.matrix_inverse_root(matrix, Fraction(p), config) for matrix in matrices])


def _cans(matrices: Tensor) -> Tensor:
    from emerging_optimizers.legacy_soap import matrix_root_inverse_utils  # pyright: ignore[reportMissingImports]

    return matrix_root_inverse_utils.mat_root_inv_via_scaled_cans(matrices)


def new_row(name: str, slow: bool = False) -> dict[str, Any]:
    """A row that `time_rows` fills; it wants a `step`."""
    return {"name": name, "slow": slow, "failed": None, "error": None, "samples_ms": []}


def time_rows(rows: list[dict], gpu: Gpu, rounds: int) -> None:
    """Time the `step` of each row in turns, and replace it by the median."""
    for index, row in in_turns(rows, rounds, warmup=1):
        if row["failed"] is not None or (row["slow"] and not 0 <= index < SLOW_ROUNDS):
            continue
        try:
            elapsed = gpu.eager_ms(row["step"], SLOW_STEPS if row["slow"] else STEPS)
        except Exception as error:
            row["failed"] = reason(error)
            continue
        if index >= 0:
            row["samples_ms"].append(elapsed)
    for row in rows:
        del row["step"], row["slow"]
        row["step_ms"] = statistics.median(row["samples_ms"]) if row["samples_ms"] else None


def _with_ratios(rows: list[dict], name: str) -> list[dict]:
    """The rows with their time in units of that of a named one."""
    base = next(row["step_ms"] for row in rows if row["name"] == name)
    for row in rows:
        row["ratio"] = None if base is None or row["step_ms"] is None else row["step_ms"] / base
    return rows
