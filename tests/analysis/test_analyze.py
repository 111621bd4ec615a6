"""`analyze`: what it measures, and that it leaves the model as it was."""

import copy
import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import iternorm
from iternorm.analysis import analyze, batch_norm, condition_number, covariance, iter_norm, snd, spectrum
from iternorm.analysis.probes import LayerProbe


def images(count=4, size=8, channels=3, side=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, channels, side, side, generator=generator) for _ in range(count)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(8, 12, 1),
        iternorm.IterNorm2d(12, group_size=5),
        nn.Flatten(),
        nn.Linear(12 * 16, 10),
        iternorm.DecorrelatedBatchNorm1d(10, group_size=4),
        nn.LayerNorm(10),
    )


def captured(model, batches, name):
    """Inputs and outputs of a layer in training mode, by torch's own hooks on a copy."""
    model = copy.deepcopy(model).train()
    seen = []
    model.get_submodule(name).register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])


def without_dropout(model):
    model[3] = nn.Identity()
    return model


def test_every_normalization_layer_is_found_and_described():
    result = analyze(network(), images(), batch_sizes=(4,))
    described = [(layer.name, layer.kind, layer.operation, layer.num_channels) for layer in result.layers]
    assert described == [
        ("1", "BatchNorm2d", "BN", 8),
        ("5", "IterNorm2d", "IterNorm T=5 d=5", 12),
        ("8", "DecorrelatedBatchNorm1d", "DBN-4", 10),
        ("9", "LayerNorm", "LayerNorm", 10),
    ]
    assert [(layer.num_examples, layer.num_positions) for layer in result.layers] == [
        (32, 16),
        (32, 16),
        (32, 1),
        (32, 1),
    ]


@pytest.mark.parametrize("name", ["1", "5", "8", "9"])
def test_statistics_are_those_of_all_data(name):
    model = without_dropout(network())
    batches = images()
    (layer,) = analyze(model, batches, layers=[name], batch_sizes=(), positions=None).layers
    for side, activation in zip((layer.before, layer.after), captured(model, batches, name), strict=True):
        expected = covariance(activation.double())
        values = spectrum(expected)
        torch.testing.assert_close(torch.tensor([v for _, v in side.spectrum]).double(), values, rtol=1e-3, atol=1e-5)
        if not math.isinf(side.condition_number):
            assert side.condition_number == pytest.approx(condition_number(expected).item(), rel=1e-2)
        share = values / values.sum()
        assert side.effective_rank == pytest.approx((-(share * share.log()).sum()).exp().item(), rel=1e-3)
        scale = expected.diagonal().rsqrt()
        correlation = (expected * scale * scale[:, None]).abs()
        size = len(scale)
        assert side.mean_absolute_correlation == pytest.approx(
            ((correlation.sum() - size) / (size * (size - 1))).item(), rel=1e-3
        )
        torch.testing.assert_close(torch.tensor(side.correlation).double(), correlation, rtol=0, atol=1e-3)


class BatchNormRelu(nn.BatchNorm2d):
    """A layer whose output is not a scale and a shift of its input."""

    def forward(self, input):
        return super().forward(input).relu()


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormRelu])
def test_output_of_batch_norm_is_what_it_gives(kind, mode):
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(3, 5, 1), kind(5)
    model = nn.Sequential(convolution, norm).double()
    nn.init.uniform_(norm.weight, -2, 2)
    # A channel without variance, in and out.
    convolution.weight.data[2] = 0
    batches = [batch.double() * scale for scale, batch in enumerate(images(), 1)]
    (layer,) = analyze(model, batches, batch_sizes=(), positions=None, mode=mode).layers
    model = copy.deepcopy(model).train(mode == "train")
    with torch.no_grad():
        outputs = torch.cat([model(batch) for batch in batches])
    measured = torch.tensor([value for _, value in layer.after.spectrum], dtype=torch.float64)
    torch.testing.assert_close(measured, spectrum(covariance(outputs)), rtol=1e-6, atol=1e-9)


def test_a_grid_of_positions_stays_within_its_number_and_agrees():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    batches = images(count=20, size=16, side=20)
    (all_positions,) = analyze(model, batches, batch_sizes=(), positions=None).layers
    (some,) = analyze(model, batches, batch_sizes=(), positions=30).layers
    assert all_positions.num_samples == 20 * 16 * 400
    # A stride of 4 leaves 25 of 400.
    assert some.num_samples == 20 * 16 * 25
    assert some.before.condition_number == pytest.approx(all_positions.before.condition_number, rel=0.2)


