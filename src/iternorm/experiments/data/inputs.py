"""A model and its data from the words of a command line. Files are never unpickled."""

import importlib
import importlib.util
import inspect
import pickle
import struct
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from iternorm.experiments.data import datasets as data
from iternorm.experiments.data import pictures


def build_model(factory: str) -> nn.Module:
    """The model that ``module:name`` or ``path/to/file.py:name`` names, or that the function of this name returns.

    Raises:
        ValueError: There is no such model or function, or the function cannot be called or returns something else.
    """
    place, separator, name = factory.rpartition(":")
    if not separator or not place or not name:
        raise ValueError(f"MODEL_FACTORY is {factory!r}, but module:function or file.py:function is needed")
    module = import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = getattr(module, name, None)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        known = ", ".join(public) or "none"
        raise ValueError(f"MODEL_FACTORY: {place} has no model or function {name!r}; it has: {known}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ValueError(
            f"MODEL_FACTORY: {factory} cannot be called without arguments ({error}): wrap it in a function of none"
        ) from error
    model = found()
    if not isinstance(model, nn.Module):
        raise ValueError(f"MODEL_FACTORY: {factory} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def open_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ValueError: torch does not know it, or this machine does not have it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not known to torch: use 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} needs a CUDA device and torch sees none: use device='cpu'")
    try:
        torch.empty(0, device=device)
    # Each backend has its own way to say that it is missing.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name!r} cannot be used here ({error}): use device='cpu'") from error
    return device


def _import_module(name: str) -> Any:
    # As with `python -m`, modules of the working folder count.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        looked = "the working folder or among the installed packages"
        raise ValueError(f"MODEL_FACTORY: there is no module {error.name!r} in {looked}") from error


def import_file(path: Path) -> Any:
    """Run a file that can import its neighbours: by name, and relatively where it lies in a package."""
    if not path.is_file():
        raise ValueError(f"MODEL_FACTORY: there is no file {path}")
    path = path.resolve()
    folder, names = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    # They stay in sys.path: a model may import when it is made, or when it is called. In a package the file's own
    # folder comes last, because a package may have modules that are named like libraries.
    sys.path.insert(0, str(folder))
    if len(names) > 1:
        sys.path.append(str(path.parent))
        importlib.import_module(".".join(names[:-1]))
    name = ".".join(names)
    if name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == str(path):
            return sys.modules[name]
        # Another file's, perhaps a library's, which must stay.
        name += f"_{uuid.uuid4().hex}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their annotations up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@dataclass(frozen=True)
class Batches:
    """Batches of examples, in an order that the seed decides.

    Attributes:
        num_examples: Examples in all batches.
        batch_size: Examples in a batch; a last smaller batch is given unless it holds one example.
        fetch: The examples of some indices, as one tensor.
        order: Indices of the examples, in order.
    """

    num_examples: int
    batch_size: int
    fetch: Callable[[Tensor], Tensor]
    order: Tensor

    def __len__(self) -> int:
        return sum(1 for _ in self._indices())

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.fetch, self._indices())

    def _indices(self) -> Iterator[Tensor]:
        for indices in self.order.split(self.batch_size):
            if len(indices) > 1 or self.batch_size == 1 or self.num_examples == 1:
                yield indices


