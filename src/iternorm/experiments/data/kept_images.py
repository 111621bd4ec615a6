"""An image folder that is read once and kept on the device as bytes; cutting and colouring are done there.

What is random in an epoch is a function of the seed and the epoch, drawn on the CPU for all images at once: it is the
same on every device and in every number of processes. Crops are scaled by the filter of `pictures`, Pillow's bicubic
one, as two products with matrices of its weights.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from iternorm.experiments.data import datasets as data
from iternorm.experiments.data import pictures
from iternorm.experiments.data.image_folder import MARGIN, Examples, OfFolder, available_cores, coloured
from iternorm.experiments.data.order import (
    epoch_order,
    share_of,
    shares,
)
from iternorm.experiments.data.seeds import mixed
from iternorm.experiments.recipe import Recipe

# The side of a kept image, in sides of a crop: smaller parts of it are scaled up to a crop.
_KEPT = 1.75
_TEST_BATCH = 256


class KeptSource(OfFolder):
    """A folder's images on the device. See `iternorm.experiments.data.sources.Source`.

    Training images are kept as squares; of others the middle is kept.
    """

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
        size = self.in_shape[1]
        margin = round(size * MARGIN)
        share = range(self.num_test)[share_of(self.num_test, rank, world_size)]
        with ThreadPoolExecutor(available_cores() if num_workers is None else max(num_workers, 1)) as pool:
            shorter, kept = (round(size * _KEPT),) * 2 if recipe.augment else (margin, size)
            self._images, self._labels = self._read(pool, self._train, range(self.num_train), shorter, kept)
            self._test = self._read(pool, self._val, share, margin, size)

    def _read(
        self, pool: ThreadPoolExecutor, examples: Examples, indices: range, shorter: int, size: int
    ) -> tuple[Tensor, Tensor]:
        """The middle squares ``[N, 3, size, size]`` of images, as bytes on the device, and their labels."""
        images = torch.empty(len(indices), 3, size, size, dtype=torch.uint8)

        def read(place: int) -> None:
            picture = pictures.read_rgb(examples.path(indices[place]))
            images[place] = pictures.pixels(pictures.centre(picture, shorter, size)).permute(2, 0, 1)

        # Every result is read, so that an error reaches the caller.
        for _ in pool.map(read, range(len(indices))):
            pass
        return images.to(self._device), examples.labels[indices.start : indices.stop].to(self._device)

    def train_batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of each batch of an epoch."""
        choices = epoch_choices(self._recipe, self.num_train, epoch)
        mine = shares(choices, self._recipe, self._rank, self._world_size).to(self._device)  # [15, batches, share]
        for batch in mine.unbind(1):
            index = batch[0].long()
            images, labels = self._images[index], self._labels[index]
            yield (self._augmented(images, batch[1:]) if self._recipe.augment else self._plain(images)), labels

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test set."""
        for images, labels in zip(*(values.split(_TEST_BATCH) for values in self._test), strict=True):
            if len(images):
                yield self._plain(images), labels

    def _augmented(self, images: Tensor, choices: Tensor) -> Tensor:
        left, top, width, height, flip, *colours = choices
        kinds, alphas, light = torch.stack(colours, 1).split(3, 1)
        side, size = images.shape[-1], self.in_shape[-1]
        across = resampling(side * left, side * width, side, size)
        across = torch.where(flip.bool()[:, None, None], across.flip(1), across)
        down = resampling(side * top, side * height, side, size)
        crops = (down[:, None] @ images.float() @ across[:, None].mT).clamp_(0, 255)
        maps = pictures.colour_maps(crops.mean((2, 3)).double() / 255, kinds, alphas, light)
        return self._coloured(crops, maps)

    def _plain(self, images: Tensor) -> Tensor:
        maps = torch.eye(3, 4, dtype=torch.float64, device=images.device)
        return self._coloured(images, maps.expand(len(images), 3, 4))

    def _coloured(self, images: Tensor, maps: Tensor) -> Tensor:
        return coloured(images.permute(0, 2, 3, 1), pictures.normalizing(maps).float(), self._recipe.channels_last)


def epoch_choices(recipe: Recipe, num_train: int, epoch: int) -> Tensor:
    """What an epoch draws at random, ``[15, N]``.

    The rows are the example; the crop, as left, top, width and height in sides of the image; whether it is mirrored;
    and of its colours the order of three changes, their three factors, and three steps of the light.
    """
    generator = torch.Generator().manual_seed(mixed(recipe.seed, epoch))
    order = epoch_order(recipe, num_train, generator).double()[None]
    count = order.shape[1]

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(*shape, count, dtype=torch.float64).uniform_(low, high, generator=generator)

    attempts = pictures.ATTEMPTS
    area, aspect = uniform(*pictures.AREAS, attempts), uniform(*pictures.ASPECTS, attempts)
    aspect = torch.where(uniform(0, 1, attempts) < 0.5, aspect, 1 / aspect)
    sides = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], 1)  # [attempts, 2, N]
    # The first attempt that fits; the whole image where none does.
    sides = torch.cat([sides, torch.ones(1, 2, count, dtype=torch.float64)])
    first = (sides.amax(1) <= 1).int().argmax(0)
    width_height = sides.gather(0, first.expand(1, 2, count))[0]
    left_top = uniform(0, 1, 2) * (1 - width_height)
    flip = (uniform(0, 1, 1) < 0.5).double()
    kinds = uniform(0, 1, 3).argsort(0).double()
    alphas = uniform(1 - pictures.JITTER, 1 + pictures.JITTER, 3)
    light = pictures.LIGHTING * torch.randn(3, count, dtype=torch.float64, generator=generator)
    return torch.cat([order, left_top, width_height, flip, kinds, alphas, light])


def resampling(start: Tensor, length: Tensor, before: int, after: int) -> Tensor:
    """Matrices ``[N, after, before]`` that scale the parts ``[start, start + length)`` of rows to `after` values.

    The filter is Pillow's bicubic one, which is wider where a part is made smaller.
    """
    scale = (length / after)[:, None, None]
    stretch = scale.clamp_min(1)
    places = torch.arange(after, dtype=start.dtype, device=start.device)[:, None] + 0.5
    centres = start[:, None, None] + places * scale
    pixels = torch.arange(before, dtype=start.dtype, device=start.device) + 0.5
    x = ((pixels - centres) / stretch).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0))
    return (weights / weights.sum(-1, keepdim=True)).float()
