"""Downloads, from a server in this process: the network is never used."""

import errno
import hashlib
import io
import re
import shutil
import socket
import sys
import tarfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from published import publish

from iternorm.experiments.data import datasets as data
from iternorm.experiments.data import download

pooch = pytest.importorskip("pooch")

LABELS = "train-labels-idx1-ubyte.gz"
IMAGES = "train-images-idx3-ubyte.gz"


class Server(ThreadingHTTPServer):
    """Serves `files`, path to content; what is in `promised` is announced with so many bytes more than are sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.promised, self.asked = {}, {}, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self):
        name = self.path.lstrip("/")
        self.server.asked.append(name)
        content = self.server.files.get(name)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) + self.server.promised.get(name, 0)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    server = Server()
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def published(server, tmp_path, monkeypatch):
    """The values of the published files, which the server has and the data folder has not."""
    made = publish(tmp_path / "published", monkeypatch)
    for path in (tmp_path / "published" / "mnist").iterdir():
        server.files[path.name] = path.read_bytes()
    archive(server, monkeypatch, tmp_path / "published" / "cifar-10-batches-bin")
    monkeypatch.setattr(download, "MNIST_URLS", (server.url,))
    monkeypatch.setattr(download, "CIFAR10_URLS", (server.url + "cifar-10-binary.tar.gz",))
    monkeypatch.setattr(download, "_TIMEOUT", 5)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return made


def archive(server, monkeypatch, folder):
    """Serve CIFAR-10's archive: the files of a folder, and some that try to be written elsewhere."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as opened:
        for name in (
            "../evil",
            f"{folder.parent}/evil",
            "cifar-10-batches-bin/../../data_batch_1.bin",
            "data_batch_2.bin",
        ):
            opened.addfile(tarfile.TarInfo(name), io.BytesIO())
        for path in sorted(folder.iterdir()):
            opened.add(path, f"cifar-10-batches-bin/{path.name}")
    content = stream.getvalue()
    server.files["cifar-10-binary.tar.gz"] = content
    monkeypatch.setattr(download, "CIFAR10_MD5", hashlib.md5(content, usedforsecurity=False).hexdigest())


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_mnist_is_downloaded_once(published, server, tmp_path, monkeypatch):
    images, labels = data.load("mnist")
    assert torch.equal(images[:, 0], published[IMAGES])
    assert torch.equal(labels, published[LABELS].long())
    assert server.asked == list(data.MNIST_MD5)
    assert files_of(tmp_path / "data") == sorted(f"mnist/{name}" for name in data.MNIST_MD5)
    assert data.available("mnist")
    # Now neither the network nor pooch is needed.
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert torch.equal(data.load("mnist").images, images)
    assert len(server.asked) == 4


def test_only_what_is_missing_is_downloaded(published, server, tmp_path):
    data.load("mnist")
    (tmp_path / "data" / "mnist" / LABELS).unlink()
    data.load("mnist")
    assert server.asked[4:] == [LABELS]


def test_cifar10_is_unpacked_from_its_archive_and_nothing_else_is(published, server, tmp_path):
    folder = tmp_path / "inner" / "data"
    folder.mkdir(parents=True)
    (folder / "cifar-10-batches-bin").mkdir()
    labels = data.load("cifar10", "test", folder).labels
    assert torch.equal(labels, published["test_batch.bin"][:, 0].long())
    assert len(data.load("cifar10", "train", folder).labels) == 15
    assert len(server.asked) == 1
    assert files_of(tmp_path / "inner") == sorted(f"data/cifar-10-batches-bin/{name}" for name in data.CIFAR10_SHA256)
    assert data.available("cifar10", folder)
    assert not list((folder / "cifar-10-batches-bin").glob(".*"))
    assert not (tmp_path / "published" / "evil").exists()


def test_the_cache_folder_is_made(published, tmp_path, monkeypatch):
    monkeypatch.delenv("ITERNORM_DATA")
    monkeypatch.setattr(data, "data_folder", lambda folder=None: tmp_path / "cache" / "iternorm")
    data.load("mnist")
    assert files_of(tmp_path / "cache") == sorted(f"iternorm/mnist/{name}" for name in data.MNIST_MD5)


def test_a_second_mirror_is_tried(published, server, monkeypatch):
    monkeypatch.setattr(download, "MNIST_URLS", (server.url + "gone/", server.url))
    assert len(data.load("mnist").images) == 5
    assert server.asked[:4] == [f"gone/{IMAGES}", IMAGES, f"gone/{LABELS}", LABELS]


def failing(name, expected, error: type[Exception] = OSError):
    """Load with a message to expect; nothing may be left behind."""
    folder = data.data_folder()
    before = files_of(folder)
    with pytest.raises(error, match=expected) as raised:
        data.load(name)
    assert files_of(folder) == before
    assert not [path for path in folder.rglob("*") if path.name.startswith(".download-")]
    return str(raised.value)


