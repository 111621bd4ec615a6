"""The benchmark of synchronized layers: what is timed, what is sent, what fails is said."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_gpu import FakeGpu
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from iternorm import IterNorm2d, SyncIterNorm, bench
from iternorm.bench.gpu import synchronized as benchmark
from iternorm.timing.gpu import synchronized as timing
from iternorm.whitening.processes import collective


def test_layers_are_timed_in_a_group_of_absent_ranks(monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPES", ((4, 8, 3, 3),))
    monkeypatch.setattr(benchmark, "RANKS", (2, 64))
    saved, done = [], []
    result = benchmark.run_synchronized(
        rounds=2, gpu=FakeGpu(), save=lambda r: saved.append(len(r["layers"])), progress=done.append
    )
    assert saved == [1, 2]
    assert done == ["4x8x3x3 2 ranks", "4x8x3x3 64 ranks"]
    part = result["layers"][1]
    assert part["ranks"] == 64
    assert part["sent_bytes"] == {"all_gather": 4 * 73, "all_reduce": 4 * 72}
    batch_norm, alone, together = part["rows"]
    # SyncBatchNorm takes no CPU tensors.
    assert batch_norm["failed"] is not None
    assert together["name"] == "SyncIterNorm"
    assert together["failed"] is None
    # Small activations have three times as many timings.
    assert len(together["samples_ms"]) == 6
    assert together["ratio_to_iter_norm"] == alone["ratio_to_iter_norm"] == 1
    text = "\n".join(benchmark.synchronized_lines(result))
    assert "4x8x3x3, 64 ranks; SyncIterNorm sends 292 bytes forward (all-gather), 288 backward (all-reduce)" in text
    assert "failed: SyncBatchNorm" in text
    assert not dist.is_initialized()


def test_absent_ranks_have_the_batch_of_this_one():
    x = torch.randn(6, 8)
    with timing.absent_ranks(5):
        group = collective.active_group(None)
        assert group is not None
        sent = torch.arange(3.0) + 1
        gathered, total = torch.empty(15), sent.clone()
        collective.gather_moments_eagerly(gathered, sent, group)
        collective.sum_over_ranks_eagerly(total, group)
        assert torch.equal(gathered, sent.repeat(5))
        assert torch.equal(total, sent)
        layer = SyncIterNorm(8, group_size=4)
        y = layer(x)
        with pytest.raises(RuntimeError, match="initialized already"), timing.absent_ranks(2):
            pass
    torch.testing.assert_close(y, IterNorm2d(8, group_size=4)(x[:, :, None, None])[:, :, 0, 0])


def test_on_a_gpu_collectives_do_nothing():
    sent, gathered, integers = torch.arange(3.0), torch.zeros(15), torch.tensor([[4, 5]])
    agreed = torch.zeros(5, 2, dtype=torch.int64)
    with timing.absent_ranks(5, "cuda"):
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
        backend._allgather_base(gathered, sent, AllgatherOptions()).wait()
        backend.allreduce([sent], AllreduceOptions()).wait()
        # Whether ranks agree is answered.
        backend._allgather_base(agreed, integers, AllgatherOptions()).wait()
    assert torch.equal(gathered, torch.zeros(15))
    assert torch.equal(sent, torch.arange(3.0))
    assert torch.equal(agreed, integers.repeat(5, 1))


@pytest.mark.parametrize(
    ("device", "words", "message"),
    [
        ("cpu", {}, "add --device cuda"),
        ("cuda", {"networks": True}, "--networks and --sync do not go together"),
        ("cuda", {"quick": True}, "--sync and --quick do not go together"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(device, words, message):
    with pytest.raises(ValueError, match=message):
        bench.check_arguments(device, 3, sync=True, **words)
