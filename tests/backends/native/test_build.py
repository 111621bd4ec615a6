"""Compiling the C kernels: what is written and where, and what happens where it cannot be done."""

import contextlib
import os
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch
from native_steps import STEP, output_of, start

from iternorm import functional
from iternorm.backends.native import build, verbs


def step(impl="auto"):
    x = torch.randn(8, 32, 32, 32, requires_grad=True)
    functional.iter_norm(x, training=True, group_size=16, impl=impl).square().sum().backward()
    return x.grad


def test_one_file_a_dtype_is_kept_and_loaded_again(fresh, compiler, as_new_process, tmp_path):
    log = tmp_path / "log"
    compiler(f'echo "$@" >> {log}\nexec {{real}} "$@" -O0')
    step("native")
    (library,) = fresh.iterdir()
    assert library.suffix == ".so"
    assert "-c" in log.read_text().split()
    log.unlink()
    as_new_process()
    step("native")
    assert log.read_text().split() == ["--version"]
    assert list(fresh.iterdir()) == [library]
    verbs.moments(torch.randn(8, 4, dtype=torch.float64), 4)
    assert len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("change", ["source", "compiler", "flags", "processor"])
def test_a_library_of_something_else_is_not_loaded(fresh, compiler, as_new_process, monkeypatch, change, tmp_path):
    build.library(torch.float32)
    as_new_process()
    if change == "compiler":
        compiler('[ "$1" = --version ] && echo another\nexec {real} "$@" -O0')
    elif change == "flags":
        monkeypatch.setenv("CC", os.environ["CC"] + " -g")
    elif change == "processor":
        monkeypatch.setattr("platform.machine", lambda: "another")
    else:
        copy = tmp_path / "build.py"
        (tmp_path / "kernels.c").write_text(Path(build.__file__).with_name("kernels.c").read_text() + "/* another */\n")
        monkeypatch.setattr(build, "__file__", str(copy))
    build.library(torch.float32)
    assert len(list(fresh.iterdir())) == 2


def test_processes_that_build_at_once(fresh):
    for process in [start(STEP, "native", ITERNORM_CACHE=fresh) for _ in range(3)]:
        output_of(process)
    assert [path.suffix for path in fresh.iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ITERNORM_CACHE", str(tmp_path / "file" / "folder"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    step("native")
    assert not list(temporary.iterdir())
    assert (tmp_path / "file").read_text() == ""


def test_a_cache_that_is_filled_need_not_be_written(fresh, as_new_process, monkeypatch):
    build.library(torch.float32)
    as_new_process()
    monkeypatch.setattr("tempfile.TemporaryDirectory", None)
    build.library(torch.float32)


def without_compiler(monkeypatch, compiler, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def failing_compiler(monkeypatch, compiler, tmp_path):
    compiler('[ "$1" = --version ] && exit 0\necho "out of order" >&2\nexit 3')


def missing_compiler(monkeypatch, compiler, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "missing"))


def compiler_of_rubbish(monkeypatch, compiler, tmp_path):
    compiler('[ "$1" = --version ] && exit 0\nfor last; do :; done\necho rubbish > "$last"')


def compiler_of_something_else(monkeypatch, compiler, tmp_path):
    (tmp_path / "other.c").write_text("int answer(void) { return 42; }")
    compiler(
        '[ "$1" = --version ] && exit 0\nfor last; do :; done\n'
        f'{{real}} -shared -fPIC {tmp_path / "other.c"} -o "$last"'
    )


def compiler_with_an_open_quote(monkeypatch, compiler, tmp_path):
    monkeypatch.setenv("CC", "gcc '")


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (without_compiler, "no C compiler: install gcc, or name one in the environment variable CC"),
        (failing_compiler, r"failed \(3\): out of order"),
        (missing_compiler, "No such file or directory"),
        (compiler_of_rubbish, "file too short|invalid ELF header"),
        (compiler_of_something_else, "lacks the function moments"),
        (compiler_with_an_open_quote, r"""CC="gcc '" cannot be read as a command: No closing quotation"""),
    ],
)
def test_where_it_cannot_be_built_torch_computes_and_the_name_raises(
    fresh, arrange, reason, monkeypatch, compiler, tmp_path
):
    arrange(monkeypatch, compiler, tmp_path)
    # Having no compiler is nothing to warn of.
    warned = contextlib.nullcontext() if arrange is without_compiler else pytest.warns(UserWarning, match=reason)
    torch.manual_seed(0)
    with warned:
        actual = step("auto")
    torch.manual_seed(0)
    torch.testing.assert_close(actual, step("torch"), rtol=0, atol=0)
    with pytest.raises(ValueError, match=f'impl="native" cannot run: .*({reason}).*; use impl="auto"'):
        step("native")
    assert not fresh.exists() or not [path for path in fresh.iterdir() if path.suffix != ".failed"]


def test_a_failure_is_not_tried_again(fresh, compiler, tmp_path):
    log = tmp_path / "log"
    compiler(f"echo called >> {log}\nexit 1")
    # Said once: the second and third call would raise, because warnings are errors here.
    with pytest.warns(UserWarning, match=r"so the torch path is used: .*failed \(1\).*ITERNORM_NATIVE=0"):
        step("auto")
    for _ in range(2):
        step("auto")
    assert log.read_text().split() == ["called"]


