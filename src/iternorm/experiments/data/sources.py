"""Batches to train and to test on, by the name of the data set.

MNIST and CIFAR-10 lie on the device as bytes. An epoch is put in order and augmented there at its start, by a handful
of operations on all of it; a step takes a slice and normalizes it, in one operation. Order and augmentation of an epoch
are a function of the recipe's seed and the number of the epoch, drawn on the CPU: they are the same on every device and
in every number of processes, and nothing has to be saved to resume.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from iternorm.experiments.data import datasets as data
from iternorm.experiments.data import generated
from iternorm.experiments.data.image_folder import FolderSource
from iternorm.experiments.data.kept_images import KeptSource
from iternorm.experiments.data.order import (
    check_share,
    epoch_order,
    iterations_per_epoch,
    num_examples,
    share_of,
    shares,
)
from iternorm.experiments.data.seeds import mixed
from iternorm.experiments.recipe import Recipe

_NAMES = ("mnist", "cifar10", "imagenet")
NAMES = (*_NAMES, "imagenette", *(data.GENERATED + name for name in _NAMES))

# Pixels padded by reflection on each side before a random crop.
_PADDING = 4
# Images augmented at a time: memory of 25 MB beside the epoch's for CIFAR-10.
_CHUNK = 4096
_TEST_BATCH = 1000

# Mean and deviation of the channels, of bytes: the Lua code's for CIFAR-10, the customary 0.1307 and 0.3081 for MNIST.
_STATISTICS = {
    "mnist": ([0.1307 * 255], [0.3081 * 255]),
    "cifar10": ([125.3, 123.0, 113.9], [63.0, 62.1, 66.7]),
}


class Source(Protocol):
    """Training and test batches of one process.

    Images are float32 ``[N, C, H, W]``, normalized, on the device, in the memory format of the recipe; labels int64. A
    batch may be given again later and must not be changed.

    Attributes:
        num_classes: Classes of the data set.
        in_shape: Channels, height and width of an image.
        num_train: Training examples, over all processes.
        num_test: Test examples, over all processes.
        iterations_per_epoch: Batches of an epoch; what is left for a smaller last batch is dropped.

    A source may have a `record`, plain values that tell what the data are: it is kept with the results.
    """

    num_classes: int
    in_shape: tuple[int, int, int]
    num_train: int
    num_test: int
    iterations_per_epoch: int

    def train_batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of each batch of an epoch."""
        ...

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test set. Shares of several processes may differ in size by one example."""
        ...


def open_source(
    recipe: Recipe,
    device: str | torch.device,
    *,
    rank: int = 0,
    world_size: int = 1,
    folder: data.Folder = None,
    num_workers: int | None = None,
) -> Source:
    """The batches that a recipe asks for.

    Args:
        recipe: Names the data set, the batch size, the seed and what else concerns the data.
        device: Where the batches shall be.
        rank: The number of this process.
        world_size: How many processes share each batch.
        folder: Where the data sets lie, as in `data.load`.
        num_workers: Processes that read the images of a folder; None is one for each core of this process.

    Raises:
        ValueError: The recipe asks for what the data set does not have, or a file is not what it should be.
        OSError: A file is missing and cannot be downloaded.
    """
    if recipe.data.removeprefix(data.GENERATED) not in _STATISTICS:
        if recipe.data not in NAMES and not (data.data_folder(folder) / recipe.data).is_dir():
            raise ValueError(
                f"data={recipe.data!r} of a recipe: known are {', '.join(NAMES)}, and folders of images "
                f"train/CLASS/ and val/CLASS/ by their names in {data.data_folder(folder)}"
            )
        kind = KeptSource if recipe.kept_on_device else FolderSource
        return kind(recipe, torch.device(device), rank, world_size, folder, num_workers)
    if recipe.kept_on_device:
        raise ValueError(f"kept_on_device=True of a recipe: {recipe.data} always is, False is needed")
    return TensorSource(recipe, torch.device(device), rank, world_size, folder)


class TensorSource:
    """MNIST, CIFAR-10 or their look-alikes, on the device as bytes. See `Source`."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        folder: data.Folder = None,
    ) -> None:
        check_share(recipe, rank, world_size)
        name = recipe.data.removeprefix(data.GENERATED)
        train, train_labels = _load(recipe.data, "train", folder)
        test, test_labels = _load(recipe.data, "test", folder)
        channels, height, width = train.shape[1:]
        if recipe.image_size not in (None, height):
            raise ValueError(
                f"image_size={recipe.image_size} of a recipe: images of {recipe.data} are of size {height}"
            )
        self.num_classes = 10
        self.in_shape = channels, height, width
        self.num_train = num_examples(recipe.train_examples, len(train), "train_examples", recipe.data)
        self.num_test = num_examples(recipe.test_examples, len(test), "test_examples", recipe.data)
        self.iterations_per_epoch = iterations_per_epoch(recipe, self.num_train)
        self._recipe, self._device = recipe, device
        self._rank, self._world_size = rank, world_size
        self._format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in _STATISTICS[name])
        self._scale, self._shift = 1 / std, -mean / std
        self._images = train[: self.num_train].to(device)
        if recipe.augment:
            self._images = reflection_padded(self._images, _PADDING)
        self._labels = train_labels[: self.num_train].to(device)
        share = share_of(self.num_test, rank, world_size)
        self._test = test[share].to(device, memory_format=self._format), test_labels[share].to(device)
        self._whole: Tensor | None = None

    def train_batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of each batch of an epoch."""
        if self._recipe.batch_size == self.num_train and not self._recipe.augment:
            yield self._full_batch()
            return
        images, labels = self._epoch(epoch)
        share = self._recipe.batch_size // self._world_size
        for part, part_labels in zip(images.split(share), labels.split(share), strict=True):
            yield self._normalized(part), part_labels

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test set."""
        images, labels = self._test
        for part, part_labels in zip(images.split(_TEST_BATCH), labels.split(_TEST_BATCH), strict=True):
            if len(part):
                yield self._normalized(part), part_labels

    def _normalized(self, images: Tensor) -> Tensor:
        # One operation that reads bytes and writes floats, in the memory format that the bytes have.
        return torch.addcmul(self._shift, images, self._scale)

    def _full_batch(self) -> tuple[Tensor, Tensor]:
        share = share_of(self.num_train, self._rank, self._world_size)
        if self._whole is None:
            self._whole = self._normalized(self._images[share].contiguous(memory_format=self._format))
        return self._whole, self._labels[share]

    def _epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The bytes and labels of this process's shares, in the order of the epoch."""
        choices = epoch_choices(self._recipe, self.num_train, epoch)
        choices = shares(choices, self._recipe, self._rank, self._world_size).flatten(1)
        if self._device.type == "cuda":
            choices = choices.pin_memory()
        index, top, left, flip = choices.to(self._device, non_blocking=True)
        if self._recipe.augment:
            images = cropped(self._images, self.in_shape[1:], index, top, left, flip.bool(), self._format)
        else:
            images = self._images[index].contiguous(memory_format=self._format)
        return images, self._labels[index]


