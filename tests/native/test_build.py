"""Compiling the C kernels: what is written and where, and what happens where it cannot be done."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import iternorm
from iternorm import functional
from iternorm.native import build, verbs

SOURCE = Path(iternorm.__file__).parents[1]
# One training step of a layer by the C kernels, then the libraries of the process that matter.
STEP = """
import sys, torch
from iternorm import functional
x = torch.randn(8, 32, 32, 32, requires_grad=True)
functional.iter_norm(x, training=True, group_size=16, impl=sys.argv[1]).square().sum().backward()
assert x.grad.isfinite().all()
"""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has built nothing yet, with an empty cache."""
    monkeypatch.setattr(build, "_libraries", {})
    monkeypatch.setenv("ITERNORM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Makes a compiler of a shell script and names it in $CC; `real` is the one of this machine."""
    real = build._compilers()
    if not real:
        pytest.skip("no C compiler")

    def make(script):
        path = tmp_path / "compiler"
        path.write_text("#!/bin/sh\n" + script.format(real=real[0][0]))
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    return make


def start(code, *args, **variables):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **{k: str(v) for k, v in variables.items()}}
    command, pipe = [sys.executable, "-c", code, *args], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def output_of(process):
    try:
        output, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        # With the children that it may have forked.
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    return output


def step(impl="auto"):
    x = torch.randn(8, 32, 32, 32, requires_grad=True)
    functional.iter_norm(x, training=True, group_size=16, impl=impl).square().sum().backward()
    return x.grad


def test_one_file_a_dtype_is_kept_and_loaded_again(fresh, compiler, tmp_path):
    log = tmp_path / "log"
    compiler(f'echo "$@" >> {log}\nexec {{real}} "$@"')
    step("native")
    (library,) = fresh.iterdir()
    assert library.suffix == ".so"
    assert "-c" in log.read_text().split()
    log.unlink()
    build._libraries.clear()
    step("native")
    assert log.read_text().split() == ["--version"]
    assert list(fresh.iterdir()) == [library]
    verbs.moments(torch.randn(8, 4, dtype=torch.float64), 4)
    assert len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("change", ["source", "compiler", "flags", "processor"])
def test_a_library_of_something_else_is_not_loaded(fresh, compiler, monkeypatch, change, tmp_path):
    compiler('exec {real} "$@"')
    build.library(torch.float32)
    build._libraries.clear()
    if change == "compiler":
        compiler('[ "$1" = --version ] && echo another\nexec {real} "$@"')
    elif change == "flags":
        monkeypatch.setattr(build, "_COMPILE", (*build._COMPILE, "-g"))
    elif change == "processor":
        monkeypatch.setattr(build, "_cpu", lambda: "another")
    else:
        copy = tmp_path / "build.py"
        (tmp_path / "kernels.c").write_text(Path(build.__file__).with_name("kernels.c").read_text() + "/* another */\n")
        monkeypatch.setattr(build, "__file__", str(copy))
    build.library(torch.float32)
    assert len(list(fresh.iterdir())) == 2


def test_a_damaged_file_is_built_anew(fresh):
    if not build._compilers():
        pytest.skip("no C compiler")
    # In processes of their own: one that has loaded a library knows its path.
    output_of(start(STEP, "native", ITERNORM_CACHE=fresh))
    (library,) = fresh.iterdir()
    size = library.stat().st_size
    library.write_bytes(b"\x7fELF")
    output_of(start(STEP, "native", ITERNORM_CACHE=fresh))
    assert library.stat().st_size == size


