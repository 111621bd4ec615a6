"""The GPU's compare without a GPU: which candidates run where, and the bookkeeping."""

import itertools
import json
from functools import partial

import pytest
import torch
from fake_gpu import TINY, Breaks, FakeGpu, tiny_candidates
from torch import nn

from iternorm import bench
from iternorm.timing.gpu import cases, comparison
from iternorm.timing.gpu import clock as timing
from iternorm.timing.gpu.cases import STEM, TABLE_A1, CudaCandidate, candidates_for


def rows_of(case):
    return {(row["name"], row["layout"]): row for row in case["rivals"]}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", cases.SHAPES)
def test_every_activation_has_the_convolution_batch_norm_and_iternorm(shape, dtype):
    candidates = {candidate.name: candidate for candidate in candidates_for(shape, dtype)}
    assert {"conv3x3", "BatchNorm2d", "IterNorm T=5 d=64"} <= set(candidates)
    assert ("IterNorm T=5 d=64 exact" in candidates) == (dtype == torch.float32)
    assert ("BatchNorm2d compiled" in candidates) == (shape in ((256, 64, 32, 32), STEM))
    assert ("DBN d=16" in candidates) == ("IterNorm T=3 d=64" in candidates) == ("IterNorm T=7 d=64" in candidates)
    assert ("DBN d=16" in candidates) == (shape in TABLE_A1)
    assert ("IterNorm T=5 d=32" in candidates) == (shape[1] == 160)
    assert len(candidates) == len(candidates_for(shape, dtype))
    x = torch.randn(2, shape[1], 4, 4)
    for candidate in candidates.values():
        module = candidate.make()
        assert module(x).shape == x.shape
        if "IterNorm" in candidate.name:
            assert f"T={module.num_iters} d={module.group_size}" in candidate.name
            assert candidate.exact == ("exact" in candidate.name)


def test_the_quick_run_has_all_that_its_ratios_need_and_compiles_no_batch_norm():
    for shape in cases.QUICK_SHAPES:
        names = [candidate.name for candidate in candidates_for(shape, torch.float32, True)]
        assert names == ["conv3x3", "BatchNorm2d", "IterNorm T=5 d=64", "IterNorm T=5 d=64 exact"]


def test_a_case_times_both_layouts_of_all_candidates_and_takes_ratios():
    times = {("conv3x3", "NCHW"): 8.0, ("BatchNorm2d", "NCHW"): 4.0, ("BatchNorm2d", "NHWC"): 2.0}
    times |= {("IterNorm T=5 d=64", "NCHW"): 3.0, ("IterNorm T=5 d=64", "NHWC"): 1.0}
    gpu = FakeGpu(times)
    case = comparison.run_case(TINY, torch.float32, tiny_candidates(), gpu, 4000.0, rounds=4)
    assert json.loads(json.dumps(case)) == case
    rows = rows_of(case)
    assert len(rows) == 10
    assert all(row["failed"] is None for row in rows.values())
    ours = rows["IterNorm T=5 d=64", "NHWC"]
    activation_bytes = 4 * 6 * 8 * 4 * 4
    assert case["floor_ms"] == pytest.approx(8 * activation_bytes / 4000e9 * 1e3)
    assert ours["graph_samples_ms"] == [1.0] * 4
    assert ours["eager_samples_ms"] == [2.0] * 4 * comparison.SMALL_ROUNDS
    assert ours["gb_per_s"] == pytest.approx(8 * activation_bytes / 1e-3 / 1e9)
    assert ours["ratio_to_floor"] == pytest.approx(1 / case["floor_ms"])
    assert ours["ratio_to_convolution"] == 1
    assert ours["ratio_to_batch_norm"] == 1 / 2
    assert ours["ratio_to_batch_norm_nchw"] == 1 / 4
    assert rows["IterNorm T=5 d=64", "NCHW"]["ratio_to_convolution"] == 3 / 8
    assert rows["IterNorm T=5 d=64", "NCHW"]["eager_ratio_to_batch_norm"] == 3 / 4
    assert ours["extra_activations"] == pytest.approx(1000 / activation_bytes - 2)


def test_what_cannot_be_captured_is_timed_eagerly_and_says_why():
    gpu = FakeGpu()
    rows = rows_of(comparison.run_case(TINY, torch.float32, tiny_candidates(), gpu, 4000.0, rounds=9))
    slow = rows["DBN d=16", "NCHW"]
    assert (slow["graph_ms"], slow["graph_failed"], slow["failed"]) == (None, "it waits", None)
    assert slow["eager_samples_ms"] == [2.0] * comparison.SLOW_ROUNDS
    assert slow["gb_per_s"] is slow["ratio_to_floor"] is slow["ratio_to_batch_norm"] is None
    assert slow["eager_ratio_to_batch_norm"] == 1
    assert ("capture", ("DBN d=16", "NCHW")) not in gpu.log