def test_the_grid_reaches_every_position():
    probe = LayerProbe("norm", nn.BatchNorm2d(1), 1, None, seed=0)
    for _ in range(40):
        probe.see_input(torch.arange(9.0).view(1, 1, 3, 3).expand(2, 1, 3, 3))
    # Each position holds its own number: the variance of 0 ... 8 is 60 / 9.
    assert probe.before.num_samples == 80
    assert probe.before.covariance.item() == pytest.approx(60 / 9, rel=0.3)


def test_layer_norm_channels_are_last():
    model = nn.Sequential(nn.LayerNorm(6))
    tokens = torch.randn(32, 9, 6) * torch.arange(1, 7)
    (layer,) = analyze(model, [tokens], batch_sizes=(4,), positions=None).layers
    assert (layer.num_channels, layer.num_positions, layer.num_samples) == (6, 9, 288)
    expected = condition_number(covariance(tokens.double().flatten(0, 1)))
    assert layer.before.condition_number == pytest.approx(expected.item(), rel=1e-3)
    assert [(n.snd, n.standard_error, n.relative) for n in layer.noise] == [(0, 0, 0)]


def test_group_norm_and_sync_batch_norm_inputs():
    model = nn.Sequential(nn.GroupNorm(2, 4))
    (layer,) = analyze(model, [torch.randn(16, 4, 3)], batch_sizes=()).layers
    assert (layer.operation, layer.num_channels) == ("GroupNorm", 4)
    # SyncBatchNorm refuses CPU tensors in training; its eval mode is BatchNorm's.
    (layer,) = analyze(nn.Sequential(nn.SyncBatchNorm(4)), [torch.randn(16, 4, 3)], batch_sizes=(), mode="eval").layers
    assert (layer.operation, layer.num_channels) == ("BN", 4)


def test_any_module_can_be_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4))
    (layer,) = analyze(model, images(side=24), layers="0", batch_sizes=(4,), positions=20).layers
    assert (layer.kind, layer.num_channels, layer.noise) == ("Conv2d", 3, [])
    assert len(layer.after.spectrum) == 4
    assert [n.batch_size for n in layer.alternatives[0].noise] == [4]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_transformer_encoder(mode):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    result = analyze(model, [torch.randn(16, 5, 8) for _ in range(3)], batch_sizes=(4,), mode=mode)
    assert [(layer.name, layer.num_channels, layer.num_positions) for layer in result.layers] == [
        ("norm1", 8, 5),
        ("norm2", 8, 5),
    ]


def test_a_layer_that_is_called_twice_sees_both():
    norm = nn.BatchNorm1d(4)
    (layer,) = analyze(nn.Sequential(norm, nn.ReLU(), norm), [torch.randn(16, 4)], batch_sizes=(4,)).layers
    assert layer.num_examples == 32


def test_noise_of_own_operation_and_alternatives_is_snd_of_the_inputs():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    batches = [torch.randn(50, 6) for _ in range(3)]
    (layer,) = analyze(model, batches, batch_sizes=(4, 16), alternatives=[batch_norm(), iter_norm(3)]).layers
    with torch.no_grad():
        data = model[0](torch.cat(batches))
    assert [n.batch_size for n in layer.noise] == [4, 16]
    for estimate in layer.noise:
        expected = snd(batch_norm(), data, estimate.batch_size)
        assert abs(estimate.snd - expected.value) < 5 * (estimate.standard_error + expected.standard_error)
    by_name = {other.operation: other for other in layer.alternatives}
    assert by_name["BN"].noise == layer.noise
    expected = condition_number(iter_norm(3).normalized_covariance(covariance(data)))
    assert by_name["IterNorm T=3"].condition_number == pytest.approx(expected.item(), rel=1e-3)


def test_noise_of_images_counts_every_position():
    generator = torch.Generator().manual_seed(0)
    # Positions of an example have much in common, so their number is not that of independent samples.
    data = torch.randn(400, 6, 1, 1, generator=generator) + 0.5 * torch.randn(400, 6, 4, 5, generator=generator)
    model = nn.Sequential(iternorm.IterNorm2d(6, group_size=4, num_iters=3))
    (layer,) = analyze(model, data.split(30), batch_sizes=(4, 12), positions=2).layers
    for estimate in layer.noise:
        expected = snd(iter_norm(3, group_size=4), data, estimate.batch_size, samples=data[:, :, 1, 2])
        assert abs(estimate.snd - expected.value) < 5 * (estimate.standard_error + expected.standard_error)
        assert estimate.relative == pytest.approx(expected.relative, rel=0.2)
        # Two positions of each example would add the noise of the other eighteen.
        few = snd(iter_norm(3, group_size=4), data[:, :, :1, :2], estimate.batch_size, samples=data[:, :, 1, 2])
        assert estimate.snd < few.value


