"""A layer is folded into a neighbour only where nothing else sees that neighbour or what lies between them."""

import pickle
from collections import UserDict
from typing import Any

import pytest
import torch
from foldable import Wired, check, settled
from third_party import BatchNormAct2d
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from iternorm import (
    IterNorm1d,
    IterNorm2d,
    convert_batchnorm,
    fold,
)

UNSAFE = {
    "output used twice": lambda m, x: m.norm(y := m.conv(x)) + y,
    "output returned": lambda m, x: torch.cat([m.norm(y := m.conv(x)), y]),
    "relu between": lambda m, x: m.norm(m.conv(x).relu()).relu(),
    "addition between": lambda m, x: m.norm(m.conv(x) + x).relu(),
    "in place between": lambda m, x: m.norm(m.conv(x).mul_(2)).relu(),
    "convolution used twice": lambda m, x: m.norm(m.conv(m.conv(x))).relu(),
    "norm used twice": lambda m, x: m.norm(m.norm(m.conv(x)).relu()).relu(),
    "weight read elsewhere": lambda m, x: m.norm(m.conv(x)).relu() * m.conv.weight.sum(),
    "norm's output used twice": lambda m, x: m.last(y := m.norm(x)) + y,
    "next used twice": lambda m, x: m.last(m.last(m.norm(x))),
    "norm's output changed in place": lambda m, x: m.last(m.norm(x).relu_()),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_a_neighbour_that_is_not_the_norms_alone_is_left_as_it_is(name):
    torch.manual_seed(0)
    model = settled(Wired(UNSAFE[name]))
    folded, table = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["pointwise"])
    assert torch.equal(folded.conv.weight, model.conv.weight)
    assert torch.equal(folded.last.weight, model.last.weight)
    assert table[0].into == ""


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_whitening"])
def test_a_norm_whose_tensors_the_model_reads_is_kept(name):
    torch.manual_seed(0)
    model = settled(Wired(lambda m, x: m.norm(m.conv(x)).relu() + getattr(m.norm, name).sum()))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for example in (None, x):
        folded, table = fold(model, example)
        torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
        assert table[0].how == "kept"
        assert "reads its parameters or buffers" in table[0].reason


READS = {
    "an attribute's shape": lambda layer: layer.weight.shape[0],
    "its dtype": lambda layer: torch.ones(1).to(layer.weight.dtype),
    "a buffer's shape": lambda layer: len(layer.running_mean.shape),
    "parameters()": lambda layer: sum(value.sum() for value in layer.parameters()),
    "named_parameters()": lambda layer: dict(layer.named_parameters())["weight"].sum(),
    "state_dict()": lambda layer: layer.state_dict()["weight"].sum(),
}


@pytest.mark.parametrize("read", READS)
def test_a_norm_is_kept_however_the_model_reads_it(read):
    torch.manual_seed(0)
    model = settled(Wired(lambda m, x: m.norm(m.conv(x)).relu() + READS[read](m.norm)))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for example in (None, x):
        folded, table = fold(model, example)
        torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
        assert table[0].how == "kept"


@pytest.mark.parametrize("read", ["parameters()", "named_parameters()"])
def test_a_convolution_is_left_as_it_is_however_the_model_reads_it(read):
    torch.manual_seed(0)
    model = settled(Wired(lambda m, x: m.norm(m.conv(x)).relu() + READS[read](m.conv)))
    folded, _ = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["pointwise"])
    assert torch.equal(folded.conv.weight, model.conv.weight)


def test_a_weight_that_an_operation_on_the_input_takes_from_parameters():
    torch.manual_seed(0)

    def wire(m, x):
        weight = dict(m.named_parameters())["conv.weight"]
        return m.norm(m.conv(x)).relu() + nn.functional.conv2d(x, weight, padding=1)

    check(settled(Wired(wire)), torch.randn(2, 4, 5, 5, dtype=torch.float64), ["pointwise"])


def test_watching_a_run_leaves_modules_as_they_were():
    before = nn.Module.__getattr__
    model = settled(Wired(lambda m, x: m.norm(m.conv(x)).relu()))
    fold(model, torch.randn(2, 4, 5, 5, dtype=torch.float64))
    assert nn.Module.__getattr__ is before
    with pytest.raises(RuntimeError):
        fold(model, torch.randn(2, 3, 5, 5, dtype=torch.float64))
    assert nn.Module.__getattr__ is before


def test_a_weight_of_two_norms_is_not_read():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = IterNorm2d(4), IterNorm2d(4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).relu())

    check(settled(Two()), torch.randn(2, 4, 5, 5, dtype=torch.float64), ["pointwise", "pointwise"])


