"""Data sets from their published files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from published import publish

from iternorm.experiments.data import datasets as data

SHARED = os.environ.get("ITERNORM_SHARED_DATA")


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Two small data sets in the published layout, with digests to match."""
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path))
    return tmp_path, publish(tmp_path, monkeypatch)


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


def test_a_changed_file_is_refused_and_left_alone(published):
    folder, _ = published
    path = folder / "cifar-10-batches-bin" / "data_batch_3.bin"
    changed = path.read_bytes()[:-1] + b"\xff"
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=r"data_batch_3.bin is not the published file: its sha256 is .* remove it"):
        data.load("cifar10")
    assert path.read_bytes() == changed


def test_a_file_cut_short_is_refused(published):
    folder, _ = published
    path = folder / "mnist" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz is not the published file: .* has 100 bytes"):
        data.load("mnist", "test")


def test_the_folder_that_is_given_comes_first(published, tmp_path, monkeypatch):
    folder, _ = published
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path / "elsewhere"))
    assert len(data.load("mnist", folder=folder).images) == 5
    assert data.available("mnist", folder)
    assert not data.available("mnist")


def test_the_cache_folder_is_poochs(tmp_path, monkeypatch):
    pooch = pytest.importorskip("pooch")
    monkeypatch.delenv("ITERNORM_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data.data_folder() == pooch.os_cache("iternorm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.data_folder() == pooch.os_cache("iternorm")


def test_available_tells_whether_all_files_are_there(published):
    folder, _ = published
    assert data.available("mnist")
    assert data.available("cifar10")
    assert data.available("digits")
    assert not data.available("imagenet")
    assert not data.available("svhn")
    (folder / "imagenet" / "train").mkdir(parents=True)
    assert not data.available("imagenet")
    (folder / "imagenet" / "val").mkdir()
    assert data.available("imagenet")
    (folder / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    assert not data.available("cifar10")


def test_a_missing_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path / "typo"))
    with pytest.raises(
        ValueError, match=r"\(--data or ITERNORM_DATA\) is .*typo, which does not exist: make .* holds mnist/, "
    ):
        data.load("mnist")
    assert not (tmp_path / "typo").exists()
    with pytest.raises(ValueError, match=r"the data folder is .*other, which does not exist"):
        data.load("mnist", folder=tmp_path / "other")


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path, monkeypatch):
    for name in ("holidays", "letters.txt", "music", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"holds other things \(holidays, letters.txt, music, ...\) and none of"):
        data.load("cifar10")
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(ValueError, match="which is a file: a folder is needed"):
        data.load("cifar10", folder=__file__)


def test_unknown_names():
    with pytest.raises(ValueError, match="'svhn': known are digits, mnist, cifar10"):
        data.load("svhn")
    with pytest.raises(ValueError, match="split is 'valid'"):
        data.load("digits", "valid")  # pyright: ignore[reportArgumentType]


def test_contents_that_are_no_data_set():
    with pytest.raises(ValueError, match="not an IDX file"):
        data.parse_idx(b"\x00\x00\x0d\x01")
    with pytest.raises(ValueError, match="cut short: 6 bytes, but its header is 8"):
        data.parse_idx(b"\x00\x00\x08\x01\x00\x00")
    with pytest.raises(ValueError, match=r"10 bytes, but an array of \(3,\) has 11"):
        data.parse_idx(b"\x00\x00\x08\x01\x00\x00\x00\x03ab")
    with pytest.raises(ValueError, match="3072 bytes, but a record has 3073"):
        data.parse_cifar10(bytes(3072))
    with pytest.raises(ValueError, match="0 bytes"):
        data.parse_cifar10(b"")


@pytest.mark.skipif(SHARED is None, reason="ITERNORM_SHARED_DATA is not set")
@pytest.mark.parametrize(
    ("name", "shape", "mean"),
    [("mnist", (60000, 1, 28, 28), 33.318), ("cifar10", (50000, 3, 32, 32), 120.708)],
)
def test_real_files(name, shape, mean, tmp_path):
    command = [sys.executable, str(Path(str(SHARED)) / "unpack.py"), str(tmp_path), "--only", name]
    subprocess.run(command, check=True, capture_output=True)
    assert data.available(name, tmp_path)
    images, labels = data.load(name, folder=tmp_path)
    assert images.shape == shape
    # Known from the literature: 0.1307 of 255, and the mean of the three channel means.
    assert images.float().mean().item() == pytest.approx(mean, abs=0.01)
    assert labels.bincount().tolist() == [5000] * 10 if name == "cifar10" else len(labels) == 60000
    assert len(data.load(name, "test", tmp_path).images) == 10000
