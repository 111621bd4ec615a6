"""Data sets from their published files."""

import gzip
import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from iternorm.experiments import data

SHARED = os.environ.get("ITERNORM_SHARED_DATA")


def idx(values):
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + bytes(values.flatten().tolist())


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Two small data sets in the published layout, with digests to match."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name in data.MNIST_MD5:
        shape = (5, 28, 28) if "images" in name else (5,)
        made[name] = torch.randint(0, 10, shape, generator=generator, dtype=torch.uint8)
        content = gzip.compress(idx(made[name]))
        path = tmp_path / "mnist" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        monkeypatch.setitem(data.MNIST_MD5, name, hashlib.md5(content, usedforsecurity=False).hexdigest())
    for name in data.CIFAR10_SHA256:
        made[name] = torch.randint(0, 10, (3, 3073), generator=generator, dtype=torch.uint8)
        content = bytes(made[name].flatten().tolist())
        path = tmp_path / "cifar-10-batches-bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        monkeypatch.setitem(data.CIFAR10_SHA256, name, hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path))
    return tmp_path, made


def test_mnist_layout(published):
    _, made = published
    images, labels = data.load("mnist")
    assert torch.equal(images[:, 0], made["train-images-idx3-ubyte.gz"])
    assert torch.equal(labels, made["train-labels-idx1-ubyte.gz"].long())
    assert torch.equal(data.load("mnist", "test").labels, made["t10k-labels-idx1-ubyte.gz"].long())


def test_cifar10_layout(published):
    _, made = published
    images, labels = data.load("cifar10")
    assert images.shape == (15, 3, 32, 32)
    second = made["data_batch_2.bin"]
    assert torch.equal(labels[3:6], second[:, 0].long())
    # Planes of colour, each row by row.
    assert images[3, 1, 0, 5] == second[0, 1 + 1024 + 5]
    assert images[3, 2, 4, 0] == second[0, 1 + 2048 + 4 * 32]
    assert data.load("cifar10", "test").images.shape == (3, 3, 32, 32)


def test_digits_are_in_the_package():
    images, labels = data.load("digits")
    assert images.shape == (1347, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    assert len(labels) == 1347
    assert len(data.load("digits", "test").images) == 450


def test_a_changed_file_is_refused(published):
    folder, _ = published
    path = folder / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"data_batch_3.bin is not the published file: its sha256 is"):
        data.load("cifar10")


def test_missing_files_and_folders_are_named(published, monkeypatch):
    folder, _ = published
    (folder / "mnist" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-labels-idx1-ubyte.gz is missing"):
        data.load("mnist")
    monkeypatch.delenv("ITERNORM_DATA")
    with pytest.raises(ValueError, match="set ITERNORM_DATA"):
        data.load("mnist")


def test_unknown_names():
    with pytest.raises(ValueError, match="'svhn': known are digits, mnist, cifar10"):
        data.load("svhn")
    with pytest.raises(ValueError, match="split is 'valid'"):
        data.load("digits", "valid")
    with pytest.raises(ValueError, match="not an IDX file"):
        data.parse_idx(b"\x00\x00\x0d\x01")


@pytest.mark.skipif(SHARED is None, reason="ITERNORM_SHARED_DATA is not set")
@pytest.mark.parametrize(
    ("name", "shape", "mean"),
    [("mnist", (60000, 1, 28, 28), 33.318), ("cifar10", (50000, 3, 32, 32), 120.708)],
)
def test_real_files(name, shape, mean, tmp_path):
    command = [sys.executable, str(Path(str(SHARED)) / "unpack.py"), str(tmp_path), "--only", name]
    subprocess.run(command, check=True, capture_output=True)
    images, labels = data.load(name, folder=tmp_path)
    assert images.shape == shape
    # Known from the literature: 0.1307 of 255, and the mean of the three channel means.
    assert images.float().mean().item() == pytest.approx(mean, abs=0.01)
    assert labels.bincount().tolist() == [5000] * 10 if name == "cifar10" else len(labels) == 60000
    assert len(data.load(name, "test", tmp_path).images) == 10000