def open_batches(
    source: str,
    *,
    batch_size: int,
    examples: int | None = None,
    image_size: int | None = None,
    flatten: bool = False,
    seed: int = 0,
) -> Batches:
    """Examples from a data set's name, a ``.npy``, ``.npz`` or ``.pt`` file, or a folder of images.

    Bytes become floats in [0, 1]; other integers are left alone (token ids); images of a folder are RGB in [0, 1].

    Args:
        source: A name of `data.DATA_SETS`, or a path.
        batch_size: Examples in a batch.
        examples: How many to take, at random; None is all.
        image_size: Scale the shorter side of a folder's images to this, and cut out the middle square.
        flatten: Give each example as a vector.
        seed: Decides order and choice.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but 1 or more is needed")
    if examples is not None and examples < 1:
        raise ValueError(f"examples is {examples}, but 1 or more is needed")
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size is {image_size}, but 1 or more is needed")
    path = Path(source)
    if source in data.DATA_SETS:
        count, fetch = _from_tensor(data.load(source).images)
    elif path.is_dir():
        count, fetch = _from_folder(path, image_size)
    elif not path.exists():
        known = ", ".join(data.DATA_SETS)
        raise ValueError(f"data is {source!r}: neither a data set ({known}) nor a file or folder that exists")
    else:
        count, fetch = _from_tensor(_read_tensor(path))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:examples]

    def take(indices: Tensor) -> Tensor:
        batch = fetch(indices)
        return batch.flatten(1) if flatten else batch

    return Batches(len(order), batch_size, take, order)


def _from_tensor(values: Tensor) -> tuple[int, Callable[[Tensor], Tensor]]:
    def fetch(indices: Tensor) -> Tensor:
        batch = values[indices]
        return batch.float() / 255 if batch.dtype == torch.uint8 else batch

    return len(values), fetch


def _read_tensor(path: Path) -> Tensor:
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz", ".pt", ".pth"):
        raise ValueError(f"{path}: data is read from .npy, .npz and .pt files and from folders of images")
    try:
        values = _read_numpy(path) if suffix in (".npy", ".npz") else _read_torch(path)
    # The last two are what torch's reader raises for some bytes that are no pickle.
    except (pickle.UnpicklingError, LookupError, struct.error) as error:
        raise ValueError(
            f"{path} is no file of torch.save, or holds more than plain tensors, which is not loaded: save the tensor "
            "alone"
        ) from error
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if values.ndim < 2 or len(values) == 0:
        raise ValueError(f"{path} holds an array of shape {tuple(values.shape)}: examples [N, ...] are needed")
    if values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{path} holds {values.dtype} values: numbers are needed")
    return values.float() if values.is_floating_point() else values


def _read_torch(path: Path) -> Tensor:
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, Tensor):
        return content
    entries = (
        content if isinstance(content, dict) else dict(enumerate(content if isinstance(content, list | tuple) else ()))
    )
    tensors = {str(key): value for key, value in entries.items() if isinstance(value, Tensor)}
    return tensors[_choose(list(tensors))]


def _read_numpy(path: Path) -> Tensor:
    import numpy as np

    with path.open("rb") as file:
        content = np.load(file, allow_pickle=False)
        return torch.from_numpy(content if isinstance(content, np.ndarray) else content[_choose(list(content))])


def _choose(names: list[str]) -> str:
    for name in ("x", "images", "data", "inputs", "arr_0", "0"):
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    raise ValueError(f"it holds {', '.join(names) or 'no arrays'}; the examples must be the only one or called x")


def _from_folder(folder: Path, image_size: int | None) -> tuple[int, Callable[[Tensor], Tensor]]:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in pictures.SUFFIXES)
    if not files:
        raise ValueError(f"{folder} holds no images ({', '.join(sorted(pictures.SUFFIXES))})")

    def fetch(indices: Tensor) -> Tensor:
        chosen = [files[index] for index in indices.tolist()]
        images = [_read_image(path, image_size) for path in chosen]
        for path, image in zip(chosen, images, strict=True):
            if image.shape != images[0].shape:
                sizes = f"{tuple(images[0].shape[1:])} and {tuple(image.shape[1:])}"
                raise ValueError(f"{chosen[0]} and {path} differ in size, {sizes}: give an image size")
        return torch.stack(images)

    return len(files), fetch


def _read_image(path: Path, image_size: int | None) -> Tensor:
    picture = pictures.read_rgb(path)
    if image_size is not None:
        picture = pictures.centre(picture, image_size, image_size)
    return pictures.pixels(picture).permute(2, 0, 1).float() / 255
