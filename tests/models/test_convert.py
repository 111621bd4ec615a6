"""A model with BatchNorm becomes the same model with IterNorm: on third-party networks, and in every corner."""

import copy
import pickle

import pytest
import third_party
import torch
from third_party import BatchNormAct2d, logits
from torch import fx, nn
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm

import iternorm
from iternorm import (
    ConversionReport,
    IterNorm1d,
    IterNorm2d,
    IterNorm3d,
    SyncIterNorm,
    convert_batchnorm,
    convert_to_batchnorm,
    decorrelate_features,
)


class BatchNormHalved(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) / 2


class BatchNormMasked(nn.BatchNorm2d):
    def forward(self, input, mask=None):
        output = super().forward(input)
        return output if mask is None else output * mask


class BatchNormInEval(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class BatchNormOfAnyRank(nn.BatchNorm2d):
    """Takes batches of vectors too."""

    def _check_input_dim(self, input):
        pass


class BatchNormNamed(nn.BatchNorm2d):
    """A subclass that only adds attributes."""

    def __init__(self, *args, label="x", **words):
        super().__init__(*args, **words)
        self.label = label


def trained(layer):
    """The layer with parameters and statistics that are not those of a new one."""
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.uniform_(0.5, 1.5)
        if layer.bias is not None:
            layer.bias.normal_()
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.2, 3)
        layer.num_batches_tracked.fill_(7)
    return layer


@pytest.mark.parametrize("name", third_party.MODELS)
def test_third_party_model_converts_keeps_its_output_and_trains(name):
    model, x = third_party.build(name)
    batchnorms = {key: m for key, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    with torch.no_grad():
        expected = logits(model, x)
    parameters = [id(p) for p in model.parameters()]
    report = ConversionReport()
    assert convert_batchnorm(model, report=report) is model
    assert [key for key, _ in report.converted] == list(batchnorms)
    assert not report.skipped
    for key, old in batchnorms.items():
        new = model.get_submodule(key)
        assert type(new) is (IterNorm3d if isinstance(old, nn.BatchNorm3d) else IterNorm2d)
        assert (new.eps, new.momentum) == (old.eps, old.momentum)
    assert [id(p) for p in model.parameters()] == parameters
    with torch.no_grad():
        torch.testing.assert_close(logits(model, x), expected, rtol=1e-5, atol=1e-5)

    model.train()
    before = [p.detach().clone() for p in model.parameters()]
    logits(model, x).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) > len(before) // 2
    assert all(m.running_whitening.isfinite().all() for m in model.modules() if isinstance(m, IterNorm2d))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("batchnorm", "iternorm_class", "shape"),
    [
        (nn.BatchNorm1d, IterNorm1d, (7,)),
        (nn.BatchNorm1d, IterNorm1d, (7, 3)),
        (nn.BatchNorm2d, IterNorm2d, (7, 3, 2)),
        (nn.BatchNorm3d, IterNorm3d, (7, 3, 2, 2)),
        (nn.SyncBatchNorm, SyncIterNorm, (7, 3, 2)),
    ],
)
def test_each_rank_and_dtype(batchnorm, iternorm_class, shape, dtype):
    layer = trained(batchnorm(7, eps=1e-3, momentum=None, dtype=dtype)).eval()
    x = torch.randn(4, *shape, dtype=dtype)
    expected = layer(x)
    new = convert_batchnorm(layer, group_size=3, num_iters=4)
    assert type(new) is iternorm_class
    assert (new.eps, new.momentum, new.group_size, new.num_iters) == (1e-3, None, 3, 4)
    assert {t.dtype for t in new.state_dict().values()} == {dtype, torch.int64}
    assert new.num_batches_tracked == 7
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(new(x), expected, rtol=tolerance, atol=tolerance)
    # The state of the way back is the state it had.
    back = convert_to_batchnorm(new)
    assert type(back) is batchnorm
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], value, rtol=tolerance, atol=tolerance)


def test_mode_requires_grad_hooks_and_attributes_are_carried():
    layer = trained(BatchNormNamed(4, label="stem"))
    layer.weight.requires_grad_(False)
    layer.register_buffer("extra", torch.ones(2), persistent=False)
    calls = []
    handle = layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.register_load_state_dict_pre_hook(lambda module, *_: calls.append(type(module).__name__))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), layer).train()
    layer.eval()
    convert_batchnorm(model)
    new = model[1]
    assert type(new) is IterNorm2d
    assert not new.training
    assert model.training
    assert not new.weight.requires_grad
    assert new.bias.requires_grad
    assert new.label == "stem"
    assert new.extra.sum() == 2
    assert "extra" not in new.state_dict()
    model(torch.randn(2, 3, 2, 2)).sum().backward()
    model.load_state_dict(model.state_dict())
    assert calls == ["forward", "backward", "IterNorm2d"]
    handle.remove()
    model(torch.randn(2, 3, 2, 2))
    assert calls.count("forward") == 1


