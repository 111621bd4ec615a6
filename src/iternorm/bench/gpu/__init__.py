r"""The benchmark on a GPU: layers as CUDA graphs and eagerly, a training step, the targets. See benchmarks/README.md.

result = run()              # a dictionary that json.dumps takes; a few minutes
print("\n".join(lines(result)))
"""

from collections.abc import Callable, Sequence

import torch

from iternorm.bench.gpu.networks import markdown_networks, markdown_ratios, network_lines, run_networks
from iternorm.bench.gpu.roots import markdown_roots, root_lines, run_roots
from iternorm.bench.gpu.synchronized import run_synchronized, synchronized_lines
from iternorm.bench.gpu.table import lines, markdown, markdown_targets, put_between_markers
from iternorm.bench.gpu.targets import evaluate
from iternorm.report.provenance import provenance
from iternorm.timing.gpu.cases import DTYPES, QUICK_SHAPES, SHAPES, CudaCandidate, Shape, candidates_for
from iternorm.timing.gpu.clock import Gpu, matmul_precision
from iternorm.timing.gpu.comparison import PASSES, run_case
from iternorm.timing.gpu.precompile import compile_all, jobs_for
from iternorm.timing.gpu.training import SETTINGS, norms, run_setting

__all__ = [
    "DTYPES",
    "SHAPES",
    "count_parts",
    "evaluate",
    "lines",
    "markdown",
    "markdown_networks",
    "markdown_ratios",
    "markdown_roots",
    "markdown_targets",
    "network_lines",
    "put_between_markers",
    "root_lines",
    "run",
    "run_networks",
    "run_roots",
    "run_synchronized",
    "synchronized_lines",
]

QUICK_ROUNDS = 5


def run(
    *,
    rounds: int = 15,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
    save: Callable[[dict], None] | None = None,
    shapes: Sequence[Shape] | None = None,
    candidates: Callable[[Shape, torch.dtype, bool], Sequence[CudaCandidate]] = candidates_for,
    gpu: Gpu | None = None,
) -> dict:
    """Time everything on the current CUDA device.

    Matrix products of fp32 may use TF32 during the run, as cuDNN's convolutions do by default, except for the
    candidates named exact.

    Args:
        rounds: The number of timings of each layer and network; the median counts.
        quick: Two activations, the main candidates, few rounds: about a minute.
        progress: Called with the name of each part when it is done; there are `count_parts` of them.
        save: Called with the result so far after each activation and network, so that an interrupted run leaves what it
            has measured.
        shapes: The activations, instead of the standard ones.
        candidates: Makes the candidates of an activation and a dtype.
        gpu: The clocks.

    Returns:
        `provenance`, `settings`, `cases` (one an activation and dtype), `training` (one a precision and layout),
        `targets`.
    """
    gpu = Gpu() if gpu is None else gpu
    notify = progress or (lambda part: None)

    def keep(part: str) -> None:
        result["targets"] = evaluate(result)
        if save is not None:
            save(result)
        notify(part)

    shapes = (QUICK_SHAPES if quick else SHAPES) if shapes is None else shapes
    rounds = min(rounds, QUICK_ROUNDS) if quick else rounds
    settings = {
        "quick": quick,
        "rounds": rounds,
        "passes": PASSES,
        # Read before the precision is set, because torch refuses to answer once its two ways of setting it were mixed.
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "convolution_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_precision": "high",
    }
    result = {"provenance": provenance(str(gpu.device)), "settings": settings, "cases": [], "training": []}
    if gpu.device.type == "cuda":
        settings["precompiled"] = compile_all(jobs_for(shapes, DTYPES, quick))
    notify("compilation")
    with matmul_precision("high"):
        settings["copy_gb_per_s"] = gpu.copy_gb_per_s()
        gpu.release()
        notify("copy bandwidth")
        for shape in shapes:
            for dtype in DTYPES:
                found = candidates(shape, dtype, quick)
                result["cases"].append(run_case(shape, dtype, found, gpu, settings["copy_gb_per_s"], rounds))
                gpu.release()
                keep(f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}")
        for setting in SETTINGS:
            result["training"].append(run_setting(setting, norms(quick), gpu, rounds))
            gpu.release()
            keep(f"VGG {str(setting.dtype).removeprefix('torch.')} {setting.layout}")
    return result


def count_parts(quick: bool = False) -> int:
    """How often `run` calls its `progress`."""
    return 2 + len(QUICK_SHAPES if quick else SHAPES) * len(DTYPES) + len(SETTINGS)
