"""The data sets of the paper, read from their published files, each checked by its digest.

Files lie under a folder: the one given, else the environment variable ``ITERNORM_DATA``, else the user's cache folder.

    mnist/train-images-idx3-ubyte.gz  mnist/train-labels-idx1-ubyte.gz  mnist/t10k-...
    cifar-10-batches-bin/data_batch_1.bin ... data_batch_5.bin  cifar-10-batches-bin/test_batch.bin
    imagenet/train/CLASS/*.JPEG  imagenet/val/CLASS/*.JPEG

What is missing of the first two is downloaded. ImageNet, and any other folder of images beside it under a name of its
own, is not, and is read by `iternorm.experiments.data.image_folder`.
"""

import gzip
import hashlib
import math
import os
import struct
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Split = Literal["train", "test"]
Folder = str | os.PathLike[str] | None
# Begins the names of look-alikes that are made from a seed.
GENERATED = "generated-"
DATA_SETS = ("digits", "mnist", "cifar10")

MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR10_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

# A record of CIFAR-10's binary version: one byte of label, then the red, green and blue planes, row by row.
_CIFAR_RECORD = 1 + 3 * 32 * 32


# The folder of each data set.
PLACES = {
    **{name: name for name in ("mnist", "imagenet", "imagenette")},
    "cifar10": "cifar-10-batches-bin",
}


class ImageSet(NamedTuple):
    """Images ``[N, C, H, W]``, bytes as published or floats in [0, 1], and labels ``[N]``."""

    images: Tensor
    labels: Tensor


def load(name: str, split: Split = "train", folder: Folder = None) -> ImageSet:
    """A data set by name: ``digits`` (scikit-learn's, in the package), ``mnist`` or ``cifar10``.

    Args:
        name: One of `DATA_SETS`.
        split: ``train`` or ``test``.
        folder: Where the data sets lie; see `data_folder`. A file that is not there is downloaded.

    Raises:
        ValueError: The name is not known, the folder holds other things, or a file is not the published one.
        OSError: A file is missing and cannot be downloaded.
    """
    if name not in DATA_SETS:
        raise ValueError(f"no data set is called {name!r}: known are {', '.join(DATA_SETS)}")
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}, but 'train' or 'test' is needed")
    if name == "digits":
        from iternorm.experiments.data.digits import load_digits

        digits = load_digits()
        images, labels = getattr(digits, f"{split}_images"), getattr(digits, f"{split}_labels")
        return ImageSet(images.view(-1, 1, 8, 8), labels)
    root = data_folder(folder)
    place = root / PLACES[name]
    if not all((place / file).exists() for file in _files(name, split)):
        from iternorm.experiments.data.download import download

        check_folder(root, name, folder)
        # Both splits at once: CIFAR-10's are one archive.
        files = _files(name, "train") + _files(name, "test")
        download(name, [file for file in files if not (place / file).exists()], place)
    return _mnist(place, split) if name == "mnist" else _cifar10(place, split)


def available(name: str, folder: Folder = None) -> bool:
    """Whether the files of a data set are there, so that nothing has to be downloaded. They are not read."""
    if name == "digits":
        return True
    place = data_folder(folder) / PLACES.get(name, name)
    if name not in DATA_SETS:
        return all((place / split).is_dir() for split in ("train", "val"))
    return all((place / file).is_file() for split in ("train", "test") for file in _files(name, split))


def real_or_generated(name: str) -> str:
    """The data set's own name where its files are there, else that of its look-alike: what small sizes are run on."""
    return name if available(name) else GENERATED + name


def data_folder(folder: Folder = None) -> Path:
    """The folder of all data sets: the one given, else ``ITERNORM_DATA``, else the cache folder of the system."""
    if folder is not None:
        return Path(folder)
    if named := os.environ.get("ITERNORM_DATA"):
        return Path(named)
    # What pooch.os_cache("iternorm") is, but pooch is needed for downloads only.
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "iternorm"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "iternorm" / "iternorm" / "Cache"
    cache = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(cache) if cache else Path.home() / ".cache") / "iternorm"


def check_folder(root: Path, name: str, folder: Folder = None) -> None:
    """Refuse a folder that somebody chose and that does not exist or is for other things.

    Raises:
        ValueError: It is one of these.
    """
    if folder is None and not os.environ.get("ITERNORM_DATA"):
        return
    # The command line's --data is ITERNORM_DATA here.
    who = "the data folder" if folder is not None else "the data folder (--data or ITERNORM_DATA)"
    known = ", ".join(place + "/" for place in PLACES.values())
    if not root.exists():
        raise ValueError(f"{who} is {root}, which does not exist: make this folder, or name the one that holds {known}")
    if not root.is_dir():
        raise ValueError(f"{who} is {root}, which is a file: a folder is needed")
    found = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
    if found and not any((root / place).is_dir() for place in PLACES.values()):
        some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        place = PLACES.get(name, name)
        raise ValueError(
            f"{who} is {root}, which holds other things ({some}) and none of {known}: name the folder that "
            f"holds {place}/, or make {root / place}"
        )


def _files(name: str, split: Split) -> list[str]:
    if name == "mnist":
        prefix = "train" if split == "train" else "t10k"
        return [f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"]
    return [f"data_batch_{k}.bin" for k in range(1, 6)] if split == "train" else ["test_batch.bin"]


def _mnist(place: Path, split: Split) -> ImageSet:
    images, labels = (parse_idx(_unzipped(place / file)) for file in _files("mnist", split))
    return ImageSet(images[:, None], labels.long())


def _unzipped(path: Path) -> bytes:
    return gzip.decompress(_checked(path, "md5", MNIST_MD5[path.name]))


def parse_idx(content: bytes) -> Tensor:
    """An array of bytes in LeCun's IDX format: two zeros, the type (8: bytes), the rank, the sizes, the values."""
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an IDX file of bytes: it begins with {content[:4].hex()}")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"an IDX file cut short: {len(content)} bytes, but its header is {start}")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    needed = start + math.prod(shape)
    if len(content) != needed:
        raise ValueError(f"not a whole IDX file: {len(content)} bytes, but an array of {shape} has {needed}")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)


def _cifar10(place: Path, split: Split) -> ImageSet:
    contents = [_checked(place / file, "sha256", CIFAR10_SHA256[file]) for file in _files("cifar10", split)]
    return parse_cifar10(b"".join(contents))


def parse_cifar10(content: bytes) -> ImageSet:
    """Records of CIFAR-10's binary version."""
    if not content or len(content) % _CIFAR_RECORD:
        raise ValueError(f"not whole records of CIFAR-10: {len(content)} bytes, but a record has {_CIFAR_RECORD}")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _CIFAR_RECORD)
    return ImageSet(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long())


def _checked(path: Path, kind: str, expected: str) -> bytes:
    content = path.read_bytes()
    found = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise ValueError(
            f"{path} is not the published file: its {kind} is {found}, not {expected}, "
            f"and it has {len(content)} bytes: remove it, and it is downloaded"
        )
    return content