def test_without_affine_bias_or_statistics():
    x = torch.randn(4, 6, 3)
    layer = trained(nn.BatchNorm1d(6, affine=False)).eval()
    torch.testing.assert_close(convert_batchnorm(layer)(x), layer(x))
    # BatchNorm1d(6, bias=False), which torch has since 2.13.
    layer = nn.BatchNorm1d(6)
    layer.register_parameter("bias", None)
    layer = trained(layer).eval()
    new = convert_batchnorm(layer)
    assert new.bias is None
    torch.testing.assert_close(new(x), layer(x))
    layer = nn.BatchNorm1d(6, track_running_stats=False).eval()
    # A group of one channel whitens as BatchNorm does, on the batch's own statistics.
    new = convert_batchnorm(layer, group_size=1)
    assert new.running_mean is None
    torch.testing.assert_close(new(x), layer(x))


def test_shared_layers_stay_shared():
    norm = trained(nn.BatchNorm1d(4))
    model = nn.ModuleDict({"a": nn.Sequential(norm, nn.ReLU()), "b": nn.Sequential(nn.Tanh(), norm)})
    convert_batchnorm(model)
    assert type(model.get_submodule("a.0")) is IterNorm1d
    assert model.get_submodule("a.0") is model.get_submodule("b.1")


def test_where():
    def network():
        return nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(8)))

    def kinds(model):
        return [type(m) for m in model.modules() if not isinstance(m, nn.Sequential)]

    assert kinds(convert_batchnorm(network(), where="all")) == [IterNorm1d] * 3
    assert kinds(convert_batchnorm(network(), where="first")) == [IterNorm1d, nn.BatchNorm1d, nn.BatchNorm1d]
    wide = convert_batchnorm(network(), where=lambda name, module: bool(module.num_features == 8) and name == "1.1")
    assert kinds(wide) == [nn.BatchNorm1d, nn.BatchNorm1d, IterNorm1d]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"where": "last"}, ValueError, "where='last' is not known"),
        ({"group_size": 0}, ValueError, "group_size=0 must be at least 1"),
        ({"num_iters": -1}, ValueError, "num_iters=-1 must be at least 0"),
        ({"running": "mean"}, ValueError, "running='mean' is not known"),
        ({"impl": "fast"}, ValueError, "impl='fast' is not known"),
        ({"where": lambda name, module: 1 / 0}, ZeroDivisionError, "division"),
    ],
)
def test_bad_arguments_leave_the_model_as_it_was(words, error, message):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    children = list(model)
    with pytest.raises(error, match=message):
        convert_batchnorm(model, **words)
    assert list(model) == children


def test_first_needs_a_batchnorm_that_can_be_converted():
    with pytest.raises(ValueError, match='where="first" needs a BatchNorm layer, and the model has none'):
        convert_batchnorm(nn.Linear(2, 2), where="first")
    with pytest.raises(ValueError, match="the first BatchNorm cannot be converted: 0: BatchNormHalved has a forward"):
        convert_batchnorm(nn.Sequential(BatchNormHalved(2), nn.BatchNorm2d(2)), where="first")
    with pytest.warns(UserWarning, match="no BatchNorm layer was selected"):
        convert_batchnorm(nn.Linear(2, 2))


def test_what_cannot_be_converted_is_named():
    parametrized = nn.BatchNorm2d(4)
    parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    patched = nn.BatchNorm2d(4)
    patched._check_input_dim = lambda input: None
    model = nn.ModuleDict(
        {
            "lazy": nn.LazyBatchNorm2d(),
            "halved": BatchNormHalved(4),
            "masked": BatchNormMasked(4),
            "in eval": BatchNormInEval(4),
            "any rank": BatchNormOfAnyRank(4),
            "patched": patched,
            "parametrized": parametrized,
            "eps": nn.BatchNorm2d(4, eps=-1.0),
            "plain": nn.BatchNorm2d(4),
        }
    )
    old = dict(model.items())
    report = ConversionReport()
    with pytest.warns(UserWarning, match=r"8 layer\(s\) were not converted") as caught:
        convert_batchnorm(model, report=report)
    for name, word in (
        ("lazy", "run one batch first"),
        ("halved", "forward"),
        ("masked", "forward"),
        ("in eval", "train"),
        ("any rank", "_check_input_dim"),
        ("patched", "_check_input_dim"),
        ("parametrized", "remove"),
        ("eps", "eps=-1"),
    ):
        assert name in str(caught[0].message)
        assert word in dict(report.skipped)[name]
        assert model[name] is old[name]
    assert report.converted == [("plain", "BatchNorm2d -> IterNorm2d")]
    assert "skipped    lazy: LazyBatchNorm2d" in str(report)


