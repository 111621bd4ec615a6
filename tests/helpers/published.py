"""Small data sets in the published layout."""

import gzip
import hashlib
import struct

import torch

from iternorm.experiments.data import datasets as data


def idx(values):
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + bytes(values.flatten().tolist())


def publish(folder, monkeypatch):
    """Write MNIST and CIFAR-10 with a few examples each, with digests to match. Gives the values of each file."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name in data.MNIST_MD5:
        shape = (5, 28, 28) if "images" in name else (5,)
        made[name] = torch.randint(0, 10, shape, generator=generator, dtype=torch.uint8)
        content = gzip.compress(idx(made[name]))
        _write(folder / "mnist" / name, content)
        monkeypatch.setitem(data.MNIST_MD5, name, hashlib.md5(content, usedforsecurity=False).hexdigest())
    for name in data.CIFAR10_SHA256:
        made[name] = torch.randint(0, 10, (3, 3073), generator=generator, dtype=torch.uint8)
        content = bytes(made[name].flatten().tolist())
        _write(folder / "cifar-10-batches-bin" / name, content)
        monkeypatch.setitem(data.CIFAR10_SHA256, name, hashlib.sha256(content).hexdigest())
    return made


def _write(path, content):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
