"""Tools that look for BatchNorm by its class: each finds the layers and works, or fails before it does harm."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_same_state, correlated, state_of
from functorch.experimental import replace_all_batch_norm_modules_
from third_party import BatchNormAct2d
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import AveragedModel, update_bn

import iternorm
from iternorm import IterNorm2d, SyncIterNorm
from iternorm.timing.gpu.synchronized import absent_ranks

LAYERS = [
    iternorm.IterNorm1d,
    iternorm.IterNorm2d,
    iternorm.IterNorm3d,
    iternorm.SyncIterNorm,
    iternorm.DecorrelatedBatchNorm1d,
    iternorm.DecorrelatedBatchNorm2d,
    iternorm.DecorrelatedBatchNorm3d,
]


def network(norm: Callable[..., nn.Module] = IterNorm2d) -> Any:
    """With a BatchNorm behind the layer, in fp64."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), norm(6, group_size=4), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4)
    ).double()


def data(batches=4):
    return [correlated(8, 3, 6, 6) for _ in range(batches)]


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_is_found_and_has_no_variance_to_take(kind):
    layer = kind(6)
    assert isinstance(layer, _BatchNorm)
    assert not hasattr(layer, "running_var")
    with pytest.raises(AttributeError, match=rf"{kind.__name__} has no running_var: it keeps running_whitening"):
        _ = layer.running_var
    with pytest.raises(AttributeError, match=r"iternorm\.recalibrate\(model, batches\) to set statistics"):
        layer.running_var = torch.ones(6)
    assert "running_var" not in layer.state_dict()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = layer.nonsense


@pytest.mark.parametrize("running", ["whitening", "covariance"])
def test_update_bn_averages_over_the_data(running):
    model = network(lambda channels, **words: IterNorm2d(channels, running=running, **words))
    batches = data()
    for x in batches:
        model(100 * x)
    update_bn([(x, None) for x in batches], model)
    layer, inputs = model[1], [model[0](x) for x in batches]
    # One batch at a time, with a share of all of it.
    matrices, means = [], []
    for x in inputs:
        alone = IterNorm2d(6, momentum=1.0, group_size=4, running=running).double()
        alone(x)
        matrices.append(alone.running_matrix)
        means.append(alone.running_mean)
    torch.testing.assert_close(layer.running_matrix, torch.stack(matrices).mean(0))
    torch.testing.assert_close(layer.running_mean, torch.stack(means).mean(0))
    assert layer.num_batches_tracked == len(batches)
    assert layer.momentum == 0.1


def test_update_bn_of_averaged_weights_without_any_batch_norm():
    model = nn.Sequential(nn.Linear(3, 6), iternorm.IterNorm1d(6))
    averaged: Any = AveragedModel(model)
    batches = [torch.randn(16, 3) for _ in range(3)]
    for x in batches:
        model(x)
        averaged.update_parameters(model)
    before = state_of(averaged.module[1])
    update_bn(batches, averaged)
    assert averaged.module[1].num_batches_tracked == 3
    assert not torch.equal(averaged.module[1].running_whitening, before["running_whitening"])