@pytest.mark.parametrize("training", [False, True])
def test_a_batchnorm_with_an_activation_keeps_it(training):
    torch.manual_seed(0)
    layer = trained(BatchNormAct2d(6, act_layer=nn.PReLU, drop=0.3))
    layer.register_module("unset", None)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), layer).train(training)
    x = torch.randn(5, 3, 4, 4)
    keys = set(model.state_dict())
    state = torch.get_rng_state()
    expected = copy.deepcopy(model)(x)
    torch.set_rng_state(state)
    original = copy.deepcopy(model)
    convert_batchnorm(model, group_size=1)
    assert torch.equal(torch.get_rng_state(), state)
    # With groups of one channel IterNorm is BatchNorm, in training too.
    torch.testing.assert_close(model(x), expected)
    new = model[1]
    assert isinstance(new, IterNorm2d)
    assert new.act is layer.act
    assert set(model.state_dict()) == keys - {"1.running_var"} | {"1.running_whitening"}
    # The original's checkpoint loads, and the whole pickles.
    model.load_state_dict(original.state_dict())
    pickle.loads(pickle.dumps(model))
    # Synchronized, it keeps them too.
    iternorm.convert_sync_iternorm(model.eval())
    assert isinstance(model[1], SyncIterNorm)
    torch.testing.assert_close(model(x), original.eval()(x))
    back = convert_to_batchnorm(model)
    assert type(back.get_submodule("1")) is BatchNormAct2d
    torch.testing.assert_close(back(x), original.eval()(x))


def test_a_traced_model_applies_an_activation_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), trained(BatchNormAct2d(6, act_layer=nn.SiLU))).eval()
    convert_batchnorm(model)
    x = torch.randn(5, 3, 4, 4)
    traced = fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), model(x))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]


def test_other_classes_named_batchnorm_are_untouched():
    class FrozenBatchNorm2d(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_var", torch.ones(4))

    model = nn.Sequential(FrozenBatchNorm2d(), nn.InstanceNorm2d(4), nn.BatchNorm2d(4))
    frozen = model[0]
    convert_batchnorm(model)
    assert model[0] is frozen
    assert type(model[1]) is nn.InstanceNorm2d


def test_weights_that_hooks_compute_are_still_computed():
    torch.manual_seed(0)
    x = torch.randn(16, 5)
    for wrap in (weight_norm, spectral_norm, lambda linear: prune.random_unstructured(linear, "weight", 0.5)):
        model = nn.Sequential(nn.Linear(5, 8), trained(nn.BatchNorm1d(8)), wrap(nn.Linear(8, 3))).eval()
        prune.random_unstructured(model[1], "weight", 0.5)
        expected, names = model(x), [name for name, _ in model.named_parameters()]
        convert_batchnorm(decorrelate_features(model))
        torch.testing.assert_close(model(x), expected)
        assert [name for name, _ in model.named_parameters()] == names
        model.train()(x).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        prune.remove(model.get_submodule("1"), "weight")
        with torch.no_grad():
            # Torch copies no weight that has a graph.
            expected = model.eval()(x)
            torch.testing.assert_close(iternorm.fold(model)[0](x), expected)


def test_what_is_set_on_a_layer_does_not_call_the_old_one():
    layer = nn.BatchNorm1d(4).eval()
    layer.train = lambda mode=True: layer
    compiled = nn.BatchNorm1d(4)
    compiled.compile(backend="eager")
    model = convert_batchnorm(nn.Sequential(layer, compiled), num_iters=20).train()
    assert not model.get_submodule("0").training
    torch.manual_seed(0)
    y = model(torch.randn(64, 4) @ torch.randn(4, 4))
    assert torch.corrcoef(y.T).triu(1).abs().max() < 0.1


def test_a_model_on_the_meta_device_converts_both_ways():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    convert_batchnorm(model)
    assert type(model[1]) is IterNorm2d
    convert_to_batchnorm(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_an_optimizer_made_before_still_trains_the_converted_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    convert_batchnorm(model)
    before = model.get_parameter("1.weight").detach().clone()
    model(torch.randn(8, 3)).pow(3).sum().backward()
    optimizer.step()
    assert not torch.equal(model.get_parameter("1.weight"), before)