def test_batches_of_one_size_are_put_together_in_many_ways():
    data = torch.randn(1200, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.BatchNorm1d(6))
    (layer,) = analyze(model, data.split(100), batch_sizes=(128,), alternatives=()).layers
    expected = snd(batch_norm(), data[:512], 128)
    assert abs(layer.noise[0].snd - expected.value) < 5 * (layer.noise[0].standard_error + expected.standard_error)
    # Whole batches of 128 would be four, and the spread between four is smaller by a seventh.
    assert layer.noise[0].standard_error < 0.1 * layer.noise[0].snd


def test_memory_for_noise_stays_within_its_budget():
    model = nn.Sequential(nn.BatchNorm1d(64))
    batches = [torch.randn(50, 64) for _ in range(8)]
    (layer,) = analyze(model, batches, batch_sizes=(4, 16), alternatives=[iter_norm(5)]).layers
    assert layer.noise_pool == 400
    # 64 sums and 64 x 64 products of 8 bytes for each mini-group of 4: ten of them fit.
    budget = 10 * 8 * 64 * 65
    (layer,) = analyze(model, batches, batch_sizes=(4, 16), alternatives=[iter_norm(5)], memory_budget=budget).layers
    assert layer.noise_pool == 40
    (layer,) = analyze(model, batches, batch_sizes=(4, 16), alternatives=[iter_norm(5)], memory_budget=1).layers
    assert layer.noise_pool == 32


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(5, momentum=1.0, affine=False),
        lambda: iternorm.IterNorm1d(5, momentum=1.0, affine=False, group_size=3),
        lambda: iternorm.DecorrelatedBatchNorm1d(5, momentum=1.0, affine=False, running="covariance"),
    ],
)
def test_drift_is_the_distance_of_outputs(make):
    layer = make().double()
    old, new = torch.randn(400, 5).double() * 2 + 1, torch.randn(300, 5).double()
    # With momentum 1 the running statistics are those of the last batch, BatchNorm's variance unbiased.
    layer.train()(old)
    (result,) = analyze(nn.Sequential(layer), [new], batch_sizes=()).layers
    by_running = copy.deepcopy(layer).eval()(new)
    by_data = copy.deepcopy(layer).train()(new)
    expected = (by_running - by_data).square().mean().sqrt().item()
    assert result.drift == pytest.approx(expected, rel=1e-6)
    layer.train()(new)
    (result,) = analyze(nn.Sequential(layer), [new], batch_sizes=()).layers
    assert result.drift < 0.01
    # Statistics that are not kept cannot drift.
    (result,) = analyze(
        nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False)), [new.float()], batch_sizes=()
    ).layers
    assert result.drift is None


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

    def test_one_draw(self):
        with pytest.raises(ValueError, match="draws is 1"):
            analyze(network(), images(), draws=1)

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


def test_half_precision_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).bfloat16()
    (layer,) = analyze(model, [torch.randn(64, 8).bfloat16()], batch_sizes=(8,)).layers
    assert math.isfinite(layer.before.condition_number)
    assert layer.noise[0].snd > 0


def test_progress_is_reported():
    seen = []
    analyze(network(), images(3), batch_sizes=(), progress=lambda *values: seen.append(values))
    assert seen == [("batches", n, None) for n in (1, 2, 3)] + [("layers", n, 4) for n in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def result():
    return analyze(network(), images(), batch_sizes=(4, 16))


class TestSummary:
    def test_json_is_strict_and_complete(self, result, tmp_path):
        text = result.to_json(tmp_path / "a" / "analysis.json")
        assert (tmp_path / "a" / "analysis.json").read_text() == text + "\n"
        content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert content["format"] == "iternorm-analysis-1"
        assert [layer["name"] for layer in content["layers"]] == ["1", "5", "8", "9"]
        # LayerNorm's output lies in a plane: the infinite condition number is null.
        assert content["layers"][3]["after"]["condition_number"] is None
        assert [n["batch_size"] for n in content["layers"][0]["noise"]] == [4, 16]

    def test_table_has_a_line_a_layer(self, result):
        lines = result.table().splitlines()
        assert lines[0].split()[:3] == ["layer", "operation", "channels"]
        assert lines[0].endswith("SND B=4  SND B=16  drift")
        assert [line.split()[0] for line in lines[2:6]] == ["1", "5", "8", "9"]
        assert "IterNorm T=3 d=64" in result.table()
        assert "SND at B=4" in result.table(batch_size=4)

    def test_table_says_where_estimates_fall_short(self, result):
        assert "SND at B=16 is too small by about 29%: only 32 examples" in result.table()
        few = analyze(nn.Sequential(nn.BatchNorm1d(9)), [torch.randn(8, 9)], batch_sizes=())
        assert "fewer samples than channels" in few.table()
