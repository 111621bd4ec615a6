"""Small data sets that look like MNIST, CIFAR-10 and ImageNet, for machines that do not have these.

An image is the pattern of its class, in some strength and at some place, under noise: easy to learn and not trivial.
The values are a function of the name and the split alone.
"""

import functools
import random
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from iternorm.experiments.data.seeds import mixed

NUM_EXAMPLES = {"train": 4096, "test": 1024}
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
# About the mean of the bytes, and what a deviation of one is in them.
_LEVELS = {"mnist": (30, 80), "cifar10": (120, 60), "imagenet": (115, 60)}
NUM_CLASSES = 10

# More than ten classes, so that top-5 errors mean something.
FOLDER_CLASSES = 12
FOLDER_IMAGES = {"train": 8, "val": 4}


@functools.cache
def look_alike(name: str, split: str) -> tuple[Tensor, Tensor]:
    """Images ``[N, C, H, W]`` as bytes, and labels ``[N]``, in the shapes of ``mnist`` or ``cifar10``."""
    channels, height, width = SHAPES[name]
    # The patterns are those of the name: training and test set share them.
    patterns = _patterns(name, NUM_CLASSES, channels, max(height, width) + 4)
    generator = torch.Generator().manual_seed(mixed(name, split))
    count = NUM_EXAMPLES[split]
    labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    top, left = torch.randint(0, 5, (2, count), generator=generator)
    strength = torch.empty(count, 1, 1, 1).uniform_(0.5, 1, generator=generator)
    windows = patterns.unfold(2, height, 1).unfold(3, width, 1)
    images = strength * windows[labels, :, top, left]
    images += 0.25 * torch.randn(images.shape, generator=generator)
    return _bytes(images, name), labels


def write_folder(folder: Path) -> None:
    """An image folder of the form of ImageNet's: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``.

    The first image of each class is grey, the second CMYK, as a few of ImageNet's are; sizes and shapes differ.
    """
    patterns = _patterns("imagenet", FOLDER_CLASSES, 3, 64)
    for split, count in FOLDER_IMAGES.items():
        generator = torch.Generator().manual_seed(mixed("imagenet", split))
        choices = random.Random(mixed("imagenet", split))
        for label in range(FOLDER_CLASSES):
            place = folder / split / f"class{label:02}"
            place.mkdir(parents=True)
            for number in range(count):
                size = choices.choice([(48, 64), (64, 48), (56, 56)])
                image = interpolate(patterns[label][None], size, mode="bilinear", antialias=True)
                image = choices.uniform(0.5, 1) * image + 0.1 * torch.randn(image.shape, generator=generator)
                _picture(_bytes(image, "imagenet")[0], ("L", "CMYK")[number] if number < 2 else "RGB").save(
                    place / f"{number}.jpg", quality=90
                )


def _picture(image: Tensor, mode: str):
    from PIL import Image

    pixels = bytes(image.permute(1, 2, 0).flatten().tolist())
    return Image.frombytes("RGB", (image.shape[2], image.shape[1]), pixels).convert(mode)


def _patterns(name: str, count: int, channels: int, size: int) -> Tensor:
    """Smooth random patterns ``[count, channels, size, size]`` of mean 0."""
    generator = torch.Generator().manual_seed(mixed(name, "patterns"))
    coarse = torch.randn(count, channels, 5, 5, generator=generator)
    return interpolate(coarse, (size, size), mode="bicubic")


def _bytes(images: Tensor, name: str) -> Tensor:
    level, spread = _LEVELS[name]
    return (level + spread * images).round().clamp(0, 255).to(torch.uint8)
