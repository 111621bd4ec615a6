"""The GPU's clocks, the training step and the compilation beforehand, without a GPU."""

import json

import pytest
import torch
from fake_gpu import Breaks, FakeCuda, FakeGpu, tiny_vgg
from torch import nn

from iternorm.timing.gpu import cases, precompile, training
from iternorm.timing.gpu import clock as timing
from iternorm.timing.gpu.cases import TABLE_A1


@pytest.fixture
def fake_cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def test_a_capture_warms_up_on_a_side_stream_and_records_the_steps(fake_cuda):
    graph = timing.Gpu("cpu").capture(lambda: fake_cuda.log.append("step"), 4)
    assert isinstance(graph, torch.cuda.CUDAGraph)
    warm_up = ["wait_stream", "stream begins", *["step"] * 3, "stream ends", "wait_stream"]
    assert fake_cuda.log == [*warm_up, "graph begins", *["step"] * 4, "graph ends"]


def test_a_replay_is_timed_after_an_untimed_one(fake_cuda):
    gpu = timing.Gpu("cpu")
    assert gpu.replay_ms(torch.cuda.CUDAGraph(), 3) == 2.0
    assert fake_cuda.log == ["replay", "replay", "wait"]
    gpu.warm_up(torch.cuda.CUDAGraph(), 5)
    assert fake_cuda.log.count("replay") == 7


def test_eager_time_is_that_of_one_step(fake_cuda, monkeypatch):
    clock, log = iter([10.0, 10.5]), []

    def read_clock():
        log.append("clock")
        return next(clock)

    monkeypatch.setattr(timing.time, "perf_counter", read_clock)
    assert timing.Gpu("cpu").eager_ms(lambda: log.append("step"), 5) == pytest.approx(100.0)
    assert log == ["step"] * 2 + ["clock"] + ["step"] * 5 + ["clock"]


def test_peak_memory_counts_workspaces_and_subtracts_what_was_there(fake_cuda):
    def step():
        assert fake_cuda.log == ["cublas", "empty_cache"]
        fake_cuda.peak = fake_cuda.allocated + 70

    assert timing.Gpu("cpu").peak_bytes(step) == 70
    fake_cuda.log.clear()
    assert timing.Gpu("cpu").peak_bytes(step, base=100) == 470


def test_copy_bandwidth_counts_bytes_read_and_written(fake_cuda, monkeypatch):
    def copy(self, source):
        fake_cuda.clock += 0.5
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    assert timing.Gpu("cpu").copy_gb_per_s(10**6, rounds=3) == pytest.approx(2 * 10**6 / 0.5e-3 / 1e9)


def test_the_reason_is_one_line_and_names_the_error():
    assert timing.reason(ValueError("  first\nsecond")) == "ValueError: first"
    assert timing.reason(KeyError()) == "KeyError: "
    assert len(timing.reason(ValueError("x" * 1000))) == 300


@pytest.fixture
def small_batch(monkeypatch):
    monkeypatch.setattr(training, "BATCH_SIZE", 16)


@pytest.mark.parametrize("setting", training.SETTINGS)
def test_a_training_step_of_every_normalization(setting, small_batch):
    gpu = FakeGpu()
    found = training.run_setting(setting, training.norms(), gpu, rounds=5, network=tiny_vgg)
    assert json.loads(json.dumps(found)) == found
    rows = {row["name"]: row for row in found["networks"]}
    assert list(rows) == ["BatchNorm2d", "IterNorm d=64", "IterNorm full", "DBN d=16", "DBN d=16 kernels"]
    for row in rows.values():
        assert row["failed"] is None
        assert (row["step_ms"], row["peak_bytes"]) == (2.0, 1000)
        assert row["ratio_to_batch_norm"] == row["memory_ratio_to_batch_norm"] == 1
        assert len(row["samples_ms"]) == (3 if row["name"] == "DBN d=16" else 5)
    assert (rows["DBN d=16"]["paper_s"], rows["IterNorm full"]["paper_s"]) == (1.366, 0.343)


def test_a_training_step_learns_in_its_precision_and_layout(small_batch):
    for setting in training.SETTINGS:
        step = training.TrainingStep(nn.BatchNorm2d, setting, torch.device("cpu"), tiny_vgg)
        outputs = []
        handle = step.model.get_submodule("features.0").register_forward_hook(
            lambda *called, seen=outputs: seen.append(called[-1])
        )
        losses = [step().item()]
        handle.remove()
        assert outputs[0].dtype == setting.dtype
        assert outputs[0].is_contiguous(memory_format=torch.channels_last) == (setting.layout == "NHWC")
        losses += [step().item() for _ in range(11)]
        assert losses[-1] < losses[0]
        assert all(p.dtype == torch.float32 for p in step.model.parameters())


def test_a_network_that_fails_or_diverges_is_reported(small_batch):
    class Poison(nn.Module):
        def __init__(self, num_features):
            super().__init__()

        def forward(self, x):
            return x * float("nan")

    candidates = [
        training.Norm("BatchNorm2d", nn.BatchNorm2d),
        training.Norm("broken", lambda num_features: Breaks()),
        training.Norm("poison", Poison),
    ]
    found = training.run_setting(training.SETTINGS[0], candidates, FakeGpu(), rounds=2, network=tiny_vgg)
    rows = {row["name"]: row for row in found["networks"]}
    assert rows["broken"]["failed"] == "RuntimeError: no such thing"
    assert rows["poison"]["failed"] == "the loss became nan: its times mean nothing"
    assert rows["broken"]["step_ms"] is rows["poison"]["ratio_to_batch_norm"] is None
    assert rows["BatchNorm2d"]["step_ms"] == 2


def test_jobs_compile_every_candidate_once_in_every_layout_and_dtype():
    jobs = precompile.jobs_for(cases.SHAPES, cases.DTYPES)
    assert len(jobs) == len(set(jobs))
    # torch.compile takes longest and comes first; it is made for the very shape.
    assert [job.name for job in jobs[:8]] == ["BatchNorm2d compiled"] * 8
    ours = [job for job in jobs if job.name == "IterNorm T=5 d=64"]
    # Full and ragged groups, two dtypes, two layouts.
    assert sorted({job.shape[1] for job in ours}) == [64, 160]
    assert len(ours) == 8
    assert {job.dtype for job in jobs if job.name is None} == set(cases.DTYPES)
    quick = precompile.jobs_for(cases.QUICK_SHAPES, cases.DTYPES, quick=True)
    assert {job.name for job in quick} == {"IterNorm T=5 d=64", "IterNorm T=5 d=64 exact", None}


@pytest.mark.parametrize("name", ["IterNorm T=5 d=64 exact", "IterNorm T=3 d=64"])
def test_a_job_runs_the_candidate_it_names(name):
    precompile.first_step(precompile.Job(name, TABLE_A1[0], torch.float32, "NHWC"), "cpu")


def test_precompiling_reports_what_failed():
    unknown = precompile.Job("no such candidate", TABLE_A1[0], torch.float32, "NCHW")
    summary = precompile.compile_all([unknown], "cpu", processes=2)
    assert summary["jobs"] == 1
    assert len(summary["failed"]) == 1
    assert "no such candidate" in summary["failed"][0]
    assert precompile.compile_all([unknown], "cpu", processes=1)["failed"] == []