def _load(name: str, split: data.Split, folder: data.Folder) -> tuple[Tensor, Tensor]:
    if name.startswith(data.GENERATED):
        return generated.look_alike(name.removeprefix(data.GENERATED), split)
    return data.load(name, split, folder)


def epoch_choices(recipe: Recipe, num_train: int, epoch: int) -> Tensor:
    """What an epoch draws at random, ``[4, N]``: example, top and left of its crop, and whether it is flipped."""
    generator = torch.Generator().manual_seed(mixed(recipe.seed, epoch))
    order = epoch_order(recipe, num_train, generator)
    offsets = torch.randint(0, 2 * _PADDING + 1, (2, len(order)), generator=generator)
    flip = torch.randint(0, 2, (1, len(order)), generator=generator)
    return torch.cat([order[None], offsets, flip])


def reflection_padded(images: Tensor, padding: int) -> Tensor:
    """Images with `padding` pixels more on each side, mirrored about the outermost ones."""
    for dim in (2, 3):
        last = images.shape[dim] - 1
        index = torch.arange(-padding, last + 1 + padding, device=images.device)
        images = images.index_select(dim, last - (last - index.abs()).abs())
    return images


def cropped(
    padded: Tensor,
    size: tuple[int, int],
    index: Tensor,
    top: Tensor,
    left: Tensor,
    flip: Tensor,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """For each of `index` its image's window of a size at `top` and `left`, mirrored left to right where `flip`."""
    # [N, C, tops, lefts, H, W]: all windows of all images, a view.
    windows = padded.unfold(2, size[0], 1).unfold(3, size[1], 1)
    shape = (len(index), padded.shape[1], *size)
    out = torch.empty(shape, dtype=padded.dtype, device=padded.device, memory_format=memory_format)
    for start in range(0, len(index), _CHUNK):
        part = slice(start, start + _CHUNK)
        crops = windows[index[part], :, top[part], left[part]]
        torch.where(flip[part, None, None, None], crops.flip(3), crops, out=out[part])
    return out
