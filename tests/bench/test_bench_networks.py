"""The benchmark of whole networks: what is timed, what fails is said, tables."""

import pytest
import torch
from fake_gpu import FakeGpu
from torch import nn

from iternorm import bench
from iternorm.bench.gpu import networks as benchmark
from iternorm.timing.gpu import networks as timing


class Tiny(nn.Sequential):
    def __init__(self, num_classes: int, norm):
        super().__init__(
            nn.Conv2d(3, 4, 3, bias=False),
            norm(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, num_classes),
        )


@pytest.fixture
def tiny(monkeypatch):
    network = timing.Network("Tiny", Tiny, 4, 8, (None,))
    monkeypatch.setattr(benchmark, "networks", lambda: [network])
    monkeypatch.setattr(benchmark, "JUNCTIONS", ())
    return network


def test_a_network_is_timed_with_each_normalization_and_with_fused_layers(tiny):
    saved, done = [], []
    result = benchmark.run_networks(
        rounds=2, gpu=FakeGpu(), save=lambda r: saved.append(len(r["networks"])), progress=done.append
    )
    (part,) = result["networks"]
    assert [row["name"] for row in part["rows"]] == ["BatchNorm2d", "IterNorm d=64", "IterNorm d=64 fused"]
    assert all(row["failed"] is None and len(row["samples_ms"]) == 2 for row in part["rows"])
    assert part["rows"][1]["ratio_to_batch_norm"] == 1
    assert saved == [1]
    assert done == ["Tiny 4 eager"]
    text = "\n".join(benchmark.network_lines(result))
    assert "Tiny, batch 4, eager" in text
    assert "| Tiny, batch 4, eager | 2.00 | 2.00 | 1.00 | 2.00 | 1.00 |" in benchmark.markdown_networks(result)
    assert "| Tiny, batch 4 | 1.00 | 1.00 | – | – |" in benchmark.markdown_ratios(result)


def test_what_fails_is_in_the_result_with_the_reason(tiny, monkeypatch):
    def broken(channels):
        raise RuntimeError("no such layer")

    monkeypatch.setattr(benchmark, "norms", lambda: {"BatchNorm2d": nn.BatchNorm2d, "IterNorm d=64": broken})
    result = benchmark.run_networks(rounds=1, gpu=FakeGpu())
    row = result["networks"][0]["rows"][1]
    assert "no such layer" in row["failed"]
    assert row["step_ms"] is None
    assert any("no such layer" in line for line in benchmark.network_lines(result))


def test_parts_are_chosen_by_name(tiny):
    assert benchmark.run_networks(rounds=1, only=["VGG 256 eager"], gpu=FakeGpu())["networks"] == []


def test_the_junction_of_each_kind_computes_the_same():
    x = {}
    for name, residual in (("apart", False), ("joined", True)):
        torch.manual_seed(0)
        from iternorm import IterNorm2d

        make = (lambda c: IterNorm2d(c, activation="relu")) if residual else (lambda c: timing.Junction(IterNorm2d(c)))
        step = timing.JunctionStep((4, 8, 3, 3), torch.device("cpu"), make)
        step()
        x[name] = step.call(*step.inputs).detach()
    torch.testing.assert_close(x["joined"], x["apart"], rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("device", "quick", "words"), [("cpu", False, "add --device cuda"), ("cuda", True, "do not go together")]
)
def test_arguments_that_do_not_fit_are_refused(device, quick, words):
    with pytest.raises(ValueError, match=words):
        bench.check_arguments(device, 3, None, quick, networks=True)
