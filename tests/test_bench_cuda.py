"""The GPU's benchmark without a GPU: which rivals run where, the bookkeeping, the targets, the tables."""

import json
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from iternorm import bench
from iternorm.bench import cuda
from iternorm.bench.cuda import cases, contest, precompile, targets, timing, training
from iternorm.bench.cuda.cases import STEM, TABLE_A1, CudaRival, rivals_for
from iternorm.experiments.models import VGG

ROOT = Path(__file__).parent.parent
TINY = (6, 8, 4, 4)


class FakeGpu(timing.Gpu):
    """Runs steps on the CPU and answers with times that the test chose, by the rival's name and layout."""

    def __init__(self, times=None):
        super().__init__("cpu")
        self.times = times or {}
        self.log = []
        self.precisions = {}

    def _note(self, what, step):
        entry = getattr(step, "__self__", None)
        key = (entry.rival.name, entry.layout) if entry is not None else "network"
        self.log.append((what, key))
        self.precisions.setdefault(key, set()).add(torch.get_float32_matmul_precision())
        return self.times.get(key, 1.0)

    def synchronize(self):
        pass

    def eager_ms(self, step, repeats):
        step()
        return 2 * self._note("eager", step)

    def capture(self, step, repeats):
        step()
        self._note("capture", step)
        return step

    def warm_up(self, graph, replays):
        self.log.append(("warm", None))

    def replay_ms(self, graph, repeats):
        return self._note("replay", graph)

    def allocated_bytes(self):
        return 0

    def peak_bytes(self, step, base=None):
        step()
        self._note("peak", step)
        return 1000

    def release(self):
        pass

    def copy_gb_per_s(self, num_bytes=0, rounds=0):
        return 4000.0


def tiny_rivals(shape=TINY, dtype=torch.float32, quick=False):
    from iternorm.modules import IterNorm2d

    whitening = partial(IterNorm2d, 8, group_size=4)
    return [
        CudaRival("conv3x3", partial(nn.Conv2d, 8, 8, 3, padding=1, bias=False)),
        CudaRival("BatchNorm2d", partial(nn.BatchNorm2d, 8)),
        CudaRival("IterNorm T=5 d=64", whitening),
        CudaRival("IterNorm T=5 d=64 exact", whitening, exact=True),
        CudaRival("DBN d=16", whitening, slow=True, no_graph="it waits"),
    ]


def rows_of(case):
    return {(row["name"], row["layout"]): row for row in case["rivals"]}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", cases.SHAPES)
def test_every_activation_has_the_convolution_batch_norm_and_iternorm(shape, dtype):
    rivals = {rival.name: rival for rival in rivals_for(shape, dtype)}
    assert {"conv3x3", "BatchNorm2d", "IterNorm T=5 d=64"} <= set(rivals)
    assert ("IterNorm T=5 d=64 exact" in rivals) == (dtype == torch.float32)
    assert ("BatchNorm2d compiled" in rivals) == (shape in ((256, 64, 32, 32), STEM))
    assert ("DBN d=16" in rivals) == ("IterNorm T=3 d=64" in rivals) == ("IterNorm T=7 d=64" in rivals)
    assert ("DBN d=16" in rivals) == (shape in TABLE_A1)
    assert ("IterNorm T=5 d=32" in rivals) == (shape[1] == 160)
    assert len(rivals) == len(rivals_for(shape, dtype))
    x = torch.randn(2, shape[1], 4, 4)
    for rival in rivals.values():
        module = rival.make()
        assert module(x).shape == x.shape
        if "IterNorm" in rival.name:
            assert f"T={module.num_iters} d={module.group_size}" in rival.name
            assert rival.exact == ("exact" in rival.name)


def test_the_quick_run_has_all_that_its_ratios_need_and_compiles_no_batch_norm():
    for shape in cases.QUICK_SHAPES:
        names = [rival.name for rival in rivals_for(shape, torch.float32, True)]
        assert names == ["conv3x3", "BatchNorm2d", "IterNorm T=5 d=64", "IterNorm T=5 d=64 exact"]


