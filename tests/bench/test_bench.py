"""The benchmark: its candidates are right, its bookkeeping is right. Nothing here depends on how fast anything is."""

import ctypes
import itertools
import json
import sys
from io import StringIO

import pytest
import torch
from torch import nn

from iternorm import bench, reference
from iternorm.timing.cpu import comparison
from iternorm.timing.cpu.candidates import Candidate, CopyingIterNorm
from iternorm.timing.cpu.devices import Case, CpuDevice, Entry, set_malloc_thresholds

TINY = Case((6, 8, 5, 5))


@pytest.fixture(autouse=True)
def allocator_as_it_is(monkeypatch):
    """The thresholds stay set for the life of a process: not in that of the tests."""
    monkeypatch.setattr(comparison, "set_malloc_thresholds", lambda: True)


def tiny_candidates(num_channels):
    return bench.standard_candidates(num_channels, group_sizes=(4, 8), dbn_group_sizes=(4,), num_iters=(3, 5))


@pytest.mark.parametrize("group_size", [3, 6])
@pytest.mark.parametrize("num_iters", [0, 1, 5])
def test_authors_formulation_equals_the_reference_with_gradients(group_size, num_iters):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, 4, 3, generator=generator, dtype=torch.float64) + 2
    grad_output = torch.randn(5, 6, 4, 3, generator=generator, dtype=torch.float64)
    layer = CopyingIterNorm(6, group_size=group_size, num_iters=num_iters).double()
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2, generator=generator)
        layer.bias.normal_(generator=generator)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight, bias = (p.detach().flatten().clone().requires_grad_() for p in (layer.weight, layer.bias))
    output = layer(ours)
    expected = reference.iter_norm(theirs, weight, bias, group_size=group_size, num_iters=num_iters)
    output.backward(grad_output)
    expected.backward(grad_output)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    for found, wanted in ((ours, theirs), (layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(found.grad.flatten(), wanted.grad.flatten(), rtol=1e-9, atol=1e-11)


def test_authors_formulation_refuses_a_ragged_group():
    with pytest.raises(ValueError, match="num_features=6 is not a multiple of group_size=4"):
        CopyingIterNorm(6, group_size=4)


@pytest.mark.parametrize("num_channels", [64, 128])
def test_standard_candidates_are_the_rows_of_table_a1(num_channels):
    candidates = {candidate.name: candidate for candidate in bench.standard_candidates(num_channels)}
    named = {candidate.paper for candidate in candidates.values() if candidate.paper}
    assert named == set(bench.PAPER_MS) - {"nn convolution"}
    assert candidates[f"IterNorm T=5 d={num_channels}"].paper == "IterNorm, T=5"
    assert ("IterNorm T=5 d=128" in candidates) == (num_channels == 128)
    x = torch.randn(2, num_channels, 4, 4)
    for candidate in candidates.values():
        assert candidate.make()(x).shape == x.shape


def test_run_times_every_candidate_in_every_round():
    calls = []
    result = bench.run([TINY], rounds=3, candidates=tiny_candidates, progress=lambda: calls.append(1))
    assert json.loads(json.dumps(result)) == result
    assert len(calls) == bench.count_timings([TINY], rounds=3, candidates=tiny_candidates)
    (case,) = result["cases"]
    assert case["shape"] == [6, 8, 5, 5]
    assert [row["name"] for row in case["rivals"]] == [candidate.name for candidate in tiny_candidates(8)]
    by_name = {row["name"]: row for row in case["rivals"]}
    for row in case["rivals"]:
        assert len(row["samples_ms"]) == 3
        assert row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["median_ms"] == sorted(row["samples_ms"])[1]
        assert row["ratio_to_convolution"] == row["median_ms"] / by_name["conv3x3"]["median_ms"]
        assert row["ratio_to_batch_norm"] == row["median_ms"] / by_name["BatchNorm2d"]["median_ms"]
        # Table A1 knows nothing of 8 channels.
        assert row["paper_ms"] is None
    assert result["settings"]["rounds"] == 3
    assert result["provenance"]["device"] == "cpu"


def test_everybody_has_a_turn_each_round_and_nobody_always_follows_the_same(monkeypatch):
    order = []
    monkeypatch.setattr(CpuDevice, "milliseconds", lambda self, entry: order.append(entry.candidate.name) or 1.0)
    candidates = [Candidate(name, nn.Identity) for name in "abcd"]
    bench.run([TINY], rounds=15, candidates=lambda num_channels: candidates)
    rounds = ["".join(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert len(rounds) == comparison.WARMUP_ROUNDS + 15
    assert all(sorted(names) == list("abcd") for names in rounds)
    # Everyone follows everyone else at some time.
    assert len({pair for names in rounds for pair in itertools.pairwise(names)}) == 12


def test_paper_ratio_is_to_the_cudnn_convolution(monkeypatch):
    monkeypatch.setattr(CpuDevice, "milliseconds", lambda self, entry: 1.0)
    monkeypatch.setattr(CpuDevice, "peak_bytes", lambda self, entry: 0)
    result = bench.run([Case((2, 64, 2, 2))], rounds=1)
    ratios = {row["name"]: row["paper_ratio_to_convolution"] for row in result["cases"][0]["rivals"]}
    assert ratios["conv3x3"] == 1
    assert ratios["DBN d=16"] == pytest.approx(15.92 / 5.65)
    assert ratios["IterNorm T=7 d=64"] == pytest.approx(8.21 / 5.65)
    assert ratios["BatchNorm2d"] is None


class Copies(nn.Module):
    """Holds `count` copies of its input at a time, and none in the backward."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        copies = [x.detach().clone() for _ in range(self.count)]
        return x * len(copies)


@pytest.mark.parametrize("count", [2, 5])
def test_memory_counts_what_is_alive_at_once(count):
    case = Case((16, 8, 32, 32))
    x, grad_output = case.make(torch.device("cpu"))
    entry = Entry(Candidate("copies", lambda: Copies(count)), case, torch.device("cpu"), x, grad_output)
    # The copies and the output; the gradient of the input comes when the copies are gone.
    activation = x.numel() * x.element_size()
    assert CpuDevice().peak_bytes(entry) / activation == pytest.approx(count + 1, abs=0.01)


def test_memory_measurement_leaves_standard_error_as_it_was(capfd):
    bench.run([TINY], rounds=1, candidates=lambda num_channels: [Candidate("BatchNorm2d", lambda: nn.BatchNorm2d(8))])
    print("still here", file=sys.stderr)
    assert capfd.readouterr().err == "still here\n"


def test_case_is_the_same_every_time_and_in_the_layout_asked_for():
    x, grad_output = Case((2, 4, 3, 3), torch.float64, channels_last=True).make(torch.device("cpu"))
    again, _ = Case((2, 4, 3, 3), torch.float64, channels_last=True).make(torch.device("cpu"))
    assert torch.equal(x, again)
    assert x.dtype == torch.float64
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert grad_output.is_contiguous(memory_format=torch.channels_last)


def test_threads_are_set_for_the_run_and_restored():
    before = torch.get_num_threads()
    result = bench.run(
        [TINY], rounds=1, threads=before + 1, candidates=lambda num_channels: tiny_candidates(num_channels)[:2]
    )
    assert result["provenance"]["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device='tpu' is not known here"),
        ({"rounds": 0}, "rounds=0 times nothing"),
        ({"threads": 0}, "threads=0 is no number of threads"),
        ({"quick": True}, "quick=True is for device='cuda'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bench.check_arguments(**{"device": "cpu", "rounds": 1, **arguments})


def test_run_checks_its_arguments():
    with pytest.raises(ValueError, match="rounds=0 times nothing"):
        bench.run([TINY], rounds=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_an_error():
    with pytest.raises(ValueError, match="device='cuda' needs a CUDA device"):
        bench.check_arguments("cuda", 1)


@pytest.mark.parametrize("answers", [{-3: 1, -1: 1}, {-3: 0, -1: 1}, {-3: 1, -1: 0}])
def test_malloc_thresholds_are_both_set_or_said_not_to_be(monkeypatch, answers):
    class Library:
        def mallopt(self, parameter, value):
            assert value >= 1 << 30
            return answers[parameter]

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert set_malloc_thresholds() is all(answers.values())


def test_malloc_thresholds_where_the_library_has_none(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert set_malloc_thresholds() is False


@pytest.mark.parametrize(("was_set", "words"), [(True, "glibc was told"), (False, "could not be set"), (None, None)])
def test_notes_say_what_was_done_to_the_allocator(was_set, words):
    result = bench.run([TINY], rounds=1, candidates=lambda num_channels: tiny_candidates(num_channels)[:2])
    result["settings"]["malloc_thresholds_set"] = was_set
    text = "\n".join(bench.notes(result))
    assert all((phrase in text) == (phrase == words) for phrase in ("glibc was told", "could not be set"))


def test_table_has_a_row_a_candidate_and_fits_eighty_columns():
    from rich.console import Console

    result = bench.run([TINY], rounds=1, candidates=tiny_candidates)
    case = result["cases"][0]
    wide = {"median_ms": 1234.56, "max_ms": 20000.0, "ratio_to_convolution": 123.45, "ratio_to_batch_norm": 123.45}
    case["rivals"] = [
        {**case["rivals"][0], **wide, "name": candidate.name} for candidate in bench.standard_candidates(128)
    ]
    console = Console(width=80, record=True, file=StringIO())
    console.print(bench.table(case))
    text = console.export_text()
    assert all(candidate.name in text for candidate in bench.standard_candidates(128))
    assert "…" not in text
