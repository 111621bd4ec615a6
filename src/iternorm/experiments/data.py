"""The data sets of the paper, read from their published files, each checked by its digest.

Files lie under a folder, the environment variable ``ITERNORM_DATA`` unless another is given:

    mnist/train-images-idx3-ubyte.gz  mnist/train-labels-idx1-ubyte.gz  mnist/t10k-...
    cifar-10-batches-bin/data_batch_1.bin ... data_batch_5.bin  cifar-10-batches-bin/test_batch.bin
"""

import gzip
import hashlib
import os
import struct
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Split = Literal["train", "test"]
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


class ImageSet(NamedTuple):
    """Images ``[N, C, H, W]``, bytes as published or floats in [0, 1], and labels ``[N]``."""

    images: Tensor
    labels: Tensor


def load(name: str, split: Split = "train", folder: str | os.PathLike[str] | None = None) -> ImageSet:
    """A data set by name: ``digits`` (scikit-learn's, in the package), ``mnist`` or ``cifar10``.

    Raises:
        ValueError: The name is not known, no folder is given, or a file is not the published one.
        FileNotFoundError: A file is missing.
    """
    if name not in DATA_SETS:
        raise ValueError(f"no data set is called {name!r}: known are {', '.join(DATA_SETS)}")
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}, but 'train' or 'test' is needed")
    if name == "digits":
        from .demo import load_digits

        digits = load_digits()
        images, labels = getattr(digits, f"{split}_images"), getattr(digits, f"{split}_labels")
        return ImageSet(images.view(-1, 1, 8, 8), labels)
    folder = folder if folder is not None else os.environ.get("ITERNORM_DATA")
    if not folder:
        raise ValueError(f"{name} is read from its published files: set ITERNORM_DATA to the folder that holds them")
    return _mnist(Path(folder), split) if name == "mnist" else _cifar10(Path(folder), split)


def _mnist(folder: Path, split: Split) -> ImageSet:
    prefix = "train" if split == "train" else "t10k"
    arrays = []
    for name in (f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"):
        content = _checked(folder / "mnist" / name, "md5", MNIST_MD5[name])
        arrays.append(parse_idx(gzip.decompress(content)))
    return ImageSet(arrays[0][:, None], arrays[1].long())


def parse_idx(content: bytes) -> Tensor:
    """An array of bytes in LeCun's IDX format: two zeros, the type (8: bytes), the rank, the sizes, the values."""
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an IDX file of bytes: it begins with {content[:4].hex()}")
    rank = content[3]
    shape = struct.unpack_from(f">{rank}I", content, 4)
    values = torch.frombuffer(bytearray(content[4 + 4 * rank :]), dtype=torch.uint8)
    return values.view(shape)


def _cifar10(folder: Path, split: Split) -> ImageSet:
    names = [f"data_batch_{k}.bin" for k in range(1, 6)] if split == "train" else ["test_batch.bin"]
    contents = [_checked(folder / "cifar-10-batches-bin" / name, "sha256", CIFAR10_SHA256[name]) for name in names]
    return parse_cifar10(b"".join(contents))


def parse_cifar10(content: bytes) -> ImageSet:
    """Records of CIFAR-10's binary version."""
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _CIFAR_RECORD)
    return ImageSet(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long())


def _checked(path: Path, kind: str, expected: str) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: put the published file there") from None
    found = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise ValueError(f"{path} is not the published file: its {kind} is {found}, not {expected}")
    return content
