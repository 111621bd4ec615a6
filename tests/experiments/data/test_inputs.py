"""A model and its data from the words of a command line."""

import json
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from iternorm.experiments.data.inputs import build_model, open_batches, open_device

MODELS = """
from torch import nn

SIZE = 4

def net():
    return nn.BatchNorm1d(3)

def number():
    return 3

def wide(width):
    return nn.BatchNorm1d(width)
"""


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    """The folders of models go onto the path, and off it again after a test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "broken_models.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return tmp_path


@pytest.mark.parametrize("factory", ["my_models:net", "my_models.py:net", "torch.nn:Identity"])
def test_factories(factories, factory):
    assert isinstance(build_model(factory), torch.nn.Module)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("my_models", "module:function"),
        (":net", "module:function"),
        ("my_models:nett", "no model or function 'nett'; it has: net, number, wide"),
        ("my_models:SIZE", "no model or function 'SIZE'"),
        ("my_models:wide", r"my_models:wide cannot be called without arguments \(missing .*'width'\): wrap it"),
        ("my_models:number", "returned a int, not a torch.nn.Module"),
        ("nowhere.at_all:net", "no module 'nowhere'"),
        ("nowhere.py:net", "no file nowhere.py"),
    ],
)
def test_wrong_factories_are_named(factories, factory, text):
    with pytest.raises(ValueError, match=text):
        build_model(factory)


def test_an_import_that_the_factory_misses_is_not_blamed_on_the_name(factories):
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        build_model("broken_models:net")


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


BLOCK = "from torch import nn\n\ndef block():\n    return nn.BatchNorm1d(3)\n"


def test_a_file_finds_its_neighbours_at_once_and_later(tmp_path):
    write(
        tmp_path / "models",
        with_neighbours="import early_one\n\ndef net():\n    from late_one import block\n    return block()\n",
        early_one=BLOCK,
        late_one=BLOCK,
    )
    assert isinstance(build_model(f"{tmp_path / 'models' / 'with_neighbours.py'}:net"), torch.nn.BatchNorm1d)


@pytest.mark.parametrize("statement", ["from .inner_block import block", "from ..outer_block import block"])
def test_a_file_of_a_package_finds_its_neighbours(tmp_path, statement):
    package = f"package_{statement.count('.')}"
    write(tmp_path / package, __init__="", outer_block=BLOCK)
    write(
        tmp_path / package / "sub",
        __init__="",
        inner_block=BLOCK,
        relative=f"{statement}\n\ndef net(): return block()\n",
    )
    assert isinstance(build_model(f"{tmp_path / package / 'sub' / 'relative.py'}:net"), torch.nn.BatchNorm1d)


def test_a_file_may_hold_dataclasses_with_postponed_annotations(tmp_path):
    write(
        tmp_path,
        postponed="from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from torch import nn\n\n@dataclass\nclass Settings:\n    kind: ClassVar[str] = 'a'\n    width: int = 3\n\n"
        "def net():\n    return nn.BatchNorm1d(Settings().width)\n",
    )
    assert build_model(f"{tmp_path / 'postponed.py'}:net").num_features == 3


def test_two_files_of_one_name_are_two_modules_and_a_library_keeps_its_own(tmp_path):
    for folder, width in (("one", 3), ("two", 4)):
        text = f"from torch import nn\n\ndef net():\n    return nn.BatchNorm1d({width})\n"
        write(tmp_path / folder, same_name=text, json=text)
        assert build_model(f"{tmp_path / folder / 'same_name.py'}:net").num_features == width
        assert build_model(f"{tmp_path / folder / 'json.py'}:net").num_features == width
    assert sys.modules["json"] is json


def test_a_file_that_fails_leaves_no_module(tmp_path):
    write(tmp_path, half_a_module="import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        build_model(f"{tmp_path / 'half_a_module.py'}:net")
    assert "half_a_module" not in sys.modules


def test_a_model_itself_is_as_good_as_a_function(tmp_path):
    write(tmp_path, instance="from torch import nn\n\nmodel = nn.BatchNorm1d(3)\n")
    assert build_model(f"{tmp_path / 'instance.py'}:model").num_features == 3


@pytest.mark.parametrize(("name", "expected"), [("cpu", "cpu"), ("meta", "meta")])
def test_a_device_that_is_there(name, expected):
    assert open_device(name).type == expected


@pytest.mark.parametrize("name", ["tpu", "cpu:x", ""])
def test_a_device_that_torch_does_not_know_is_named(name):
    with pytest.raises(ValueError, match=f"device={name!r} is not known to torch: use 'cpu' or 'cuda'"):
        open_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_device_that_is_missing_is_named(name):
    with pytest.raises(ValueError, match=f"device={name!r} needs a CUDA device and torch sees none: use device='cpu'"):
        open_device(name)


def save_npy(path, values):
    np.save(path.with_suffix(".npy"), values)
    return path.with_suffix(".npy")


def save_npz(path, values):
    np.savez(path.with_suffix(".npz"), labels=np.zeros(len(values)), x=values)
    return path.with_suffix(".npz")


def save_pt(path, values):
    torch.save(torch.from_numpy(values), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def save_pt_pair(path, values):
    torch.save((torch.from_numpy(values), torch.zeros(len(values))), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


@pytest.mark.parametrize("save", [save_npy, save_npz, save_pt, save_pt_pair])
def test_arrays_of_every_kind(save, tmp_path):
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    batches = open_batches(str(save(tmp_path / "data", values)), batch_size=4)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert len(batches) == 3
    together = torch.cat(list(batches))
    assert sorted(together[:, 0].tolist()) == values[:, 0].tolist()
    assert together[:, 0].tolist() != values[:, 0].tolist()
    torch.testing.assert_close(torch.cat(list(batches)), together)


def test_last_example_alone_is_left_out(tmp_path):
    path = str(save_npy(tmp_path / "data", np.zeros((9, 2), dtype=np.float32)))
    assert [len(batch) for batch in open_batches(path, batch_size=4)] == [4, 4]
    assert [len(batch) for batch in open_batches(path, batch_size=1)] == [1] * 9


def test_bytes_become_fractions_and_ids_stay(tmp_path):
    bytes_path = save_npy(tmp_path / "bytes", np.full((4, 1, 2, 2), 51, dtype=np.uint8))
    (batch,) = open_batches(str(bytes_path), batch_size=4, flatten=True)
    torch.testing.assert_close(batch, torch.full((4, 4), 0.2))
    (batch,) = open_batches(str(save_npy(tmp_path / "ids", np.full((4, 5), 7))), batch_size=4)
    assert batch.dtype == torch.int64
    for dtype in (np.float64, np.float16):
        (batch,) = open_batches(str(save_npy(tmp_path / "numbers", np.zeros((4, 5), dtype))), batch_size=4)
        assert batch.dtype == torch.float32


def test_data_sets_by_name():
    batches = open_batches("digits", batch_size=100, examples=250)
    assert [tuple(batch.shape) for batch in batches] == [(100, 1, 8, 8), (100, 1, 8, 8), (50, 1, 8, 8)]


@pytest.fixture
def folder(tmp_path):
    for index, name in enumerate(("a/1.png", "a/2.jpg", "b/3.png", "b/4.png")):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (255, 0, 60 * index)).save(path)
    (tmp_path / "images" / "notes.txt").write_text("not an image")
    return tmp_path / "images"


def test_a_folder_of_images(folder):
    (batch,) = open_batches(str(folder), batch_size=8)
    assert batch.shape == (4, 3, 6, 8)
    assert batch[:, 0].mean() > 0.98
    assert batch[:, 1].mean() < 0.02


def test_images_of_two_sizes_need_one(folder):
    Image.new("L", (5, 5)).save(folder / "b" / "5.png")
    with pytest.raises(ValueError, match=r"differ in size, .*: give an image size"):
        list(open_batches(str(folder), batch_size=8))
    (batch,) = open_batches(str(folder), batch_size=8, image_size=4)
    assert batch.shape == (5, 3, 4, 4)


class Payload:
    """Unpickling this would make a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


