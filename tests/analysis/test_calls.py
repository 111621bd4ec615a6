"""A call of `analyze`: what it takes and refuses, and that it leaves the model as it was."""

import math
import random

import numpy as np
import pytest
import torch
from analyzed import images, network
from torch import nn

import iternorm
from iternorm.analysis import analyze, batch_norm


class TestModelIsLeftAsItWas:
    @staticmethod
    def state(model):
        return {
            "modes": [module.training for module in model.modules()],
            "state": {name: value.clone() for name, value in model.state_dict().items()},
            "objects": [id(tensor) for tensor in model.state_dict(keep_vars=True).values()],
            "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),  # noqa: NPY002
            "grads": [parameter.grad for parameter in model.parameters()],
            "wants": [parameter.requires_grad for parameter in model.parameters()],
        }

    @staticmethod
    def assert_same(before, after):
        for key in ("state", "torch"):
            torch.testing.assert_close(after.pop(key), before.pop(key), rtol=0, atol=0)
        assert after == before

    @staticmethod
    def noisy(batches):
        for batch in batches:
            random.random()
            np.random.random()  # noqa: NPY002
            yield batch + 0 * torch.rand(1)

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_after_success(self, mode):
        model = network().eval()
        model[1].train()
        before = self.state(model)
        analyze(model, self.noisy(images()), batch_sizes=(4,), mode=mode)
        self.assert_same(before, self.state(model))

    def test_after_an_exception_in_the_data(self):
        model = network()
        before = self.state(model)

        def broken():
            yield from self.noisy(images(2))
            raise KeyError("lost")

        with pytest.raises(KeyError, match="lost"):
            analyze(model, broken(), batch_sizes=(4,))
        self.assert_same(before, self.state(model))

    def test_after_an_exception_in_the_model(self):
        model = network()
        batches = [*images(1), *images(1, channels=5)]
        before = self.state(model)
        with pytest.raises(RuntimeError, match="channels"):
            analyze(model, batches, batch_sizes=())
        self.assert_same(before, self.state(model))

    def test_a_buffer_that_is_replaced_comes_back(self):
        class Counting(nn.BatchNorm1d):
            def forward(self, input):
                self.num_batches_tracked = self.num_batches_tracked + 1
                return super().forward(input)

        model = nn.Sequential(Counting(3))
        buffer = model[0].num_batches_tracked
        analyze(model, [torch.randn(8, 3)], batch_sizes=())
        assert model[0].num_batches_tracked is buffer
        assert buffer == 0

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("norm", [nn.BatchNorm2d, iternorm.IterNorm2d])
    def test_a_backward_that_is_still_to_come_gives_the_same(self, norm, training):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), norm(4), nn.Flatten()).train(training)
        weight = model.get_parameter("0.weight")
        batch, *others = images()
        (expected,) = torch.autograd.grad(model(batch).pow(3).sum(), weight)
        loss = model(batch).pow(3).sum()
        analyze(model, others, batch_sizes=(), mode="train" if training else "eval")
        (found,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class TestBadInput:
    def test_not_a_module(self):
        with pytest.raises(TypeError, match="model is a function"):
            analyze(lambda x: x, images())  # pyright: ignore[reportArgumentType]

    def test_no_normalization_layer(self):
        with pytest.raises(ValueError, match="Linear has no normalization layer"):
            analyze(nn.Linear(3, 3), [torch.randn(8, 3)])

    def test_unknown_layer(self):
        with pytest.raises(ValueError, match="'bn7'; normalization layers of the model are: 1, 5, 8, 9"):
            analyze(network(), images(), layers=["bn7"])

    def test_no_batches(self):
        with pytest.raises(ValueError, match="batches is empty"):
            analyze(network(), [])

    def test_batch_of_one(self):
        with pytest.raises(ValueError, match=r"batch 1 holds one example.*drop_last"):
            analyze(network(), [*images(1), *images(1, size=1)])

    def test_batch_size_of_one(self):
        with pytest.raises(ValueError, match="batch_sizes holds 1"):
            analyze(network(), images(), batch_sizes=(1, 8))

    def test_fewer_examples_than_the_batch_size(self):
        with pytest.raises(ValueError, match=r"batch_sizes holds 64, but layer '1' saw only 32 examples"):
            analyze(network(), images(), batch_sizes=(8, 64))
        with pytest.raises(ValueError, match=r"batch_sizes holds 33, but layer '1' saw only 32 examples"):
            analyze(network(), images(), batch_sizes=(33,))

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_data_that_is_not_finite_is_named_with_its_layer(self, value):
        batches = images()
        # One pixel, which a grid of positions may well miss.
        batches[2][1, 0, 3, 3] = value
        with pytest.raises(ValueError, match="the input of layer '1' holds NaN or Inf in batch 2"):
            analyze(network(), batches, batch_sizes=(), positions=4)

    def test_a_layer_that_fails_on_nan_is_named(self):
        class Strict(nn.BatchNorm1d):
            def forward(self, input):
                torch.linalg.cholesky(input.T @ input)
                return super().forward(input)

        model = nn.Sequential(nn.BatchNorm1d(3), nn.Identity(), Strict(3))
        batch = torch.full((8, 3), torch.nan)
        with pytest.raises(ValueError, match="layer '0' holds NaN") as raised:
            analyze(model, [batch], batch_sizes=())
        assert raised.value.__cause__ is not None

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_an_output_that_is_not_finite_is_named_with_its_layer(self, value):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
        model.get_parameter("1.weight").data[1] = value
        with pytest.raises(ValueError, match="the output of layer '1' holds NaN, Inf or values whose squares"):
            analyze(model, [torch.randn(8, 3)], batch_sizes=())

    def test_an_input_whose_variance_overflows_is_named_with_its_layer(self):
        with pytest.raises(ValueError, match="the input of layer '0' holds NaN, Inf or values whose squares are too"):
            analyze(nn.Sequential(nn.BatchNorm1d(3)), [torch.randn(8, 3) * 1e20], batch_sizes=(4,))

    def test_one_draw(self):
        with pytest.raises(ValueError, match="draws is 1"):
            analyze(network(), images(), draws=1)

    def test_two_alternatives_of_one_name(self):
        with pytest.raises(ValueError, match="alternatives holds 'BN' more than once"):
            analyze(network(), images(), batch_sizes=(4,), alternatives=[batch_norm(), batch_norm(1e-3)])

    def test_an_alternative_that_is_a_label(self):
        with pytest.raises(TypeError, match=r"alternatives holds 'BN', but operations are needed, such as iter_norm"):
            analyze(network(), images(), alternatives=["BN"])  # pyright: ignore[reportArgumentType]

    def test_lazy_layers_without_statistics_are_named(self):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LazyBatchNorm2d(), iternorm.LazyIterNorm2d())
        with pytest.raises(ValueError, match="the model has uninitialized layers: 1, 2; run it on a batch first"):
            analyze(model, images(), batch_sizes=())

    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
    def test_torchscript_is_refused_by_name(self):
        model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        with pytest.raises(ValueError, match=r"model is a TorchScript module.*analyze the one that it was made from"):
            analyze(model, images(), batch_sizes=())

    def test_unknown_mode(self):
        with pytest.raises(ValueError, match="mode is 'test'"):
            analyze(network(), images(), mode="test")  # pyright: ignore[reportArgumentType]

    def test_layer_that_is_never_called(self):
        model = nn.ModuleDict({"used": nn.BatchNorm1d(3), "idle": nn.BatchNorm1d(3)})
        batches = [torch.randn(8, 3)]

        def forward(model, x):
            return model.get_submodule("used")(x)

        result = analyze(model, batches, batch_sizes=(), forward=forward)
        assert [layer.name for layer in result.layers] == ["used"]
        assert "not reached by any call: idle" in result.table()
        with pytest.raises(ValueError, match="no call reached the layers 'idle'"):
            analyze(
                model, batches, layers="idle", batch_sizes=(), forward=lambda model, x: model.get_submodule("used")(x)
            )


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 0), lambda x: [x, 0], lambda x: {"input": x}])
def test_forms_of_a_batch(wrap):
    layers = analyze(network(), [wrap(x) for x in images()], batch_sizes=()).layers
    assert layers[0].num_examples == 32


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_compiled_model_that_has_run_gives_what_the_model_gives(mode):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    expected = analyze(model, images(), batch_sizes=(4,), mode=mode)
    compiled = torch.compile(model.train(mode == "train"), backend="eager")
    assert isinstance(compiled, nn.Module)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    # The code of this run knows of no hooks.
    with torch.no_grad():
        compiled(images()[0])
    model.load_state_dict(state)
    assert analyze(compiled, images(), batch_sizes=(4,), mode=mode).layers[0].noise == expected.layers[0].noise
    model.compile(backend="eager")
    assert analyze(model, images(), batch_sizes=(4,), mode=mode).layers == expected.layers


def test_half_precision_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).bfloat16()
    (layer,) = analyze(model, [torch.randn(64, 8).bfloat16()], batch_sizes=(8,)).layers
    assert math.isfinite(layer.before.condition_number)
    assert layer.noise[0].snd > 0


def test_progress_is_reported():
    seen = []
    analyze(network(), images(3), batch_sizes=(), progress=lambda *values: seen.append(values))
    assert seen == [("batches", n, None) for n in (1, 2, 3)] + [("layers", n, 4) for n in (1, 2, 3, 4)]
