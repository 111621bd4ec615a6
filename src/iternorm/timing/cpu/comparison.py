"""The run on a CPU: every candidate on every case, in interleaved rounds."""

import statistics
from collections.abc import Callable, Sequence

import torch

from iternorm.report.provenance import provenance
from iternorm.timing.cpu.candidates import PAPER_MS, Candidate, standard_candidates
from iternorm.timing.cpu.devices import Case, CpuDevice, Entry, set_malloc_thresholds
from iternorm.timing.threads import num_threads
from iternorm.timing.turns import in_turns

# The baselines, in the denominators of the ratios, by name.
CONVOLUTION, BATCH_NORM = "conv3x3", "BatchNorm2d"
# Calls that are discarded before the first round, in which allocators, algorithm searches and caches settle.
WARMUP_ROUNDS = 2
# The activations of the paper's Table A1.
TABLE_A1 = (Case((64, 64, 32, 32)), Case((64, 128, 32, 32)))


def run(
    cases: Sequence[Case] = TABLE_A1,
    *,
    rounds: int = 15,
    threads: int | None = None,
    candidates: Callable[[int], Sequence[Candidate]] = standard_candidates,
    progress: Callable[[], None] | None = None,
) -> dict:
    """Time every candidate on every case.

    A round times each candidate once, in a shuffled order: see `in_turns`.

    Args:
        cases: The activations.
        rounds: The number of timings of each candidate.
        threads: The number of CPU threads torch uses; None leaves it as it is.
        candidates: Makes the candidates from the number of channels.
        progress: Called after each timing; there are `count_timings` of them.

    Returns:
        `provenance`, `settings`, and in `cases` a list of `shape`, `dtype`, `channels_last` and `rivals`.
    """
    check_arguments("cpu", rounds, threads)
    allocator = set_malloc_thresholds()
    with num_threads(threads):
        notify = progress or (lambda: None)
        return {
            "provenance": provenance(),
            "settings": {
                "rounds": rounds,
                "warmup_rounds": WARMUP_ROUNDS,
                "malloc_thresholds_set": allocator,
            },
            "cases": [_run_case(case, rounds, candidates(case.shape[1]), notify) for case in cases],
        }


def check_arguments(
    device: str,
    rounds: int,
    threads: int | None = None,
    quick: bool = False,
    networks: bool = False,
    sync: bool = False,
    roots: bool = False,
) -> None:
    """Raise a ValueError for what `run` and `gpu.run` of the benchmark cannot do."""
    whole = {
        "--networks": (networks, "training steps"),
        "--sync": (sync, "synchronized layers"),
        "--roots": (roots, "roots of matrices"),
    }
    for option, (is_asked, what) in whole.items():
        if is_asked and device != "cuda":
            raise ValueError(f"{option} times {what} on a GPU, not on {device!r}; add --device cuda")
    asked = [*(option for option, (is_asked, _) in whole.items() if is_asked), *(["--quick"] if quick else [])]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} do not go together; give one of them")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not known here: use 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' needs a CUDA device and torch sees none: use device='cpu'")
    if rounds < 1:
        raise ValueError(f"rounds={rounds} times nothing: use 1 or more")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} is no number of threads: use 1 or more")
    if quick and device == "cpu":
        raise ValueError("quick=True is for device='cuda'; on a CPU use fewer rounds")


def count_timings(
    cases: Sequence[Case] = TABLE_A1,
    *,
    rounds: int = 15,
    candidates: Callable[[int], Sequence[Candidate]] = standard_candidates,
) -> int:
    """How often `run` calls its `progress`."""
    return sum(len(candidates(case.shape[1])) for case in cases) * (WARMUP_ROUNDS + rounds)


def _run_case(case: Case, rounds: int, candidates: Sequence[Candidate], progress: Callable[[], None]) -> dict:
    device, target = CpuDevice(), torch.device("cpu")
    x, grad_output = case.make(target)
    with torch.random.fork_rng(devices=[]):
        entries = [Entry(candidate, case, target, x, grad_output) for candidate in candidates]
    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for round_index, entry in in_turns(entries, rounds, WARMUP_ROUNDS):
        elapsed = device.milliseconds(entry)
        if round_index >= 0:
            samples[entry.candidate.name].append(elapsed)
        progress()
    medians = {name: statistics.median(values) for name, values in samples.items()}
    activation_bytes = x.numel() * x.element_size()
    rows = []
    for entry in entries:
        name, median = entry.candidate.name, medians[entry.candidate.name]
        paper = PAPER_MS.get(entry.candidate.paper or "", {}).get(case.shape[1])
        rows.append(
            {
                "name": name,
                "median_ms": median,
                "min_ms": min(samples[name]),
                "max_ms": max(samples[name]),
                "samples_ms": samples[name],
                "ratio_to_convolution": median / medians[CONVOLUTION] if CONVOLUTION in medians else None,
                "ratio_to_batch_norm": median / medians[BATCH_NORM] if BATCH_NORM in medians else None,
                # Every candidate's step allocates its output and the gradient of its input: two activations.
                "extra_activations": device.peak_bytes(entry) / activation_bytes - 2,
                "paper_ms": paper,
                "paper_ratio_to_convolution": paper and paper / PAPER_MS["cudnn convolution"][case.shape[1]],
            }
        )
        entry.clear()
    return {
        "shape": list(case.shape),
        "dtype": str(case.dtype).removeprefix("torch."),
        "channels_last": case.channels_last,
        "rivals": rows,
    }