@pytest.mark.parametrize(
    "make", [lambda norm: prune.l1_unstructured(norm, "weight", 2), nn.utils.weight_norm, nn.utils.spectral_norm]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_is_computed_at_each_call(make):
    model = settled(Wired(lambda m, x: m.norm(m.conv(x)).relu()))
    make(model.norm)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        # What it is computed from changes after the last call.
        model(x)
        next(p for name, p in model.norm.named_parameters() if name.startswith("weight_")).mul_(3)
        names = list(dict(model.norm.named_parameters()))
        check(model, x, ["previous"])
    assert list(dict(model.norm.named_parameters())) == names
    model(x)
    with pytest.raises(ValueError, match=r"run it once under torch.no_grad\(\), or make the weights permanent"):
        fold(model)


def test_a_dropout_that_still_drops_is_not_passed():
    model = settled(nn.Sequential(nn.ReLU(), IterNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)))
    x = torch.randn(16, 4, dtype=torch.float64)
    check(model, x, ["next"])
    # Monte Carlo dropout: the rest is in eval mode.
    model[2].train()
    folded, table = fold(model)
    assert table[0].how == "pointwise"
    results = []
    for each in (model, folded):
        torch.manual_seed(0)
        results.append(each(x))
    torch.testing.assert_close(*results)


def test_a_dropout_that_still_drops_inside_a_norm_does_so():
    model = settled(convert_batchnorm(nn.Sequential(nn.Conv2d(4, 6, 3), BatchNormAct2d(6, drop=0.5))))
    model[1].drop.train()
    folded: Any = fold(model)[0]
    assert [module.training for module in folded.modules()] == [module is folded[1].drop for module in folded.modules()]
    results = []
    for each in (model, folded):
        torch.manual_seed(0)
        results.append(each(torch.ones(2, 4, 5, 5, dtype=torch.float64)))
    torch.testing.assert_close(*results)


def test_a_model_output_with_the_convolutions_own_output():
    model = settled(Wired(lambda m, x: (m.norm(y := m.conv(x)), y)))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for example in (None, x):
        folded, _ = fold(model, example)
        for got, expected in zip(folded(x), model(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_hooks_see_what_they_saw():
    chain = lambda m, x: m.norm(m.conv(x)).relu()  # noqa: E731
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for name in ("conv", "norm"):
        model = settled(Wired(chain))
        seen = []
        getattr(model, name).register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        check(model, x, ["pointwise"])
        folded, _ = fold(model)
        seen.clear()
        model(x)
        folded(x)
        torch.testing.assert_close(seen[0], seen[1], rtol=1e-10, atol=1e-10)


def test_a_neighbour_whose_gradients_are_watched_is_left():
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for register in (nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook):
        model = settled(Wired(lambda m, x: m.norm(m.conv(x)).relu()))
        register(model.conv, lambda *_: None)
        check(model, x, ["pointwise"])


def test_parametrized_and_overridden_neighbours_are_left():
    class Doubled(nn.Conv2d):
        def forward(self, input):
            return 2 * super().forward(input)

    # As tools do that put a function of their own around a layer.
    wrapped = nn.Conv2d(4, 4, 3)
    inner = wrapped.forward
    wrapped.forward = lambda input: 2 * inner(input)  # pyright: ignore[reportAttributeAccessIssue]
    chain = lambda m, x: m.norm(m.conv(x)).relu()  # noqa: E731
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for conv in (parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), Doubled(4, 4, 3), wrapped):
        check(settled(Wired(chain, conv=conv)), x, ["pointwise"])


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_parametrized_norm_folds(activation):
    class Positive(nn.Module):
        def forward(self, weight):
            return weight.abs()

    model = settled(nn.Sequential(nn.Conv2d(4, 6, 3), IterNorm2d(6, group_size=4, activation=activation)))
    with torch.no_grad():
        model[1].weight.neg_()
    parametrize.register_parametrization(model[1], "weight", Positive())
    check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["previous"])


def test_a_layer_that_is_also_used_where_tracing_does_not_look():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = IterNorm1d(4)
            # torch.fx takes layers of torch.nn as one, with what is inside.
            self.encoder = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
            self.encoder.linear1 = self.linear

        def forward(self, x):
            return self.encoder(self.norm(self.linear(x)).unsqueeze(1))

    check(settled(Model()), torch.randn(3, 4, dtype=torch.float64), ["pointwise"])


def test_tied_weights_stay_tied():
    model: Any = Wired(lambda m, x: m.other(m.norm(m.conv(x)).relu()), other=nn.Conv2d(4, 4, 3))
    model.other.weight = model.conv.weight
    settled(model)
    folded, _ = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["pointwise"])
    assert folded.other.weight is folded.conv.weight


