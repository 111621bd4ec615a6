"""Data sets that are folders of images, ImageNet for one: ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``.

A folder in the folder of data sets is a data set of its own name. Worker processes decode and cut the images. They come
as bytes, and with them the map of the colours of each: the device colours and normalizes them. What is random for an
image is a function of the seed, the epoch and the image.
"""

import hashlib
import os
import random
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from iternorm.experiments.data import datasets as data
from iternorm.experiments.data import generated, pictures
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

_SIZE = 224
# The Lua code scales the shorter side to 256 before it cuts out 224 pixels.
MARGIN = 256 / 224
_TEST_BATCH = 256
_MAX_WORKERS = 16
# Classes, training and validation images of ImageNet, the ILSVRC 2012 set.
IMAGENET = (1000, 1_281_167, 50_000)


@dataclass(frozen=True)
class Examples:
    """Files of one split and their classes.

    The k-th files of all classes come before the next of any, so that the first examples cover all classes. The names
    are one string: a million objects would be copied into each worker, page by page, by reference counting.
    """

    folder: Path
    names: bytes
    ends: Tensor
    labels: Tensor

    @staticmethod
    def of(folder: Path, classes: Sequence[str]) -> "Examples":
        """The files of the classes' folders.

        Raises:
            ValueError: A class has no images, or a link leads nowhere.
        """
        files = []
        for name in classes:
            with os.scandir(folder / name) as entries:
                found = [entry for entry in entries if _is_image(entry.name) and not entry.is_dir()]
            if lost := [entry.path for entry in found if not entry.is_file()]:
                raise ValueError(f"{lost[0]} leads to no file: repair the link or remove it")
            if not found:
                raise ValueError(
                    f"{folder / name} holds no images ({', '.join(sorted(pictures.SUFFIXES))}): put some there, or "
                    f"remove {name}/ from both train/ and val/"
                )
            files.append([f"{name}/{file}" for file in sorted(entry.name for entry in found)])
        rounds = [(file, label) for row in zip_longest(*files) for label, file in enumerate(row) if file is not None]
        names = [os.fsencode(file) for file, _ in rounds]
        ends = torch.tensor([len(name) for name in names]).cumsum(0)
        return Examples(folder, b"".join(names), ends, torch.tensor([label for _, label in rounds]))

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        """The file of an example."""
        start = int(self.ends[index - 1]) if index else 0
        return self.folder / os.fsdecode(self.names[start : int(self.ends[index])])


class ImageFolder(NamedTuple):
    """A folder of images and what it was found to hold."""

    classes: list[str]
    train: Examples
    val: Examples
    record: dict[str, Any]


def find_folder(recipe: Recipe, folder: data.Folder, *, owner: object) -> ImageFolder:
    """The image folder that a recipe names.

    Args:
        recipe: Its data set is the name of a folder below the folder of data sets, or generated.
        folder: The folder of data sets.
        owner: A generated folder is removed with it.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It is not of the right form, or is called ImageNet and is something else.
    """
    name = recipe.data
    if name.startswith(data.GENERATED):
        place = Path(tempfile.mkdtemp(prefix="iternorm-"))
        weakref.finalize(owner, shutil.rmtree, place, ignore_errors=True)
        generated.write_folder(place)
    else:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"data={name!r} of a recipe: the name of a folder in the folder of data sets is needed")
        root = data.data_folder(folder)
        place = root / data.PLACES.get(name, name)
        if not place.exists():
            data.check_folder(root, name, folder)
    classes, train, val = find_examples(place)
    counts = len(classes), len(train), len(val)
    if name == "imagenet" and counts != IMAGENET:
        found, expected = (
            f"{classes:,} classes, {train:,} training and {val:,} validation images"
            for classes, train, val in (counts, IMAGENET)
        )
        raise ValueError(
            f"{place} holds {found}, and ImageNet has {expected}: its results would stand in ImageNet's rows. Give it "
            "a folder of another name beside this one, and a recipe with that name as its data; Imagenette has "
            "`iternorm run imagenette`, and a study of your own is described in docs/using.md"
        )
    listing = hashlib.sha256()
    for split in (train, val):
        # The names are one string: where each ends tells them apart.
        listing.update(split.names + repr(split.ends.tolist()).encode())
    record = dict(zip(("classes", "train_images", "test_images"), counts, strict=True))
    return ImageFolder(classes, train, val, {"name": name, **record, "listing_sha256": listing.hexdigest()})