def test_nobody_answers(published, monkeypatch, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
    monkeypatch.setattr(download, "MNIST_URLS", (url,))
    message = failing("mnist", f"{IMAGES} is not in .*mnist and could not be downloaded", ConnectionError)
    assert url in message
    assert "refused" in message
    assert "Max retries" not in message
    # The remedy is true: files that are put there are found.
    place = Path(re.search(r"put the published files into (\S+),", message)[1])
    assert place == tmp_path / "data" / "mnist"
    shutil.copytree(tmp_path / "published" / "mnist", place, dirs_exist_ok=True)
    assert len(data.load("mnist").images) == 5


def test_the_name_of_the_server_is_not_known(published, server, monkeypatch, tmp_path):
    def unknown(*arguments, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(download, "CIFAR10_URLS", ("http://iternorm.invalid/cifar-10-binary.tar.gz",))
    message = failing("cifar10", "cifar-10-binary.tar.gz is not in .* and could not be downloaded", ConnectionError)
    assert "Name or service not known" in message
    # The remedy is true: the archive, unpacked there, is found.
    place = Path(re.search(r"unpack cifar-10-binary.tar.gz in (\S+), which makes", message)[1])
    assert f"which makes {place / 'cifar-10-batches-bin'}" in message
    with tarfile.open(fileobj=io.BytesIO(server.files["cifar-10-binary.tar.gz"])) as opened:
        # Python has filters since 3.10.12 and 3.11.4. What would be written elsewhere is left out here.
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        inside = [opened.getmember(f"cifar-10-batches-bin/{name}") for name in data.CIFAR10_SHA256]
        opened.extractall(place, inside, **safe)
    assert len(data.load("cifar10").images) == 15


def test_a_file_that_is_gone(published, server):
    del server.files[LABELS]
    # The first file is whole and stays; the second is named.
    with pytest.raises(ConnectionError, match=rf"{LABELS} is not in .*404"):
        data.load("mnist")
    assert files_of(data.data_folder()) == [f"mnist/{IMAGES}"]


@pytest.mark.parametrize(("name", "file"), [("mnist", IMAGES), ("cifar10", "cifar-10-binary.tar.gz")])
def test_other_content_is_refused(published, server, name, file):
    server.files[file] = b"<html>Please log in</html>"
    found = hashlib.md5(server.files[file], usedforsecurity=False).hexdigest()
    assert found in failing(name, f"{file} does not give the published file", ConnectionError)


@pytest.mark.parametrize(("name", "file"), [("mnist", IMAGES), ("cifar10", "cifar-10-binary.tar.gz")])
def test_a_connection_that_breaks_off(published, server, name, file):
    server.files[file] = server.files[file][:-20]
    server.promised[file] = 20
    failing(name, f"{file}: .*20 more expected", ConnectionError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_while_downloading(published, monkeypatch, code):
    def full(self, url, output_file, pooch, check_only=False):
        Path(output_file).write_bytes(b"half")
        raise OSError(code, "No space left on device")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", full)
    message = failing("mnist", f"{IMAGES}, {LABELS}, .* could not be written to .*mnist: its disk is full")
    assert "make room" in message


def test_a_full_disk_while_unpacking(published, monkeypatch):
    write = Path.write_bytes

    def full(path, content):
        if path.name != "data_batch_4.bin":
            return write(path, content)
        write(path, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    failing("cifar10", "data_batch_4.bin.* could not be written to .*: its disk is full")


def test_a_place_that_cannot_be_written(published, tmp_path):
    (tmp_path / "data" / "mnist").write_text("not a folder")
    (tmp_path / "data" / "imagenet").mkdir()
    failing("mnist", "could not be written to .*mnist: .*File exists")


def test_an_archive_with_other_files(published, server, tmp_path, monkeypatch):
    folder = tmp_path / "published" / "cifar-10-batches-bin"
    (folder / "data_batch_2.bin").write_bytes(b"other")
    archive(server, monkeypatch, folder)
    failing("cifar10", "holds another data_batch_2.bin than the published one", ValueError)
    (folder / "data_batch_2.bin").unlink()
    (folder / "data_batch_5.bin").unlink()
    archive(server, monkeypatch, folder)
    expected = "holds no cifar-10-batches-bin/data_batch_2.bin, cifar-10-batches-bin/data_batch_5.bin"
    failing("cifar10", expected, ValueError)


def test_without_pooch(published, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    message = failing("mnist", f"mnist lacks {IMAGES}, {LABELS}, .*, and pooch", FileNotFoundError)
    assert "pip install 'iternorm[experiments]'" in message


def test_a_foreign_folder_is_not_downloaded_into(published, server, tmp_path):
    (tmp_path / "data" / "holidays").mkdir()
    failing("mnist", "holds other things", ValueError)
    assert not server.asked
    # One of the data sets makes it a data folder.
    shutil.copytree(tmp_path / "published" / "cifar-10-batches-bin", tmp_path / "data" / "cifar-10-batches-bin")
    assert len(data.load("mnist").images) == 5