def test_a_case_times_both_layouts_of_all_rivals_and_takes_ratios():
    times = {("conv3x3", "NCHW"): 8.0, ("BatchNorm2d", "NCHW"): 4.0, ("BatchNorm2d", "NHWC"): 2.0}
    times |= {("IterNorm T=5 d=64", "NCHW"): 3.0, ("IterNorm T=5 d=64", "NHWC"): 1.0}
    gpu = FakeGpu(times)
    case = contest.run_case(TINY, torch.float32, tiny_rivals(), gpu, 4000.0, rounds=4)
    assert json.loads(json.dumps(case)) == case
    rows = rows_of(case)
    assert len(rows) == 10
    assert all(row["failed"] is None for row in rows.values())
    ours = rows["IterNorm T=5 d=64", "NHWC"]
    activation_bytes = 4 * 6 * 8 * 4 * 4
    assert case["floor_ms"] == pytest.approx(8 * activation_bytes / 4000e9 * 1e3)
    assert ours["graph_samples_ms"] == [1.0] * 4
    assert ours["eager_samples_ms"] == [2.0] * 4
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
    rows = rows_of(contest.run_case(TINY, torch.float32, tiny_rivals(), gpu, 4000.0, rounds=9))
    slow = rows["DBN d=16", "NCHW"]
    assert (slow["graph_ms"], slow["graph_failed"], slow["failed"]) == (None, "it waits", None)
    assert slow["eager_samples_ms"] == [2.0] * contest.SLOW_ROUNDS
    assert slow["gb_per_s"] is slow["ratio_to_floor"] is slow["ratio_to_batch_norm"] is None
    assert slow["eager_ratio_to_batch_norm"] == 1
    assert ("capture", ("DBN d=16", "NCHW")) not in gpu.log


def test_rounds_are_interleaved_and_memory_comes_before_graphs():
    gpu = FakeGpu()
    contest.run_case(TINY, torch.float32, tiny_rivals()[:3], gpu, 4000.0, rounds=3)
    whats = [what for what, _ in gpu.log]
    assert max(i for i, what in enumerate(whats) if what == "peak") < whats.index("capture")
    replays = [key for what, key in gpu.log if what == "replay"]
    rounds = [replays[i : i + 6] for i in range(0, len(replays), 6)]
    assert len(rounds) == contest.WARMUP_ROUNDS + 3
    assert all(len(set(keys)) == 6 for keys in rounds)
    assert rounds[-1] == [*rounds[-2][1:], rounds[-2][0]]


def test_only_the_exact_rival_runs_without_tf32_and_the_setting_is_restored():
    before = torch.get_float32_matmul_precision()
    gpu = FakeGpu()
    contest.run_case(TINY, torch.float32, tiny_rivals(), gpu, 4000.0, rounds=1)
    for (name, _), seen in gpu.precisions.items():
        assert seen == ({"highest"} if "exact" in name else {"high"})
    assert torch.get_float32_matmul_precision() == before