def find_examples(folder: Path) -> tuple[list[str], Examples, Examples]:
    """The classes, the training and the validation examples of an image folder.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It is not of the form ``train/CLASS/*.JPEG``, ``val/CLASS/*.JPEG``, with the same classes.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is missing, and folders of images cannot be downloaded: put the images there, or link to them, "
            "as train/CLASS/*.JPEG and val/CLASS/*.JPEG"
        )
    train, val = (_classes(folder, split) for split in ("train", "val"))
    if train != val:
        differences = [
            f"{', '.join(only[:3])}{', ...' if len(only) > 3 else ''} only in {split}/"
            for split, only in (("train", sorted({*train} - {*val})), ("val", sorted({*val} - {*train})))
            if only
        ]
        raise ValueError(f"the classes of {folder} differ: {'; '.join(differences)}. Both need the same class folders")
    return train, Examples.of(folder / "train", train), Examples.of(folder / "val", val)


def _classes(folder: Path, split: str) -> list[str]:
    if not (folder / split).is_dir():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"{folder} has no folder {split}/, but {found}: train/CLASS/*.JPEG and val/CLASS/*.JPEG needed"
        )
    with os.scandir(folder / split) as entries:
        found = list(entries)
    classes = sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        images = sum(_is_image(entry.name) for entry in found) or "no"
        raise ValueError(
            f"{folder / split} has no class folders, but {images} images: sort the images into {split}/CLASS/*.JPEG"
        )
    return classes


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in pictures.SUFFIXES and not name.startswith(".")


class _Pictures(Dataset):
    """Bytes ``[H, W, 3]``, the map of the colours ``[3, 4]`` and the label of an example.

    Or the error that says which file is broken: raised in a worker it would reach the user inside a traceback.
    """

    def __init__(self, examples: Examples, size: int, random_of: tuple[int, int] | None) -> None:
        self.examples, self.size, self.random_of = examples, size, random_of

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor] | Exception:
        try:
            picture = pictures.read_rgb(self.examples.path(index))
        except (ValueError, OSError) as error:
            return error
        colours = torch.eye(3, 4, dtype=torch.float64)
        if self.random_of is None:
            values = pictures.pixels(pictures.centre(picture, round(self.size * MARGIN), self.size))
        else:
            choices = random.Random(mixed(*self.random_of, index))
            values = pictures.pixels(pictures.random_crop(picture, self.size, choices))
            colours = pictures.random_colours(values.double().mean((0, 1)) / 255, choices)
        return values, pictures.normalizing(colours).float(), self.examples.labels[index]


def _joined(examples: list[Any]) -> list[Tensor] | Exception:
    for example in examples:
        if isinstance(example, Exception):
            return example
    return [torch.stack(values) for values in zip(*examples, strict=True)]


class OfFolder:
    """What sources of a folder of images have in common. See `iternorm.experiments.data.sources.Source`."""

    def __init__(
        self, recipe: Recipe, device: torch.device, rank: int, world_size: int, folder: data.Folder = None
    ) -> None:
        check_share(recipe, rank, world_size)
        classes, self._train, self._val, self.record = find_folder(recipe, folder, owner=self)
        size = recipe.image_size or _SIZE
        self.num_classes = len(classes)
        self.in_shape: tuple[int, int, int] = 3, size, size
        self.num_train = num_examples(recipe.train_examples, len(self._train), "train_examples", recipe.data)
        self.num_test = num_examples(recipe.test_examples, len(self._val), "test_examples", recipe.data)
        self.iterations_per_epoch = iterations_per_epoch(recipe, self.num_train)
        self._recipe, self._device = recipe, device
        self._rank, self._world_size = rank, world_size


class FolderSource(OfFolder):
    """ImageNet or a look-alike, read from the disk batch by batch."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        folder: data.Folder = None,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(recipe, device, rank, world_size, folder)
        self._num_workers = available_cores() if num_workers is None else num_workers

    def train_batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of each batch of an epoch."""
        recipe = self._recipe
        generator = torch.Generator().manual_seed(mixed(recipe.seed, epoch))
        order = shares(epoch_order(recipe, self.num_train, generator), recipe, self._rank, self._world_size)
        dataset = _Pictures(self._train, self.in_shape[1], (recipe.seed, epoch) if recipe.augment else None)
        yield from self._batches(dataset, order.tolist())

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test set."""
        share = torch.arange(self.num_test)[share_of(self.num_test, self._rank, self._world_size)]
        batches = [part.tolist() for part in share.split(_TEST_BATCH) if len(part)]
        yield from self._batches(_Pictures(self._val, self.in_shape[1], None), batches)

    def _batches(self, dataset: _Pictures, batches: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        loader = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=min(self._num_workers, len(batches)),
            collate_fn=_joined,
            pin_memory=self._device.type == "cuda",
            # The loader draws a seed for its workers, which must not come from the global generator.
            generator=torch.Generator(),
        )
        for batch in loader:
            if isinstance(batch, Exception):
                raise batch
            values, colours, labels = (tensor.to(self._device, non_blocking=True) for tensor in batch)
            yield coloured(values, colours, self._recipe.channels_last), labels


def coloured(values: Tensor, colours: Tensor, channels_last: bool) -> Tensor:
    """Floats ``[N, 3, H, W]`` of bytes ``[N, H, W, 3]`` and a map of the colours ``[N, 3, 4]`` of each.

    Computed as sums of products, because TF32 and autocast would round a matrix product.
    """
    images = values.permute(0, 3, 1, 2)
    maps = colours[..., None, None]  # [N, 3, 4, 1, 1]
    out = torch.empty(
        images.shape,
        device=images.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    torch.addcmul(maps[:, :, 3], images[:, :1], maps[:, :, 0], out=out)
    return out.addcmul_(images[:, 1:2], maps[:, :, 1]).addcmul_(images[:, 2:], maps[:, :, 2])


def available_cores() -> int:
    """Worker processes: one for each core that this process may use, of those that share the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
