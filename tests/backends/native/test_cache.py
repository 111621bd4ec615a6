"""What is loaded from the cache of compiled kernels: nothing that another user can have put there, nothing damaged."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from native_steps import STEP, output_of, start

from iternorm.backends.native import build, cache


@pytest.fixture
def kept(fresh, compiler):
    """The one library of a cache."""
    build.library(torch.float32)
    (library,) = fresh.iterdir()
    return library


@pytest.fixture
def plant(kept, tmp_path):
    """Puts another library in a place, as somebody would who knows its name and digest; tells whether it was loaded."""
    marker = tmp_path / "loaded"
    (tmp_path / "planted.c").write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void run(void) {{ fclose(fopen("{marker}", "w")); }}\n'
    )
    planted = tmp_path / "planted.so"
    compiler = os.environ["CC"]
    subprocess.check_call([compiler, "-shared", "-fPIC", str(tmp_path / "planted.c"), "-o", str(planted)])

    def place(folder):
        cache.put(folder, kept.name, planted.read_bytes())
        return marker.exists

    return place


@pytest.fixture
def give_away(monkeypatch):
    """Makes a path another user's: for root by giving it away, for others by what they are told of it."""
    given = set()

    def away(path):
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        else:
            given.add(os.stat(path).st_ino)

    def fstat(descriptor):
        status = real(descriptor)
        return os.stat_result((*status[:4], 65534, *status[5:10])) if status.st_ino in given else status

    real = os.fstat
    monkeypatch.setattr(os, "fstat", fstat)
    return away


@pytest.fixture
def load_in_another_process(as_new_process):
    def load():
        as_new_process()
        return build.library(torch.float32)

    return load


def link(library):
    library.rename(library.with_name("elsewhere"))
    library.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "arrange",
    [
        lambda library, give_away: give_away(library),
        lambda library, give_away: library.chmod(0o620),
        lambda library, give_away: library.chmod(0o602),
        lambda library, give_away: link(library),
    ],
    ids=["another user's", "writable by a group", "writable by all", "link"],
)
def test_a_file_that_is_not_the_users_own_is_replaced(arrange, kept, plant, give_away, load_in_another_process):
    was_loaded = plant(kept.parent)
    arrange(kept, give_away)
    load_in_another_process()
    assert not was_loaded()
    assert stat.S_IMODE(kept.lstat().st_mode) == 0o600
    assert kept.lstat().st_uid == os.geteuid()
    before = kept.stat().st_ino
    load_in_another_process()
    assert kept.stat().st_ino == before


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (lambda folder, give_away: give_away(folder), "belongs to another user"),
        (lambda folder, give_away: folder.chmod(0o770), "can be written by others .mode 0770"),
        (lambda folder, give_away: folder.chmod(0o777), "can be written by others .mode 0777"),
        (lambda folder, give_away: folder.chmod(0o1777), "can be written by others .mode 1777"),
    ],
    ids=["another user's", "writable by a group", "writable by all", "sticky"],
)
def test_a_folder_that_is_not_the_users_own_is_neither_read_nor_written(
    arrange, reason, kept, plant, give_away, tmp_path, monkeypatch, load_in_another_process
):
    was_loaded = plant(kept.parent)
    before = kept.stat()
    arrange(kept.parent, give_away)
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(private))
    with pytest.warns(UserWarning, match=f"for this process only: .*{reason}.*mode 0700.*ITERNORM_CACHE") as said:
        load_in_another_process()
    assert len(said) == 1
    assert not was_loaded()
    assert list(kept.parent.iterdir()) == [kept]
    assert kept.stat() == before
    assert not list(private.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_of_the_users_own_may_lie_where_others_can_write(
    mode, fresh, compiler, monkeypatch, load_in_another_process
):
    fresh.mkdir()
    fresh.chmod(mode)
    monkeypatch.setenv("ITERNORM_CACHE", str(fresh / "iternorm"))
    before = os.umask(0)
    try:
        build.library(torch.float32)
    finally:
        os.umask(before)
    assert stat.S_IMODE((fresh / "iternorm").stat().st_mode) == 0o700
    (library,) = (fresh / "iternorm").iterdir()
    assert stat.S_IMODE(library.stat().st_mode) == 0o600
    compiler('[ "$1" = --version ] || exit 1\nexec {real} "$@" -O0')
    load_in_another_process()


@pytest.mark.parametrize("when", ["reading", "building"])
def test_a_folder_that_is_exchanged_after_it_was_looked_at_is_not_used(
    when, kept, plant, monkeypatch, load_in_another_process
):
    # Others can do that where they can write to its parent, with no sticky bit on it.
    if when == "building":
        kept.unlink()
    elsewhere, folder = kept.parent.with_name("elsewhere"), kept.parent
    elsewhere.mkdir()
    was_loaded = plant(elsewhere)

    number, fstat = folder.stat().st_ino, os.fstat

    def exchange(descriptor):
        status = fstat(descriptor)
        if status.st_ino == number and elsewhere.exists():
            folder.rename(folder.with_name("moved"))
            elsewhere.rename(folder)
        return status

    monkeypatch.setattr(os, "fstat", exchange)
    load_in_another_process()
    assert not was_loaded()
    assert [path.name for path in folder.with_name("moved").iterdir()] == [kept.name]


def cut_short(library):
    os.truncate(library, library.stat().st_size // 2)


def without_the_functions(library):
    content = library.read_bytes()
    library.write_bytes(content.replace(b"cross_moments\0", b"cross_moment_\0"))


def nearly_empty(library):
    library.write_bytes(b"\x7fELF")


@pytest.mark.parametrize("damage", [cut_short, without_the_functions, nearly_empty])
def test_a_damaged_library_is_built_anew(damage, fresh):
    # In a process of its own: a library that is cut short may end it with SIGBUS.
    build.library(torch.float32)
    (library,) = fresh.iterdir()
    whole = library.read_bytes()
    damage(library)
    assert library.read_bytes() != whole
    output_of(start(STEP, "native"))
    assert cache.get(fresh, library.name) == whole[:-32]


def test_a_library_of_another_name_is_not_loaded(kept, plant):
    was_loaded = plant(kept.parent)
    kept.rename(kept.with_name("other.so"))
    with pytest.raises(OSError, match=r"other\.so is damaged"):
        cache.get(kept.parent, "other.so")
    assert not was_loaded()


def test_what_cannot_be_put_leaves_nothing(fresh):
    fresh.mkdir()
    (fresh / "name").mkdir()
    with pytest.raises(IsADirectoryError):
        cache.put(fresh, "name", b"content")
    assert [path.name for path in fresh.iterdir()] == ["name"]


def test_the_users_cache_folder(monkeypatch):
    monkeypatch.delenv("ITERNORM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/iternorm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.folder() == Path("/home/somebody/.cache/iternorm")