def test_rounds_are_interleaved_and_memory_comes_before_graphs():
    gpu = FakeGpu()
    comparison.run_case(TINY, torch.float32, tiny_candidates()[:3], gpu, 4000.0, rounds=3)
    whats = [what for what, _ in gpu.log]
    assert max(i for i, what in enumerate(whats) if what == "peak") < whats.index("capture")
    replays = [key for what, key in gpu.log if what == "replay"]
    rounds = [replays[i : i + 6] for i in range(0, len(replays), 6)]
    assert len(rounds) == comparison.WARMUP_ROUNDS + 3
    assert all(len(set(keys)) == 6 for keys in rounds)
    # Nobody always follows the same candidate.
    followers = {pair for keys in rounds for pair in itertools.pairwise(keys)}
    assert len({first for first, second in followers if second == rounds[0][1]}) > 1


def test_only_the_exact_candidate_runs_without_tf32_and_the_setting_is_restored():
    before = torch.get_float32_matmul_precision()
    gpu = FakeGpu()
    comparison.run_case(TINY, torch.float32, tiny_candidates(), gpu, 4000.0, rounds=1)
    for (name, _), seen in gpu.precisions.items():
        assert seen == ({"highest"} if "exact" in name else {"high"})
    assert torch.get_float32_matmul_precision() == before


def test_a_candidate_that_fails_is_reported_and_stops_nobody():
    unmade = partial(nn.BatchNorm2d, "eight")  # pyright: ignore[reportArgumentType]
    candidates = [*tiny_candidates()[:2], CudaCandidate("broken", Breaks), CudaCandidate("unmade", unmade)]
    rows = rows_of(comparison.run_case(TINY, torch.float32, candidates, FakeGpu(), 4000.0, rounds=2))
    broken = rows["broken", "NHWC"]
    assert broken["failed"] == broken["graph_failed"] == "RuntimeError: no such thing"
    assert broken["graph_ms"] is broken["eager_ms"] is broken["peak_bytes"] is broken["ratio_to_floor"] is None
    assert rows["unmade", "NCHW"]["failed"].startswith("TypeError")
    assert rows["BatchNorm2d", "NHWC"]["graph_ms"] == 1


def test_a_failed_capture_leaves_the_eager_time(monkeypatch):
    gpu = FakeGpu()

    def capture(step, repeats):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu, "capture", capture)
    rows = rows_of(comparison.run_case(TINY, torch.float32, tiny_candidates()[:2], gpu, 4000.0, rounds=2))
    row = rows["BatchNorm2d", "NCHW"]
    assert row["failed"] is None
    assert row["graph_failed"] == "RuntimeError: operation not permitted when stream is capturing"
    assert (row["graph_ms"], row["eager_ms"]) == (None, 2.0)


def test_a_case_that_does_not_fit_is_reported(monkeypatch):
    def make(self, device):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(comparison.Case, "make", make)
    case = comparison.run_case(TINY, torch.float32, tiny_candidates(), FakeGpu(), 4000.0, rounds=2)
    assert case["failed"] == "OutOfMemoryError: out of memory"
    assert case["rivals"] == []


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_a_step_gives_the_gradients_of_input_and_parameters_and_leaves_no_trace(layout):
    x, grad_output = bench.Case(TINY, torch.bfloat16, cases.LAYOUTS[layout]).make(torch.device("cpu"))
    for candidate in tiny_candidates():
        entry = comparison.Entry(candidate, layout, x, grad_output)
        entry.build()
        output, gradients = entry.step()
        assert output.shape == x.shape
        assert output.dtype == gradients[0].dtype == torch.bfloat16
        assert [g.shape for g in gradients] == [x.shape, *(p.shape for p in entry.module.parameters())]
        # A convolution follows the activation, the parameters of a normalization stay in fp32.
        assert gradients[1].dtype == (torch.bfloat16 if candidate.name == "conv3x3" else torch.float32)
        assert x.grad is None
        assert entry.module.training


def test_steps_a_timing_fall_with_the_size_of_the_activation():
    size = {shape: 4 * torch.Size(shape).numel() for shape in cases.SHAPES}
    assert comparison.steps_for(size[TABLE_A1[0]]) == 20
    assert 2 < comparison.steps_for(size[128, 160, 32, 32]) < 20
    assert comparison.steps_for(size[STEM]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_case_on_a_gpu_is_measured_in_every_way():
    gpu = timing.Gpu()
    candidates = candidates_for((8, 64, 16, 16), torch.float32)
    case = comparison.run_case((8, 64, 16, 16), torch.float32, candidates, gpu, gpu.copy_gb_per_s(2**24, 3), rounds=3)
    for row in case["rivals"]:
        assert row["failed"] is row["graph_failed"] is None
        assert row["graph_ms"] > 0
        assert row["eager_ms"] > 0
        assert row["peak_bytes"] >= 2 * case["activation_bytes"]
