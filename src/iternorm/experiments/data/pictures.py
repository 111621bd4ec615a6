"""Single pictures: reading them, and cutting and colouring them as the authors' Lua code does for ImageNet.

Departure: pictures are scaled by Pillow's bicubic filter, which smooths when it makes them smaller; the Lua code's does
not.
"""

import os
import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"})

# Of ImageNet, of values in [0, 1].
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

_GREY = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
# Principal axes of ImageNet's colours (columns), and their deviations.
_AXES = torch.tensor(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]], dtype=torch.float64
)
_DEVIATIONS = (0.2175, 0.0188, 0.0045)

# The changes of colour: by how much each may differ from a factor of 1, and the deviation of the light.
BRIGHTNESS, CONTRAST, SATURATION = range(3)
JITTER, LIGHTING = 0.4, 0.1
# A random part of a picture: its share of the area, and its sides' ratio.
AREAS, ASPECTS, ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 10


def read_rgb(path: str | os.PathLike[str]) -> "Image":
    """A picture of any mode in RGB. Transparency is left out; 16 bits of grey become 8.

    Raises:
        ValueError: The file is not a whole picture.
        OSError: It cannot be opened.
    """
    from PIL import Image

    with open(path, "rb") as file:
        # What Pillow's decoders raise for a broken file is not limited to a few types.
        try:
            with Image.open(file) as opened:
                if opened.mode.startswith("I"):
                    # A plain conversion would clip all above 255.
                    return opened.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L").convert("RGB")
                # A palette's transparency has to become a channel before it can be left out.
                return (opened.convert("RGBA") if "transparency" in opened.info else opened).convert("RGB")
        except Exception as error:
            raise ValueError(f"{path} is not a picture that can be read: {error}; replace it or remove it") from error


def centre(picture: "Image", shorter: int, size: int) -> "Image":
    """The square of `size` in the middle, after the shorter side was scaled to `shorter`."""
    from PIL.Image import Resampling

    scale = shorter / min(picture.size)
    width, height = (max(shorter, round(side * scale)) for side in picture.size)
    picture = picture.resize((width, height), Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return picture.crop((left, top, left + size, top + size))


def random_crop(picture: "Image", size: int, choices: random.Random) -> "Image":
    """A random part (8 to 100 % of the area, sides as 3:4 to 4:3) scaled to a square, and mirrored or not."""
    from PIL.Image import Resampling, Transpose

    crop = picture.resize((size, size), Resampling.BICUBIC, box=random_box(*picture.size, choices))
    return crop.transpose(Transpose.FLIP_LEFT_RIGHT) if choices.random() < 0.5 else crop


def random_box(width: int, height: int, choices: random.Random) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random part; the square in the middle where ten attempts did not fit."""
    for _ in range(ATTEMPTS):
        area = choices.uniform(*AREAS) * width * height
        aspect = choices.uniform(*ASPECTS)
        w, h = max(1, round((area * aspect) ** 0.5)), max(1, round((area / aspect) ** 0.5))
        if choices.random() < 0.5:
            w, h = h, w
        if w <= width and h <= height:
            left, top = choices.randint(0, width - w), choices.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def random_colours(mean: Tensor, choices: random.Random) -> Tensor:
    """A map ``[3, 4]`` of colours in [0, 1], a matrix and an offset, for a picture whose mean colour is `mean`.

    Brightness, contrast and saturation change by up to 0.4 in a random order, then the light along the principal axes
    of ImageNet's colours, by 0.1 of their deviations.
    """
    kinds, alphas = [], []
    for kind in choices.sample((BRIGHTNESS, CONTRAST, SATURATION), 3):
        kinds.append(kind)
        alphas.append(1 + choices.uniform(-JITTER, JITTER))
    light = [choices.gauss(0, LIGHTING) for _ in _DEVIATIONS]
    values = (torch.tensor([drawn], dtype=torch.float64) for drawn in (alphas, light))
    return colour_maps(mean[None], torch.tensor([kinds]), *values)[0]


def colour_maps(means: Tensor, kinds: Tensor, alphas: Tensor, light: Tensor) -> Tensor:
    """Maps ``[N, 3, 4]`` of colours in [0, 1] for pictures whose mean colours are `means`.

    All changes are linear in the picture, except for its mean grey, on which contrast depends. So one map replaces four
    passes.

    Args:
        means: ``[N, 3]``.
        kinds: What is changed first, second and third, ``[N, 3]``: `BRIGHTNESS`, `CONTRAST` and `SATURATION`.
        alphas: By which factors, ``[N, 3]``.
        light: Steps along the principal axes of ImageNet's colours, in their deviations, ``[N, 3]``.
    """
    like = {"dtype": torch.float64, "device": means.device}
    identity, grey = torch.eye(3, **like), _GREY.to(means.device)
    matrix, offset = identity.expand(len(means), 3, 3), torch.zeros(len(means), 3, 1, **like)
    for place in range(3):
        kind, alpha = (values[:, place, None, None] for values in (kinds, alphas))
        mean_grey = grey @ (matrix @ means.double()[..., None] + offset)  # [N, 1]
        step = alpha * identity + torch.where(kind == SATURATION, 1 - alpha, 0) * grey.expand(3, 3)
        matrix = step @ matrix
        offset = step @ offset + torch.where(kind == CONTRAST, (1 - alpha) * mean_grey[..., None], 0)
    shift = (light * torch.tensor(_DEVIATIONS, **like)) @ _AXES.to(means.device).mT
    return torch.cat([matrix, offset + shift[..., None]], 2)


def normalizing(colours: Tensor) -> Tensor:
    """Maps ``[..., 3, 4]`` of colours in [0, 1], from bytes and to mean 0 and deviation 1."""
    mean, std = (torch.tensor(values, dtype=torch.float64, device=colours.device)[:, None] for values in (MEAN, STD))
    return torch.cat([colours[..., :3] / 255, colours[..., 3:] - mean], -1) / std


def pixels(picture: "Image") -> Tensor:
    """The bytes of an RGB picture, ``[H, W, 3]``."""
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)
