"""`analyze`: what it measures."""

import copy
import math

import pytest
import torch
from analyzed import images, network
from torch import nn

import iternorm
from iternorm.analysis import analyze, batch_norm, condition_number, covariance, iter_norm, snd, spectrum
from iternorm.analysis.probes import LayerProbe


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


def batch_norm_and_a_hook(channels):
    """Another one: what the next layer gets is what the hook returns."""
    layer = nn.BatchNorm2d(channels)
    layer.register_forward_hook(lambda module, args, output: output.relu())
    return layer


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormRelu, batch_norm_and_a_hook])
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
    # Of several dimensions that it normalizes over, the first.
    (layer,) = analyze(nn.Sequential(nn.LayerNorm([3, 5])), [torch.randn(16, 3, 5)], batch_sizes=()).layers
    assert (layer.num_channels, layer.num_positions) == (3, 5)


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


def test_the_input_is_told_from_other_tensors_by_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = iternorm.IterNorm1d(8, group_size=4)

        def forward(self, x):
            return self.norm(residual=1e3 + x, input=x)

    batch = torch.randn(64, 8)
    (layer,) = analyze(Block(), [batch], batch_sizes=()).layers
    (plain,) = analyze(nn.Sequential(iternorm.IterNorm1d(8, group_size=4)), [batch], batch_sizes=()).layers
    assert layer.before == plain.before


def test_a_layer_that_is_called_twice_sees_both():
    norm = nn.BatchNorm1d(4)
    (layer,) = analyze(nn.Sequential(norm, nn.ReLU(), norm), [torch.randn(16, 4)], batch_sizes=(4,)).layers
    assert layer.num_examples == 32


def test_noise_of_own_operation_and_alternatives_is_snd_of_the_inputs():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    # A mean that is no part of the noise.
    batches = [torch.randn(50, 6) + 10 for _ in range(3)]
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


def test_noise_is_that_of_the_eps_of_each_operation():
    model, batches = nn.Sequential(nn.BatchNorm1d(6, eps=10.0)), [torch.randn(50, 6) for _ in range(3)]
    (layer,) = analyze(model, batches, batch_sizes=(4,), alternatives=[batch_norm()]).layers
    # The variance is 1: an eps of 10 makes the output, and its noise, smaller by a third or more.
    assert layer.noise[0].snd < 0.7 * layer.alternatives[0].noise[0].snd


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


def test_the_pool_holds_four_of_the_largest_batches():
    batches = [torch.randn(50, 4) for _ in range(8)]
    (layer,) = analyze(nn.Sequential(nn.BatchNorm1d(4)), batches, batch_sizes=(64,), pool_size=64).layers
    assert layer.noise_pool == 256


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(5, 0.1, momentum=1.0, affine=False),
        lambda: iternorm.IterNorm1d(5, 0.1, momentum=1.0, affine=False, group_size=3),
        lambda: iternorm.DecorrelatedBatchNorm1d(5, 0.1, momentum=1.0, affine=False, running="covariance"),
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
