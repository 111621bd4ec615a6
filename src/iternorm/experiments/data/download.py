"""Downloads of published files: complete and checked, or not there at all."""

import errno
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from iternorm.experiments.data import datasets as data

# Mirrors of the same files, in the order they are tried.
MNIST_URLS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
CIFAR10_URLS = ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"

# Seconds without an answer, or without a byte of it.
_TIMEOUT = 30


def download(name: str, files: Iterable[str], place: Path) -> None:
    """Put published files of ``mnist`` or ``cifar10`` into the folder `place`.

    Each is downloaded beside it, checked by its digest and then moved to its name: it is there whole or not at all.

    Raises:
        FileNotFoundError: pooch, which downloads, is not installed.
        OSError: The network cannot be reached, what comes is not the published file, or the disk is full.
    """
    files = list(files)
    _require_pooch(files, place)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".download-") as folder:
            if name == "mnist":
                remedy = f"put the published files into {place}"
                for file in files:
                    urls = [url + file for url in MNIST_URLS]
                    os.replace(_retrieve(urls, file, data.MNIST_MD5[file], Path(folder), place, remedy), place / file)
            else:
                archive = CIFAR10_URLS[0].rpartition("/")[2]
                remedy = f"unpack {archive} in {place.parent}, which makes {place}"
                path = _retrieve(CIFAR10_URLS, archive, CIFAR10_MD5, Path(folder), place, remedy)
                _unpack(path, files, Path(folder))
                for file in files:
                    os.replace(Path(folder) / file, place / file)
    except ConnectionError:
        raise
    except OSError as error:
        why = "its disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise OSError(
            error.errno,
            f"{', '.join(files)} could not be written to {place}: {why}. Nothing is left behind: make room or change "
            "permissions there, or set ITERNORM_DATA to a folder on another disk",
        ) from error


def _require_pooch(files: list[str], place: Path) -> None:
    try:
        import pooch  # noqa: F401
    except ImportError:
        raise FileNotFoundError(
            f"{place} lacks {', '.join(files)}, and pooch, which downloads, is not installed: "
            "pip install 'iternorm[experiments]', or put the published files there"
        ) from None


def _retrieve(urls: Iterable[str], file: str, md5: str, folder: Path, place: Path, remedy: str) -> Path:
    """The file from the first address that gives it, in a folder. The remedy is for those without a network."""
    import pooch
    from requests.exceptions import RequestException

    problems = []
    for url in urls:
        try:
            downloader = pooch.HTTPDownloader(timeout=_TIMEOUT)
            # Pooch's annotations do not allow for its own downloader.
            path = pooch.retrieve(url, f"md5:{md5}", file, folder, downloader=downloader)  # pyright: ignore
            return Path(path)
        except RequestException as error:
            problems.append(f"{url}: {_reason(error)}")
        # Pooch's word for another digest than the one asked for.
        except ValueError as error:
            problems.append(f"{url} does not give the published file: {error}")
    raise ConnectionError(
        f"{file} is not in {place} and could not be downloaded ({'; '.join(problems)}). Try again later, or {remedy}, "
        f"or set ITERNORM_DATA to a folder that has {place.name}/ with the published files"
    )


def _reason(error: Exception) -> object:
    # What requests wraps in a sentence about pools and retries.
    return getattr(error.args[0] if error.args else None, "reason", None) or error


def _unpack(archive: Path, files: list[str], folder: Path) -> None:
    """Write files of CIFAR-10's archive into a folder. The names are ours: no path in the archive leads elsewhere."""
    wanted = {f"{data.PLACES['cifar10']}/{file}": file for file in files}
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.isfile() and (file := wanted.pop(member.name, None)) is not None:
                stream = opened.extractfile(member)
                assert stream is not None
                content = stream.read()
                if hashlib.sha256(content).hexdigest() != data.CIFAR10_SHA256[file]:
                    raise ValueError(f"{archive.name} holds another {file} than the published one")
                (folder / file).write_bytes(content)
    if wanted:
        raise ValueError(f"{archive.name} holds no {', '.join(wanted)}")
