"""Two and three processes equal one process on the concatenated batch; and what happens when they cannot."""

import copy
import gc
import pickle
import weakref

import pytest
import sync_ranks
import torch
import torch.distributed as dist
from checks import groups_between
from sync_checks import SIZE, assert_equal_to_one_process, loaded, running, shared_results_of
from sync_ranks import CASES

import iternorm
from iternorm.whitening.processes import collective


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return shared_results_of("everything", tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process_on_the_concatenated_batch(ranks, name):
    assert_equal_to_one_process([rank[name] for rank in ranks], CASES[name])


@pytest.mark.parametrize("name", sync_ranks.COMPILED)
def test_full_graph_compile_equals_one_process(ranks, name):
    assert_equal_to_one_process([rank["compiled", name] for rank in ranks], CASES[name])


def test_processes_that_share_a_batch_are_not_warned_of_their_part(ranks):
    assert [rank["warnings of a small part"] for rank in ranks] == [[]] * SIZE


def test_ranks_shuffle_alike_and_anew_each_time(ranks):
    layer = iternorm.DecorrelatedBatchNorm1d(6, group_size=2, track_running_stats=False)
    found = []
    for parts in zip(*(rank["shuffled"] for rank in ranks), strict=True):
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        found.append(groups_between(x, y, layer, 2))
    assert None not in found
    assert len(set(found)) > 1


@pytest.mark.parametrize("name", ["solver", "group_size", "num_iters", "fp64"])
def test_disagreement_on_what_decides_the_result_is_an_error(ranks, name):
    for rank in ranks:
        assert f"the ranks of the process group disagree on {name}" in rank[f"disagree, {name}"]


def test_ranks_of_another_group_are_asked_anew(ranks):
    for rank in ranks:
        assert "the ranks of the process group disagree on num_iters" in rank["disagree, in another group"]


def test_a_layer_that_was_saved_has_agreed_with_nobody():
    layer = iternorm.SyncIterNorm(4)
    layer._agreed = "0"
    assert pickle.loads(pickle.dumps(layer))._agreed is None


def test_subgroups_synchronize_among_themselves(ranks):
    case = CASES["ragged groups"]
    assert_equal_to_one_process([rank["subgroup"] for rank in ranks[:2]], case, members=(0, 1))
    assert_equal_to_one_process([ranks[2]["subgroup"]], case, members=(2,))


def test_one_collective_forward_one_backward_none_in_eval(ranks):
    expected = {"forward": ["all_gather_into_tensor"], "backward": ["all_reduce"], "eval": []}
    assert [rank["collectives"] for rank in ranks] == [expected] * SIZE


def test_gathering_by_a_sum_is_the_same(ranks):
    for rank in ranks:
        by_sum, expected = rank["gathered by a sum"], rank["ragged groups"]
        torch.testing.assert_close(by_sum, expected, rtol=0, atol=0)


def test_disagreement_on_channels_is_an_error_on_every_rank(ranks):
    for rank in ranks:
        assert rank["disagree"].startswith("ValueError: the ranks of the process group disagree on the channel count")
        assert "rank 0: 6, rank 1: 6, rank 2: 5" in rank["disagree"]
        assert "rank 0: 6, rank 1: 5, rank 2: 6" in rank["disagree, input"]


def test_one_value_over_all_ranks_is_an_error_on_every_rank(ranks):
    for rank in ranks:
        assert rank["one value"].startswith("ValueError: Expected more than 1 value per channel when training, got 1")


def test_second_derivatives_raise(ranks):
    for rank in ranks:
        assert rank["second derivative"].startswith("RuntimeError: a graph of the backward (create_graph=True)")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_data_parallel_gradients_are_the_mean_over_ranks_of_the_whole_batch(ranks, kind):
    if kind not in ranks[0]:
        pytest.skip("torch 2.6 shards on GPUs only")
    model = sync_ranks.network()
    model(sync_ranks.network_batch()).square().sum().backward()
    for rank in ranks:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(rank[kind][name] * SIZE, parameter.grad, rtol=1e-10, atol=1e-9)


def test_recalibration_merges_what_the_ranks_saw(ranks):
    layer = iternorm.IterNorm2d(10, group_size=4, dtype=torch.float64)
    iternorm.recalibrate(layer, [x for x, _ in sync_ranks.batches(CASES["ragged groups"])], progress=False)
    for rank in ranks:
        for name, value in layer.state_dict().items():
            torch.testing.assert_close(rank["recalibrated"][name], value, rtol=1e-10, atol=1e-10)


def test_recalibration_merges_batchnorm_too_and_warns_of_what_no_rank_reached(ranks):
    layer = torch.nn.BatchNorm2d(10, dtype=torch.float64)
    iternorm.recalibrate(layer, [x for x, _ in sync_ranks.batches(CASES["ragged groups"])], progress=False)
    for rank in ranks:
        state, messages = rank["recalibrated, mixed"]
        torch.testing.assert_close(state, layer.state_dict(), rtol=1e-10, atol=1e-10)
        assert messages == ["no batch reached these layers, which keep their statistics: 1"]


def test_a_dead_or_silent_rank_is_an_error_within_the_timeout(tmp_path):
    with running("broken", tmp_path) as processes:
        output, _ = processes[0].communicate(timeout=120)
        assert processes[0].returncode == 0, output
    results = loaded(tmp_path, 0)
    for name in ("dead", "silent"):
        message, seconds = results[name]
        assert "Error" in message, name
        # The group's timeout is 4 s; what is waited for here is that no rank hangs.
        assert seconds < 20, (name, message)


def test_outside_a_process_group_it_is_iter_norm():
    torch.manual_seed(0)
    for shape in ((8, 6), (8, 6, 3), (8, 6, 3, 2), (4, 6, 2, 2, 2)):
        layer = iternorm.SyncIterNorm(6, group_size=4)
        base = [iternorm.IterNorm1d, iternorm.IterNorm1d, iternorm.IterNorm2d, iternorm.IterNorm3d][len(shape) - 2]
        base = base(6, group_size=4)
        x = torch.randn(shape)
        assert torch.equal(layer(x), base(x))
        assert torch.equal(layer.get_buffer("running_whitening"), base.get_buffer("running_whitening"))
        assert torch.equal(layer.eval()(x), base.eval()(x))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        iternorm.SyncIterNorm(6)(torch.randn(1, 6))


def test_merged_moments_keep_what_sums_about_zero_lose():
    """Why moments are gathered and merged: a mean of 1000 deviations in fp32."""
    torch.manual_seed(0)
    x = torch.randn(3, 4096, 8) + 1000
    exact = torch.cov(x.double().flatten(0, 1).T, correction=0)
    counts = torch.tensor([2048.0, 0.0, 4096.0])
    pieces = [piece[: int(n)] for piece, n in zip(x, counts, strict=True)]
    exact = torch.cov(torch.cat(pieces).double().T, correction=0)
    means = torch.stack([p.mean(0) if len(p) else torch.zeros(8) for p in pieces])
    covariances = torch.stack([torch.cov(p.T, correction=0) if len(p) else torch.zeros(8, 8) for p in pieces])
    num_samples, mean, covariance = collective.merge_moments(counts, means, covariances[:, None])
    assert num_samples == 6144
    torch.testing.assert_close(mean.double(), torch.cat(pieces).double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(covariance[0].double(), exact, rtol=0, atol=1e-5)
    sums = sum(p.T @ p for p in pieces) / num_samples - torch.outer(mean, mean)
    assert (sums.double() - exact).abs().max() > 0.1


@pytest.mark.parametrize("kind", [iternorm.SyncIterNorm, iternorm.SyncDecorrelatedBatchNorm])
def test_a_layer_and_its_copy_keep_their_group(kind):
    group = object()
    layer = kind(4, process_group=group)
    assert layer.process_group is copy.deepcopy(layer).process_group is group


def test_an_implementation_that_does_not_synchronize_raises():
    with pytest.raises(ValueError, match='impl="reference" does not synchronize'):
        iternorm.SyncIterNorm(4, impl="reference")


@pytest.fixture
def fake_group():
    """Two ranks of which the other one is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_transforms_do_not_reach_over_processes(fake_group):
    x = torch.randn(9, 4)
    for kind in (iternorm.SyncIterNorm, iternorm.SyncDecorrelatedBatchNorm):
        layer = kind(4, track_running_stats=False)
        layer(x)
        with pytest.raises(RuntimeError, match=r"a function transform .* does not reach over processes; use IterNorm"):
            torch.func.grad(lambda x, layer=layer: layer(x).sum())(x)


def test_a_group_that_was_destroyed_is_not_kept_alive(fake_group):
    """What still lives when the interpreter ends may crash it."""
    try:
        group = weakref.ref(dist.group.WORLD)
        y = iternorm.SyncIterNorm(4)(torch.randn(9, 4, requires_grad=True))
        y.sum().backward()
        del y
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert group() is None
    assert collective.active_group(None) is None