def test_update_bn_leaves_frozen_layers_and_says_so():
    model = network()
    model(data(1)[0])
    iternorm.freeze(model, where=lambda name, layer: name in ("1", "4"))
    before = state_of(model)
    with pytest.warns(UserWarning, match="is frozen and keeps its statistics; call iternorm.unfreeze first") as found:
        update_bn(data(), model)
    assert len(found) == 2
    assert_same_state(model, before)
    # A copy, and what is made of it, stays frozen.
    others: tuple[Any, ...] = (copy.deepcopy(model), iternorm.convert_sync_iternorm(copy.deepcopy(model)))
    for other in others:
        with pytest.warns(UserWarning, match="is frozen"):
            other[1].reset_running_stats()
        torch.testing.assert_close(other.get_buffer("1.running_mean"), before["1.running_mean"])
    iternorm.unfreeze(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_bn(data(), model)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


@pytest.mark.parametrize("norm", [IterNorm2d, SyncIterNorm, iternorm.DecorrelatedBatchNorm2d])
def test_torchs_synchronization_raises_and_leaves_the_layer(norm):
    model = network(norm)
    layer, before = model[1], state_of(model[1])
    with pytest.raises(AttributeError, match=r"iternorm\.convert_sync_iternorm\(model, batchnorm=True\)"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[1] is layer
    assert_same_state(layer, before)


def test_both_kinds_are_synchronized_by_ours():
    model = network()
    model(data(1)[0])
    before, parameters = state_of(model), [id(p) for p in model.parameters()]
    seen = []
    model[4].register_forward_hook(lambda *_: seen.append(1))
    iternorm.freeze(model, where=lambda name, layer: name == "4")
    assert iternorm.convert_sync_iternorm(model, batchnorm=True) is model
    assert [type(m) for m in model] == [nn.Conv2d, SyncIterNorm, nn.ReLU, nn.Conv2d, nn.SyncBatchNorm]
    assert_same_state(model, before)
    assert [id(p) for p in model.parameters()] == parameters
    assert not model.train()[4].training
    model.eval()(data(1)[0])
    assert seen
    # Without the word, as before.
    other = iternorm.convert_sync_iternorm(network())
    assert [type(m) for m in [*other.children()][1::3]] == [SyncIterNorm, nn.BatchNorm2d]


def test_a_batch_norm_that_cannot_be_synchronized_is_named():
    model = nn.Sequential(
        IterNorm2d(4), BatchNormAct2d(4, nn.ReLU), nn.BatchNorm2d(4, affine=False), nn.LazyBatchNorm2d()
    )
    with pytest.warns(UserWarning, match=r"stay as they are: 1 \(BatchNormAct2d\), 3 \(LazyBatchNorm2d\)"):
        iternorm.convert_sync_iternorm(model, batchnorm=True)
    assert [type(m) for m in model] == [SyncIterNorm, BatchNormAct2d, nn.SyncBatchNorm, nn.LazyBatchNorm2d]
    assert model[2].weight is None


def test_fusing_raises_and_folding_works():
    model = network().eval()
    with pytest.raises(AttributeError, match=r"iternorm\.fold\(model\.eval\(\)\) to fuse"):
        fuse_conv_bn_eval(model[0], model[1])
    x = data(1)[0]
    torch.testing.assert_close(iternorm.fold(model)[0](x), model(x))


def test_torch_func_removes_the_statistics_of_both_kinds():
    model = network()
    model(data(1)[0])
    replace_all_batch_norm_modules_(model)
    assert not [name for name, _ in model.named_buffers()]
    x = data(1)[0]
    # Then eval uses the batch, as in BatchNorm.
    torch.testing.assert_close(model.eval()(x), model.train()(x))
    with pytest.raises(ValueError, match="keeps no running statistics"):
        iternorm.fold(model.eval())


def test_idioms_of_training_loops_and_trainers():
    """What Lightning's finetuning, mmengine's norm_eval, SAM and weight decay by class do to each `_BatchNorm`."""
    model, x = network().train(), data(1)[0]
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    assert norms == [model[1], model[4]]

    def changes():
        before = state_of(model[1])
        model(x)
        return any(
            not torch.equal(value, before[name]) for name, value in model[1].state_dict().items() if "running" in name
        )

    assert changes()
    for norm in norms:
        norm.track_running_stats = False
    assert not changes()
    for norm in norms:
        norm.track_running_stats = True
    for norm in norms:
        norm.eval()
    assert not changes()
    model.train()
    for norm in norms:
        norm.momentum = 0
    assert not changes()
    for norm in norms:
        norm.momentum = 0.1
    assert changes()


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp_keeps_the_layer_out_of_mixed_precision():
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    # Not gloo: see the test of DistributedDataParallel in test_torch.py.
    with absent_ranks(1):
        precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        with warnings.catch_warnings():
            # It says that it keeps these layers in fp32.
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(
                network().float(),
                mixed_precision=precision,
                auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}),
                device_id=torch.device("cpu"),
            )
        seen = {}
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, _BatchNorm)):
                module.register_forward_hook(lambda m, a, _: seen.update({type(m): (a[0].dtype, m.weight.dtype)}))
        output = model(data(1)[0].float())
        output.float().cos().sum().backward()
        assert output.dtype == torch.bfloat16
        assert seen[nn.Conv2d] == (torch.bfloat16,) * 2
        assert seen[IterNorm2d] == seen[nn.BatchNorm2d] == (torch.float32,) * 2
        layer = next(m for m in model.modules() if isinstance(m, IterNorm2d))
        assert layer.running_whitening.dtype == torch.float32
