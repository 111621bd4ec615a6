"""Batches: which examples, in which order, augmented and normalized how, shared by how many processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, pad

from iternorm.experiments.data import sources
from iternorm.experiments.data.order import share_of
from iternorm.experiments.data.seeds import mixed
from iternorm.experiments.data.sources import open_source
from iternorm.experiments.recipe import Recipe

SHARED = os.environ.get("ITERNORM_SHARED_DATA")
CIFAR_MEAN = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1)
CIFAR_STD = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1)


def recipe(data="generated-cifar10", batch_size=64, **values):
    return Recipe(data, "mlp", "BN", batch_size, 0.1, 1, **{"train_examples": 300, "test_examples": 50, **values})


def joined(batches):
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.fixture(scope="module")
def cifar():
    """The bytes behind ``generated-cifar10``."""
    images, labels = sources.generated.look_alike("cifar10", "train")
    return images[:300], labels[:300]


def test_shapes_and_counts():
    source = open_source(recipe("generated-mnist"), "cpu")
    assert source.in_shape == (1, 28, 28)
    assert (source.num_classes, source.num_train, source.num_test, source.iterations_per_epoch) == (10, 300, 50, 4)
    batches = list(source.train_batches(0))
    assert [(x.shape, y.shape) for x, y in batches] == [((64, 1, 28, 28), (64,))] * 4
    assert {x.dtype for x, _ in batches} == {torch.float32}
    assert {y.dtype for _, y in batches} == {torch.int64}
    images, labels = joined(source.test_batches())
    assert images.shape == (50, 1, 28, 28)
    assert labels.shape == (50,)


def test_an_epoch_has_every_example_once(cifar):
    source = open_source(recipe(batch_size=60), "cpu")
    images, labels = joined(source.train_batches(3))
    expected = (cifar[0].float() - CIFAR_MEAN) / CIFAR_STD
    # Each image is told by its sum.
    order = expected.flatten(1).sum(1).argsort()[images.flatten(1).sum(1).argsort().argsort()]
    assert sorted(order.tolist()) == list(range(300))
    assert order.tolist() != list(range(300))
    torch.testing.assert_close(images, expected[order], atol=1e-5, rtol=0)
    assert torch.equal(labels, cifar[1][order])


def test_mnist_is_normalized_as_is_customary():
    source = open_source(recipe("generated-mnist"), "cpu")
    made, _ = sources.generated.look_alike("mnist", "test")
    images, _ = joined(source.test_batches())
    torch.testing.assert_close(images, (made[:50] / 255 - 0.1307) / 0.3081, atol=1e-5, rtol=0)


def slowly_augmented(image, top, left, flip):
    padded = pad(image[None].float(), (4, 4, 4, 4), mode="reflect")[0]
    crop = padded[:, top : top + 32, left : left + 32]
    return torch.stack([row.flip(-1) for row in crop]) if flip else crop


@pytest.mark.parametrize("channels_last", [False, True])
def test_augmentation_is_a_reflected_crop_and_a_flip(cifar, channels_last, monkeypatch):
    # Chunks that do not divide the epoch.
    monkeypatch.setattr(sources, "_CHUNK", 100)
    asked = recipe(augment=True, seed=5, channels_last=channels_last)
    choices = sources.epoch_choices(asked, 300, 2)
    images, labels = joined(open_source(asked, "cpu").train_batches(2))
    assert choices.shape == (4, 256)
    for image, label, (index, top, left, flip) in zip(images, labels, choices.T.tolist(), strict=True):
        expected = (slowly_augmented(cifar[0][index], top, left, flip) - CIFAR_MEAN) / CIFAR_STD
        torch.testing.assert_close(image, expected, atol=1e-5, rtol=0)
        assert label == cifar[1][index]


def test_all_offsets_and_flips_occur():
    choices = sources.epoch_choices(recipe(batch_size=1, train_examples=4000), 4000, 0)
    assert sorted(choices[0].tolist()) == list(range(4000))
    for offsets in choices[1:3]:
        counts = offsets.bincount(minlength=9)
        assert len(counts) == 9
        # 4000 / 9, within six deviations.
        assert counts.min() > 444 - 6 * 20
        assert counts.max() < 444 + 6 * 20
    assert abs(choices[3].double().mean() - 0.5) < 6 * 0.5 / 4000**0.5


def test_the_test_set_is_not_augmented():
    plain, augmented = (open_source(recipe(augment=augment), "cpu") for augment in (False, True))
    assert torch.equal(joined(plain.test_batches())[0], joined(augmented.test_batches())[0])


@pytest.mark.parametrize("data", ["generated-mnist", "generated-cifar10"])
@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_are_in_the_memory_format_that_is_asked_for(data, augment, channels_last):
    source = open_source(recipe(data, augment=augment, channels_last=channels_last), "cpu")
    format = torch.channels_last if channels_last else torch.contiguous_format
    batches = [*source.train_batches(0), *source.test_batches()]
    assert all(images.is_contiguous(memory_format=format) for images, _ in batches)
    full = open_source(recipe(data, batch_size=300, augment=augment, channels_last=channels_last), "cpu")
    assert all(images.is_contiguous(memory_format=format) for images, _ in full.train_batches(0))
    if data == "generated-cifar10":
        other = open_source(recipe(data, augment=augment, channels_last=not channels_last), "cpu")
        assert torch.equal(joined(batches)[0], joined([*other.train_batches(0), *other.test_batches()])[0])


def test_an_epoch_is_a_function_of_its_number_and_the_seed():
    source = open_source(recipe(augment=True), "cpu")
    list(source.train_batches(0))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    later = joined(source.train_batches(7))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not ours"
    fresh = open_source(recipe(augment=True), "cpu")
    # Epochs may overlap: nothing of one is the other's.
    running = fresh.train_batches(7)
    first = next(running)
    assert not torch.equal(first[0], next(fresh.train_batches(8))[0])
    again = joined([first, *running])
    assert torch.equal(again[0], later[0])
    assert torch.equal(again[1], later[1])
    other = joined(open_source(recipe(augment=True, seed=1), "cpu").train_batches(7))
    assert not torch.equal(other[1], later[1])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("batch_size", "augment"), [(60, False), (60, True), (300, False), (300, True)])
def test_shares_put_together_are_the_batch_of_one_process(world_size, batch_size, augment):
    asked = recipe(batch_size=batch_size, augment=augment)
    alone = open_source(asked, "cpu")
    ranks = [open_source(asked, "cpu", rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {rank.iterations_per_epoch for rank in ranks} == {alone.iterations_per_epoch}
    parts = zip(*(rank.train_batches(1) for rank in ranks), strict=True)
    for (images, labels), part in zip(alone.train_batches(1), parts, strict=True):
        assert {len(piece[1]) for piece in part} == {batch_size // world_size}
        assert torch.equal(torch.cat([piece[0] for piece in part]), images)
        assert torch.equal(torch.cat([piece[1] for piece in part]), labels)
    images, labels = joined([batch for rank in ranks for batch in rank.test_batches()])
    expected = joined(alone.test_batches())
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])


def test_more_processes_than_test_examples():
    asked = recipe(batch_size=8, test_examples=3)
    ranks = [open_source(asked, "cpu", rank=rank, world_size=4) for rank in range(4)]
    assert sorted(sum(len(labels) for _, labels in rank.test_batches()) for rank in ranks) == [0, 1, 1, 1]


def test_a_full_batch_is_made_once_and_not_shuffled(cifar):
    source = open_source(recipe(batch_size=300), "cpu")
    assert source.iterations_per_epoch == 1
    ((images, labels),) = source.train_batches(0)
    ((again, labels_again),) = source.train_batches(1)
    assert again.data_ptr() == images.data_ptr()
    assert labels_again.data_ptr() == labels.data_ptr()
    assert torch.equal(labels, cifar[1])
    torch.testing.assert_close(images, (cifar[0].float() - CIFAR_MEAN) / CIFAR_STD, atol=1e-5, rtol=0)


def test_a_full_batch_is_augmented_anew(cifar):
    source = open_source(recipe(batch_size=300, augment=True), "cpu")
    ((images, labels),) = source.train_batches(0)
    ((other, other_labels),) = source.train_batches(1)
    assert not torch.equal(images, other)
    assert torch.equal(labels, cifar[1])
    assert torch.equal(other_labels, cifar[1])


@pytest.mark.parametrize("data", ["generated-mnist", "generated-cifar10"])
def test_look_alikes_can_be_learned(data):
    asked = recipe(data, batch_size=64, train_examples=1024, test_examples=512)
    source, again = (open_source(asked, "cpu") for _ in range(2))
    assert torch.equal(next(source.train_batches(0))[0], next(again.train_batches(0))[0])
    images, labels = joined(source.train_batches(0))
    assert labels.bincount(minlength=10).min() > 50
    assert images.mean().abs() < 0.5
    assert 0.3 < images.std() < 2
    network = torch.nn.Linear(images[0].numel(), 10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    for epoch in range(3):
        for x, y in source.train_batches(epoch):
            optimizer.zero_grad()
            cross_entropy(network(x.flatten(1)), y).backward()
            optimizer.step()
    x, y = joined(source.test_batches())
    error = (network(x.flatten(1)).argmax(1) != y).double().mean()
    # Noise and shifts leave something to do, and guessing is at 0.9.
    assert error < 0.25


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ({"data": "cifar100"}, {}, "data='cifar100' of a recipe: known are mnist, cifar10, imagenet, imagenette, gen"),
        ({"batch_size": 301}, {}, "batch_size=301 of a recipe: there are 300 training examples"),
        ({"train_examples": 5000}, {}, "train_examples=5000 of a recipe: generated-cifar10 has 4096"),
        ({"test_examples": 5000}, {}, "test_examples=5000 of a recipe: generated-cifar10 has 1024"),
        ({"image_size": 64}, {}, "image_size=64 of a recipe: images of generated-cifar10 are of size 32"),
        ({}, {"world_size": 3}, "batch_size=64 of a recipe cannot be shared by 3 processes: a multiple of 3"),
        ({}, {"rank": 2, "world_size": 2}, "rank is 2, but a number from 0 and below world_size=2"),
        ({"data": "generated-imagenet"}, {"rank": -1}, "rank is -1"),
    ],
)
def test_what_cannot_be_had_is_named(values, options, expected):
    with pytest.raises(ValueError, match=expected):
        open_source(recipe(**values), "cpu", **options)


def test_seeds_are_mixed():
    seeds = [mixed(seed, epoch) for seed in range(30) for epoch in range(30)]
    assert len(set(seeds)) == 900
    # The generator of the CPU looks at 32 bits.
    assert len({seed % 2**32 for seed in seeds}) == 900
    # A value that may never change: runs of today and tomorrow have the same order.
    assert mixed(0, 1) == 18035787800520607725


@pytest.mark.parametrize("count", [0, 1, 7, 12])
def test_shares_cover_everything(count):
    everything = list(range(count))
    parts = [everything[share_of(count, rank, 3)] for rank in range(3)]
    assert [example for part in parts for example in part] == everything
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.skipif(SHARED is None, reason="ITERNORM_SHARED_DATA is not set")
def test_real_mnist(tmp_path):
    command = [sys.executable, str(Path(str(SHARED)) / "unpack.py"), str(tmp_path), "--only", "mnist"]
    subprocess.run(command, check=True, capture_output=True)
    asked = Recipe("mnist", "mlp", "BN", 60000, 0.1, 1)
    source = open_source(asked, "cpu", folder=tmp_path)
    ((images, labels),) = source.train_batches(0)
    assert images.shape == (60000, 1, 28, 28)
    assert images.mean().abs() < 1e-3
    assert (images.std() - 1).abs() < 1e-3
    assert labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert sum(len(labels) for _, labels in source.test_batches()) == 10000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("data", ["generated-cifar10", "generated-imagenet"])
def test_the_gpu_has_the_same_batches(data):
    asked = recipe(data, 16, train_examples=96, test_examples=40, augment=True, channels_last=True)
    for cpu, gpu in zip(
        open_source(asked, "cpu").train_batches(1), open_source(asked, "cuda").train_batches(1), strict=True
    ):
        assert gpu[0].is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(gpu[0].cpu(), cpu[0])
        assert torch.equal(gpu[1].cpu(), cpu[1])