def test_a_linear_layer_whose_features_are_not_channels():
    model = settled(nn.Sequential(nn.Linear(5, 6), IterNorm1d(6)))
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    folded, table = fold(model, x)
    assert table[0].how == "pointwise"
    torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
    # Over a width that is as large as the number of channels.
    model = settled(nn.Sequential(nn.Linear(5, 6), IterNorm2d(6), nn.Linear(6, 5)))
    check(model, torch.randn(3, 6, 2, 5, dtype=torch.float64), ["pointwise"])


def test_a_norm_with_an_activation_does_not_go_into_the_layer_after():
    converted = convert_batchnorm(BatchNormAct2d(6, drop=0.1), group_size=4)
    for norm in (IterNorm2d(6, activation="relu"), converted):
        model = settled(nn.Sequential(nn.ReLU(), norm, nn.Conv2d(6, 3, 1)))
        _, table = check(model, torch.randn(2, 6, 5, 5, dtype=torch.float64), ["pointwise"])
        assert "next: an activation lies between" in table[0].reason


def test_a_norm_with_an_activation_folds_and_keeps_it():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), BatchNormAct2d(6, drop=0.1), nn.Conv2d(6, 3, 1))
    model = settled(convert_batchnorm(model, group_size=4))
    folded, _ = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["previous"])
    assert [type(m) for m in folded[1]] == [nn.Identity, nn.Dropout2d, nn.ReLU]


RESIDUALS = {
    "previous": lambda m, x: m.norm(m.conv(x), residual=x),
    "its own input": lambda m, x: m.norm(y := m.conv(x), residual=y),
    "by position": lambda m, x: m.norm(m.conv(x), x),
    "before a convolution": lambda m, x: m.last(m.norm(x, residual=m.conv(x))),
    "of another norm": lambda m, x: m.norm(m.conv(x), residual=m.norm2(m.last(x))),
}


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("name", RESIDUALS)
def test_what_a_norm_adds_to_its_output_is_still_added(name, activation):
    torch.manual_seed(0)
    words = {"norm": IterNorm2d(4, activation=activation)}
    if "another" in name:
        words["norm2"] = IterNorm2d(4)
    hows = {"its own input": ["pointwise"], "before a convolution": ["pointwise"], "of another norm": ["previous"] * 2}
    model = settled(Wired(RESIDUALS[name], **words))
    folded, _ = check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), hows.get(name, ["previous"]))
    pickle.loads(pickle.dumps(folded.norm))


class ByKeyword(nn.Module):
    """Takes keyword arguments as models of Hugging Face do, and torch.fx cannot trace it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.norm = IterNorm2d(4)

    def forward(self, pixels, *, scale=None, flip=False):
        if scale is not None and pixels.sum() == 0:
            return pixels
        y = self.norm(self.conv(pixels.flip(-1) if flip else pixels))
        return y if scale is None else y * scale


def test_a_mapping_is_keyword_arguments():
    torch.manual_seed(0)
    model = settled(ByKeyword())
    inputs = {"pixels": torch.randn(2, 4, 5, 5, dtype=torch.float64), "scale": torch.tensor(2.0), "flip": True}
    # The second is how tokenizers and processors return a batch.
    for example in (inputs, UserDict(inputs)):
        folded, table = fold(model, example)
        assert table[0].how == "previous"
        torch.testing.assert_close(folded(**inputs), model(**inputs), rtol=1e-10, atol=1e-10)


def test_a_model_that_takes_a_mapping_is_given_it_in_a_tuple():
    model = settled(Wired(lambda m, x: m.norm(m.conv(x["image"]))))
    inputs = {"image": torch.randn(2, 4, 5, 5, dtype=torch.float64)}
    folded, table = fold(model, (inputs,))
    assert table[0].how == "previous"
    torch.testing.assert_close(folded(inputs), model(inputs), rtol=1e-10, atol=1e-10)
    with pytest.raises(TypeError, match=r"a mapping of 'image', which Wired does not take .*: \(example_inputs,\)"):
        fold(model, inputs)
    with pytest.raises(TypeError, match="a mapping of 0, which Wired does not take"):
        fold(model, {0: inputs})


@pytest.mark.parametrize("wrap", [AveragedModel, nn.DataParallel])
def test_a_wrapper_that_hands_on_its_arguments(wrap):
    model = settled(wrap(nn.Sequential(nn.Conv2d(4, 6, 3), IterNorm2d(6), nn.ReLU())))
    check(model, torch.randn(2, 4, 5, 5, dtype=torch.float64), ["previous"])