def test_nothing_is_unpickled(tmp_path):
    target = tmp_path / "made"
    torch.save({"x": Payload(target)}, tmp_path / "evil.pt")
    (tmp_path / "evil.npy").write_bytes(pickle.dumps(Payload(target)))
    np.savez(tmp_path / "evil.npz", x=np.array([Payload(target)], dtype=object))
    for name in ("evil.pt", "evil.npy", "evil.npz"):
        with pytest.raises(ValueError, match=name):
            open_batches(str(tmp_path / name), batch_size=2)
    assert not target.exists()


def cut(path):
    """The first bytes of a file."""
    path.write_bytes(path.read_bytes()[:5000])
    return path


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path / "nothing.npy", "neither a data set"),
        (lambda path: (path / "data.csv").write_text("1") and path / "data.csv", r"read from .npy, .npz and .pt"),
        (lambda path: save_npy(path / "flat", np.zeros(3)), r"shape \(3,\)"),
        (lambda path: save_npy(path / "truths", np.zeros((3, 2), dtype=bool)), "torch.bool"),
        (lambda path: path, "holds no images"),
        (lambda path: (path / "cut.npz").write_bytes(b"PK\x03\x04") and path / "cut.npz", r"cut.npz cannot be read"),
        (lambda path: (path / "cut.pt").write_bytes(b"PK\x03\x04") and path / "cut.pt", r"cut.pt cannot be read"),
        (lambda path: cut(save_pt(path / "half", np.zeros((300, 64), np.float32))), r"half.pt cannot be read"),
        (lambda path: (path / "text.pt").write_text("x") and path / "text.pt", r"text.pt is no file of torch.save"),
        # What torch.load raises depends on the first bytes: a KeyError, an IndexError, a struct.error.
        *[
            (lambda path, text=text: (path / "text.pt").write_text(text) and path / "text.pt", r"text.pt is no file of")
            for text in ("hi", "a,b", "M")
        ],
        (lambda path: (path / "cut.npy").write_bytes(b"\x93NUMPY") and path / "cut.npy", r"cut.npy cannot be read"),
    ],
)
def test_wrong_data_is_named(make, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        open_batches(str(make(tmp_path)), batch_size=2)


def test_ambiguous_archives_are_refused(tmp_path):
    np.savez(tmp_path / "two.npz", a=np.zeros((2, 2)), b=np.zeros((2, 2)))
    with pytest.raises(ValueError, match="holds a, b; the examples must be the only one or called x"):
        open_batches(str(tmp_path / "two.npz"), batch_size=2)


@pytest.mark.parametrize("argument", ["batch_size", "examples"])
def test_sizes_below_one_are_named(argument):
    options: dict[str, Any] = {"batch_size": 4, argument: 0}
    with pytest.raises(ValueError, match=f"{argument} is 0"):
        open_batches("digits", **options)