def test_other_processes_neither_try_a_failure_again_nor_repeat_it(fresh, compiler, as_new_process, tmp_path):
    log = tmp_path / "log"
    compiler(f'echo "$1" >> {log}\n[ "$1" = --version ] && exit 0\necho "out of order" >&2\nexit 3')

    def in_another_process():
        as_new_process()
        log.write_text("")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert not build.is_available(torch.float32)
        return len(log.read_text().split()), len(warned)

    tried, silent = (2, 1), (1, 0)
    assert in_another_process() == tried
    assert in_another_process() == silent
    (failed,) = fresh.iterdir()
    assert f"out of order (delete {failed} to try again)" in str(build.failure(torch.float32))

    yesterday = time.time() - 25 * 60 * 60
    os.utime(failed, (yesterday, yesterday))
    assert in_another_process() == tried
    assert in_another_process() == silent
    failed.unlink()
    assert in_another_process() == tried


@pytest.mark.parametrize("known", ["-mcpu=native", ""])
def test_a_compiler_may_call_the_machine_by_another_name(known, fresh, compiler, tmp_path):
    log = tmp_path / "log"
    # As clang says it on ARM; the last attempt names no processor.
    unknown = "*-m*=native*) echo \"clang: error: unsupported argument 'native' to option '-march='\" >&2; exit 1;;"
    accepted = f"*{known}*) ;;" if known else ""
    compiler(f'case "$*" in {accepted} {unknown} esac\necho "$*" >> {log}\nexec {{real}} "$@" -O0')
    torch.manual_seed(0)
    actual = step("native")
    torch.manual_seed(0)
    torch.testing.assert_close(actual, step("torch"), rtol=1e-4, atol=1e-5)
    (compiled,) = (line for line in log.read_text().splitlines() if " -c " in line)
    assert [word for word in compiled.split() if word.endswith("=native")] == [known] * bool(known)


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_either_compiler_makes_the_kernels(name, fresh, monkeypatch):
    if shutil.which(name) is None:
        pytest.skip(f"no {name}")
    monkeypatch.setenv("CC", name)
    torch.manual_seed(0)
    actual = step("native")
    torch.manual_seed(0)
    torch.testing.assert_close(actual, step("torch"), rtol=1e-4, atol=1e-5)


def test_all_that_it_needs_of_openmp_is_what_every_openmp_has(fresh):
    # torch's is GNU's as a rule, and clang's pragmas call functions that GNU's has not; both have these two.
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    build.library(torch.float32)
    (library,) = fresh.iterdir()
    undefined = subprocess.check_output(["nm", "-D", "--undefined-only", str(library)], text=True).split()
    assert {name for name in undefined if name.startswith(("GOMP", "omp", "__kmp"))} == {
        "GOMP_parallel",
        "omp_get_thread_num",
    }


def test_other_systems_take_torch(fresh, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert build.failure(torch.float32) == "the C kernels are for Linux, this is darwin"


def test_it_can_be_turned_off(fresh, monkeypatch, compiler):
    # It would warn, which is an error here.
    compiler("exit 1")
    monkeypatch.setenv("ITERNORM_NATIVE", "0")
    step("auto")
    assert not fresh.exists()


def test_small_activations_do_not_wait_for_a_compiler(fresh):
    functional.iter_norm(torch.randn(8, 8, 4, 4), training=True, group_size=8)
    assert not fresh.exists()


def test_one_openmp_in_the_process(real_compiler):
    if real_compiler is None:
        pytest.skip("no C compiler")
    code = (
        STEP
        + "print({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.split()[-1].split('/')[-1]})"
    )
    libraries = eval(output_of(start(code, "native", OMP_NUM_THREADS=2)))
    assert len([path for path in libraries if "gomp" in path or "iomp" in path]) == 1


def test_a_forked_child_computes_too(real_compiler):
    if real_compiler is None:
        pytest.skip("no C compiler")
    # OpenMP's threads of the parent, which the child would wait for, have been started before.
    code = STEP + (
        "import os\n"
        "y = functional.iter_norm(x.detach(), training=True, group_size=16, impl='native')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    torch.set_num_threads(1)\n"
        "    from iternorm.backends.native import verbs\n"
        "    torch.get_num_threads = lambda: 2\n"
        "    verbs.moments(x.detach(), 16)\n"
        "    print('child', flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    assert output_of(start(code, "native", OMP_NUM_THREADS=2)).split() == ["child"]


def test_a_child_forked_while_another_thread_compiles(real_compiler, tmp_path):
    if real_compiler is None:
        pytest.skip("no C compiler")
    slow, begun, go = (tmp_path / name for name in ("compiler", "begun", "go"))
    slow.write_text(f'#!/bin/sh\ntouch {begun}\nwhile [ ! -e {go} ]; do sleep 0.1; done\nexec {real_compiler} "$@"\n')
    slow.chmod(0o755)
    code = (
        "import os, sys, threading, time\n"
        "from pathlib import Path\n"
        "import torch\n"
        "from iternorm import functional\n"
        "def step():\n"
        "    x = torch.randn(8, 32, 32, 32, requires_grad=True)\n"
        "    functional.iter_norm(x, training=True, group_size=16, impl='native').square().sum().backward()\n"
        "begun, go, compiler = sys.argv[1:]\n"
        "torch.set_num_threads(1)\n"
        "thread = threading.Thread(target=step)\n"
        "thread.start()\n"
        "while not Path(begun).exists():\n"
        "    time.sleep(0.01)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.environ['CC'] = compiler\n"
        "    step()\n"
        "    print('child', flush=True)\n"
        "    os._exit(0)\n"
        "_, status = os.waitpid(child, 0)\n"
        "Path(go).touch()\n"
        "thread.join()\n"
        "assert status == 0\n"
    )
    process = start(code, str(begun), str(go), real_compiler, CC=slow, ITERNORM_CACHE=tmp_path / "cache")
    assert output_of(process).split() == ["child"]
