"""Fixtures for compiling the C kernels anew."""

import pytest

from iternorm.backends.native import build


@pytest.fixture(scope="session")
def real_compiler():
    """The machine's own, or None."""
    return next((command[0] for command in build._compilers()), None)


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
def fresh(monkeypatch, tmp_path, compiler):
    """A process that has built nothing yet, with an empty cache, and a compiler of its own that does not optimize.

    A process loads a library of one name only once. The name depends on that of the compiler, so each test has another.
    """
    monkeypatch.setattr(build, "_libraries", {})
    monkeypatch.setenv("ITERNORM_CACHE", str(tmp_path / "cache"))
    compiler('exec {real} "$@" -O0')
    return tmp_path / "cache"