def test_processes_that_build_at_once(fresh):
    if not build._compilers():
        pytest.skip("no C compiler")
    for process in [start(STEP, "native", ITERNORM_CACHE=fresh) for _ in range(3)]:
        output_of(process)
    assert [path.suffix for path in fresh.iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written(fresh, compiler, monkeypatch, tmp_path):
    compiler('exec {real} "$@"')
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ITERNORM_CACHE", str(tmp_path / "file" / "folder"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    step("native")
    assert not list(temporary.iterdir())
    assert (tmp_path / "file").read_text() == ""


def test_a_cache_that_is_filled_need_not_be_written(fresh, compiler, monkeypatch):
    compiler('exec {real} "$@"')
    build.library(torch.float32)
    build._libraries.clear()
    monkeypatch.setattr("tempfile.TemporaryDirectory", None)
    build.library(torch.float32)


def test_the_users_cache_folder(monkeypatch):
    monkeypatch.delenv("ITERNORM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_folder() == Path("/somewhere/iternorm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert build.cache_folder() == Path("/home/somebody/.cache/iternorm")


def without_compiler(monkeypatch, compiler, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def failing_compiler(monkeypatch, compiler, tmp_path):
    compiler('[ "$1" = --version ] && exit 0\necho "out of order" >&2\nexit 3')


def missing_compiler(monkeypatch, compiler, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "missing"))


def compiler_of_rubbish(monkeypatch, compiler, tmp_path):
    compiler('[ "$1" = --version ] && exit 0\nfor last; do :; done\necho rubbish > "$last"')


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (without_compiler, "no C compiler: install gcc, or name one in the environment variable CC"),
        (failing_compiler, r"failed \(3\): out of order"),
        (missing_compiler, "No such file or directory"),
        (compiler_of_rubbish, "file too short|invalid ELF header"),
    ],
)
def test_where_it_cannot_be_built_torch_computes_and_the_name_raises(
    fresh, arrange, reason, monkeypatch, compiler, tmp_path
):
    arrange(monkeypatch, compiler, tmp_path)
    torch.manual_seed(0)
    actual = step("auto")
    torch.manual_seed(0)
    torch.testing.assert_close(actual, step("torch"), rtol=0, atol=0)
    with pytest.raises(ValueError, match=f'impl="native" cannot run: .*({reason}).*; use impl="auto"'):
        step("native")
    assert not fresh.exists() or not list(fresh.iterdir())


def test_a_failure_is_not_tried_again(fresh, compiler, tmp_path):
    log = tmp_path / "log"
    compiler(f"echo called >> {log}\nexit 1")
    for _ in range(3):
        step("auto")
    assert log.read_text().split() == ["called"]


def test_other_systems_take_torch(fresh, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert build.failure(torch.float32) == "the C kernels are for Linux, this is darwin"


def test_it_can_be_turned_off(fresh, monkeypatch, compiler):
    compiler("exit 1")
    monkeypatch.setenv("ITERNORM_NATIVE", "0")
    step("auto")
    assert not build._libraries


def test_small_activations_do_not_wait_for_a_compiler(fresh):
    functional.iter_norm(torch.randn(8, 8, 4, 4), training=True, group_size=8)
    assert not build._libraries


def test_one_openmp_in_the_process():
    if not build._compilers():
        pytest.skip("no C compiler")
    code = (
        STEP
        + "print({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.split()[-1].split('/')[-1]})"
    )
    libraries = eval(output_of(start(code, "native", OMP_NUM_THREADS=2)))
    assert len([path for path in libraries if "gomp" in path or "iomp" in path]) == 1


def test_a_forked_child_computes_too():
    if not build._compilers():
        pytest.skip("no C compiler")
    # OpenMP's threads of the parent, which the child would wait for, have been started before.
    code = STEP + (
        "import os\n"
        "y = functional.iter_norm(x.detach(), training=True, group_size=16, impl='native')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    torch.set_num_threads(1)\n"
        "    from iternorm.native import verbs\n"
        "    torch.get_num_threads = lambda: 2\n"
        "    verbs.moments(x.detach(), 16)\n"
        "    print('child', flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    assert output_of(start(code, "native", OMP_NUM_THREADS=2)).split() == ["child"]