class Breaks(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such thing\nand more")


def test_a_rival_that_fails_is_reported_and_stops_nobody():
    rivals = [*tiny_rivals()[:2], CudaRival("broken", Breaks), CudaRival("unmade", partial(nn.BatchNorm2d, "eight"))]
    rows = rows_of(contest.run_case(TINY, torch.float32, rivals, FakeGpu(), 4000.0, rounds=2))
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
    rows = rows_of(contest.run_case(TINY, torch.float32, tiny_rivals()[:2], gpu, 4000.0, rounds=2))
    row = rows["BatchNorm2d", "NCHW"]
    assert row["failed"] is None
    assert row["graph_failed"] == "RuntimeError: operation not permitted when stream is capturing"
    assert (row["graph_ms"], row["eager_ms"]) == (None, 2.0)


def test_a_case_that_does_not_fit_is_reported(monkeypatch):
    def make(self, device):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(contest.Case, "make", make)
    case = contest.run_case(TINY, torch.float32, tiny_rivals(), FakeGpu(), 4000.0, rounds=2)
    assert case["failed"] == "OutOfMemoryError: out of memory"
    assert case["rivals"] == []


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_a_step_gives_the_gradients_of_input_and_parameters_and_leaves_no_trace(layout):
    x, grad_output = bench.Case(TINY, torch.bfloat16, cases.LAYOUTS[layout]).make(torch.device("cpu"))
    for rival in tiny_rivals():
        entry = contest.Entry(rival, layout, x, grad_output)
        entry.build()
        output, gradients = entry.step()
        assert output.shape == x.shape
        assert output.dtype == gradients[0].dtype == torch.bfloat16
        assert [g.shape for g in gradients] == [x.shape, *(p.shape for p in entry.module.parameters())]
        # A convolution follows the activation, the parameters of a normalization stay in fp32.
        assert gradients[1].dtype == (torch.bfloat16 if rival.name == "conv3x3" else torch.float32)
        assert x.grad is None
        assert entry.module.training


def test_steps_a_timing_fall_with_the_size_of_the_activation():
    size = {shape: 4 * torch.Size(shape).numel() for shape in cases.SHAPES}
    assert contest.steps_for(size[TABLE_A1[0]]) == 20
    assert 2 < contest.steps_for(size[128, 160, 32, 32]) < 20
    assert contest.steps_for(size[STEM]) == 2


def test_the_reason_is_one_line_and_names_the_error():
    assert timing.reason(ValueError("  first\nsecond")) == "ValueError: first"
    assert timing.reason(KeyError()) == "KeyError: "
    assert len(timing.reason(ValueError("x" * 1000))) == 300


def test_workspaces_that_the_measurement_drops_exist_under_their_name():
    launch = pytest.importorskip("iternorm.kernels.launch", reason="triton is not installed")
    assert isinstance(launch._workspaces, dict)


class FakeCuda:
    """Stands in for `torch.cuda`: a clock that every replay and copy moves by 6 ms, and a log of what was called."""

    def __init__(self, monkeypatch):
        self.log, self.clock, self.allocated, self.peak = [], 0.0, 500, 0
        outer = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time = outer.clock

            def synchronize(self):
                outer.log.append("wait")

            def elapsed_time(self, end):
                return end.time - self.time

        class Stream:
            def __init__(self, device=None):
                pass

            def wait_stream(self, other):
                outer.log.append("wait_stream")

        class Graph:
            def replay(self):
                outer.log.append("replay")
                outer.clock += 6.0

        @contextmanager
        def section(name, *_):
            outer.log.append(f"{name} begins")
            yield
            outer.log.append(f"{name} ends")

        def allocate(device):
            return self.allocated

        for name, value in {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": Stream,
            "stream": partial(section, "stream"),
            "graph": partial(section, "graph"),
            "synchronize": lambda device: None,
            "memory_allocated": allocate,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "empty_cache": lambda: self.log.append("empty_cache"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: self.log.append("cublas"), raising=False)


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
    clock = iter([10.0, 10.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    steps = []
    assert timing.Gpu("cpu").eager_ms(lambda: steps.append(1), 5) == pytest.approx(100.0)
    assert len(steps) == 5


def test_peak_memory_counts_workspaces_and_subtracts_what_was_there(fake_cuda, monkeypatch):
    launch = SimpleNamespace(_workspaces={"kept": torch.zeros(1)})
    monkeypatch.setitem(sys.modules, "iternorm.kernels.launch", launch)

    def step():
        assert not launch._workspaces
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


def tiny_vgg(num_classes, norm):
    return VGG(num_classes, norm, blocks=((8, 1), (8, 1), (8, 1), (8, 1), (8, 1)))


@pytest.fixture
def small_batch(monkeypatch):
    monkeypatch.setattr(training, "BATCH_SIZE", 16)


@pytest.mark.parametrize("setting", training.SETTINGS)
def test_a_training_step_of_every_normalization(setting, small_batch):
    gpu = FakeGpu()
    found = training.run_setting(setting, training.norms(), gpu, rounds=5, network=tiny_vgg)
    assert json.loads(json.dumps(found)) == found
    rows = {row["name"]: row for row in found["networks"]}
    assert list(rows) == ["BatchNorm2d", "IterNorm d=64", "IterNorm full", "DBN d=16"]
    for row in rows.values():
        assert row["failed"] is None
        assert (row["step_ms"], row["peak_bytes"]) == (2.0, 1000)
        assert row["ratio_to_batch_norm"] == row["memory_ratio_to_batch_norm"] == 1
        assert len(row["samples_ms"]) == (3 if row["name"] == "DBN d=16" else 5)
    assert (rows["DBN d=16"]["paper_s"], rows["IterNorm full"]["paper_s"]) == (1.366, 0.343)


def test_a_training_step_learns_and_keeps_parameters_in_fp32(small_batch):
    for setting in training.SETTINGS:
        step = training.TrainingStep(nn.BatchNorm2d, setting, torch.device("cpu"), tiny_vgg)
        losses = [step().item() for _ in range(12)]
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


def test_jobs_compile_every_rival_once_in_every_layout_and_dtype():
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
def test_a_job_runs_the_rival_it_names(name):
    precompile.first_step(precompile.Job(name, TABLE_A1[0], torch.float32, "NHWC"), "cpu")


def test_precompiling_reports_what_failed():
    unknown = precompile.Job("no such rival", TABLE_A1[0], torch.float32, "NCHW")
    summary = precompile.compile_all([unknown], "cpu", processes=2)
    assert summary["jobs"] == 1
    assert len(summary["failed"]) == 1
    assert "no such rival" in summary["failed"][0]
    assert precompile.compile_all([unknown], "cpu", processes=1)["failed"] == []


def synthetic(ours=1.0, network=1.0):
    """A result with all that the targets look at: everything takes 1 ms except what is given."""
    found = {"cases": [], "training": []}
    for shape in (*TABLE_A1, STEM):
        for dtype in targets.DTYPES:
            names = ["conv3x3", "BatchNorm2d", "BatchNorm2d compiled", "IterNorm T=5 d=64", "IterNorm T=5 d=64 exact"]
            rows = []
            for name in names:
                for layout in cases.LAYOUTS:
                    time = ours if name.startswith("IterNorm") else 1.0
                    rows.append({"name": name, "layout": layout, "graph_ms": time, "eager_ms": time})
            contest.add_ratios(rows, 1.0, 1)
            found["cases"].append({"shape": list(shape), "dtype": dtype, "floor_ms": 1.0, "rivals": rows})
    for dtype in targets.DTYPES:
        row = {"name": "IterNorm d=64", "ratio_to_batch_norm": network, "memory_ratio_to_batch_norm": network}
        found["training"].append({"dtype": dtype, "networks": [row]})
    return found


def row_in(result, shape, dtype, name, layout):
    return targets._row(result, list(shape), dtype, name, layout)


def test_targets_are_those_of_the_table():
    limits = {}
    for target in targets.evaluate(synthetic()):
        limits.setdefault(target["target"].replace("64x128", "64x64").replace("NHWC,", "NCHW,"), []).append(
            (target["dtype"], target["limit"])
        )
    assert {name: sorted(set(pairs)) for name, pairs in limits.items()} == {
        "256x64x112x112, best layout / eight-pass floor": [("bfloat16", 1.4), ("float32", 1.25)],
        "256x64x112x112, best layout / best BatchNorm": [("bfloat16", 1.1), ("float32", 1.15)],
        "64x64x32x32 NCHW, graph / BatchNorm NCHW, graph": [("bfloat16", 1.0), ("float32", 1.0)],
        "64x64x32x32 NCHW, graph / conv3x3, same layout, graph": [("bfloat16", 0.8), ("float32", 0.5)],
        "64x64x32x32 NCHW, eager / BatchNorm eager": [("bfloat16", 1.5), ("float32", 1.5)],
        "64x64x32x32, exact fp32 / TF32 allowed, worse layout": [("float32", 1.5)],
        "256x64x112x112, exact fp32 / TF32 allowed, worse layout": [("float32", 1.5)],
        "VGG training step / BatchNorm": [("bfloat16", 1.25), ("float32", 1.25)],
        "VGG peak memory / BatchNorm": [("bfloat16", 1.05), ("float32", 1.05)],
    }


def test_targets_are_met_at_their_limit_and_not_beyond_it():
    assert all(target["met"] is True for target in targets.evaluate(synthetic(ours=0.5, network=1.05)))
    missed = [target["target"] for target in targets.evaluate(synthetic(ours=2.0, network=1.06)) if not target["met"]]
    assert sum("memory" in name for name in missed) == 2
    assert not any("training step" in name or "exact" in name for name in missed)
    assert sum("64x" in name for name in missed) == 24 + 4


def test_the_stem_is_judged_in_its_best_layout_against_the_best_batch_norm():
    result = synthetic()
    row_in(result, STEM, "float32", "IterNorm T=5 d=64", "NHWC")["graph_ms"] = 0.6
    row_in(result, STEM, "float32", "BatchNorm2d compiled", "NCHW")["graph_ms"] = 0.4
    row_in(result, STEM, "float32", "BatchNorm2d", "NHWC")["graph_ms"] = None
    found = {(t["target"], t["dtype"]): t for t in targets.evaluate(result)}
    assert found["256x64x112x112, best layout / eight-pass floor", "float32"]["measured"] == 0.6
    against = found["256x64x112x112, best layout / best BatchNorm", "float32"]
    assert against["measured"] == pytest.approx(1.5)
    assert against["met"] is False


def test_a_target_without_figures_is_not_met():
    found = targets.evaluate({"cases": [], "training": []})
    assert len(found) == len(targets.evaluate(synthetic()))
    assert all(target["measured"] is target["met"] is None for target in found)


@pytest.fixture(scope="module")
def result():
    """A whole run on tiny activations."""
    parts = []
    real = training.run_setting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "BATCH_SIZE", 16)
        patch.setattr(cuda, "run_setting", lambda *arguments: real(*arguments, network=tiny_vgg))
        found = cuda.run(
            rounds=2, shapes=[TINY, (4, 8, 2, 2)], rivals=tiny_rivals, gpu=FakeGpu(), progress=parts.append
        )
    assert parts[:3] == ["compilation", "copy bandwidth", "6x8x4x4 float32"]
    assert parts[-1] == "VGG bfloat16 NHWC"
    assert len(parts) == 2 + 4 + 2
    return found


def test_a_run_is_json_with_provenance_settings_and_targets(result):
    assert json.loads(json.dumps(result)) == result
    assert result["provenance"]["device"] == "cpu"
    assert result["settings"]["copy_gb_per_s"] == 4000
    assert result["settings"]["rounds"] == 2
    assert [case["dtype"] for case in result["cases"]] == ["float32", "bfloat16"] * 2
    assert [setting["layout"] for setting in result["training"]] == ["NCHW", "NHWC"]
    # VGG's two figures in two precisions; no other target has its activation here.
    assert sum(target["met"] is not None for target in result["targets"]) == 4
    assert cuda.count_parts() == 2 + 6 * 2 + 2


def test_the_printed_lines_show_every_row_and_every_failure(result):
    text = "\n".join(cuda.lines(result))
    for phrase in (
        "6x8x4x4 float32",
        "IterNorm T=5 d=64 exact",
        "no CUDA graph: 6x8x4x4 float32 NCHW DBN d=16: it waits",
    ):
        assert phrase in text
    assert "Targets: 4 of " in text
    assert "not measured" in text
    assert text.count("VGG training step, batch 16") == 2
    failed = json.loads(json.dumps(result))
    failed["cases"][0]["rivals"][0]["failed"] = "E: conv"
    failed["cases"][1]["failed"] = "E: case"
    failed["training"][1]["networks"][0]["failed"] = "E: net"
    failed["settings"]["precompiled"] = {"processes": 2, "jobs": 3, "seconds": 1.0, "failed": ["E: job"]}
    text = "\n".join(cuda.lines(failed))
    assert all(f"E: {what}" in text for what in ("conv", "case", "net", "job"))


def test_markdown_has_a_line_a_case_and_a_network(result):
    lines = cuda.markdown(result).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 4 + 2 + 4
    widths = [line.count("|") for line in table]
    assert set(widths[:6]) == {13}
    assert set(widths[6:]) == {9}
    assert table[2].startswith("| 6x8x4x4 fp32 | ")
    assert "| 1000 / 1000 |" in table[2]
    assert "DBN d=16" in table[-1]
    assert "1366" in table[-1]
    rows = cuda.markdown_targets(result).splitlines()
    assert len(rows) == 2 + len(result["targets"])


def test_markers_are_replaced_and_must_exist():
    document = "a\n<!-- bench:x -->\nold\n<!-- /bench -->\nb\n<!-- bench:y -->\n<!-- /bench -->\n"
    replaced = cuda.put_between_markers(document, "x", "new")
    assert replaced == document.replace("old", "\nnew\n")
    assert cuda.put_between_markers(replaced, "x", "new") == replaced
    with pytest.raises(ValueError, match="bench:z"):
        cuda.put_between_markers(document, "z", "new")


def test_the_readmes_tables_are_made_from_the_committed_result():
    path = ROOT / "benchmarks" / "results" / "h200.json"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not path.exists():
        pytest.skip("benchmarks/results/h200.json is not there yet")
    content = cuda.markdown(json.loads(path.read_text(encoding="utf-8")))
    assert cuda.put_between_markers(readme, "h200", content) == readme, (
        "run: PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json --write README.md"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_case_on_a_gpu_is_measured_in_every_way():
    gpu = timing.Gpu()
    rivals = rivals_for((8, 64, 16, 16), torch.float32)
    case = contest.run_case((8, 64, 16, 16), torch.float32, rivals, gpu, gpu.copy_gb_per_s(2**24, 3), rounds=3)
    for row in case["rivals"]:
        assert row["failed"] is row["graph_failed"] is None
        assert row["graph_ms"] > 0
        assert row["eager_ms"] > 0
        assert row["peak_bytes"] >= 2 * case["activation_bytes"]
