"""Fixtures for compiling the C kernels anew."""

import os
import platform
import shutil
from pathlib import Path

import pytest

from iternorm.backends.native import build


@pytest.fixture(scope="session")
def real_compiler():
    """The machine's own, or None."""
    return os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@pytest.fixture
def as_new_process(monkeypatch):
    """A function after which this process has loaded no kernels, as far as it knows; before the test it has not."""
    monkeypatch.setattr(build, "_libraries", {})
    return lambda: build._libraries.clear()


@pytest.fixture
def compiler(monkeypatch, tmp_path, real_compiler):
    """Makes a compiler of a shell script and names it in $CC; `real` is the one of this machine."""
    if real_compiler is None:
        pytest.skip("no C compiler")

    def make(script):
        path = tmp_path / "compiler"
        path.write_text("#!/bin/sh\n" + script.format(real=real_compiler))
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    return make


@pytest.fixture
def fresh(as_new_process, monkeypatch, tmp_path, compiler):
    """A process that has built nothing yet, with an empty cache, and a compiler of its own that does not optimize.

    A process loads a library of one name only once. The name depends on that of the compiler, so each test has another.
    """
    monkeypatch.setenv("ITERNORM_CACHE", str(tmp_path / "cache"))
    compiler('exec {real} "$@" -O0')
    return tmp_path / "cache"


@pytest.fixture(params=["x86-64", "x86-64-v3"])
def narrower_vectors(request, fresh, compiler, tmp_path):
    """Kernels compiled for a machine with narrower vectors than this one may have."""
    if platform.machine() != "x86_64" or " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("these are instruction sets of x86-64")
    log = tmp_path / "log"
    compiler(
        f'for word; do shift; [ "$word" = -march=native ] && word=-march={request.param}; set -- "$@" "$word"; done\n'
        f'echo "$*" >> {log}\nexec {{real}} "$@"'
    )
    yield
    compiled = [line.split() for line in log.read_text().splitlines() if " -c " in line]
    assert compiled
    assert all(f"-march={request.param}" in words for words in compiled)
