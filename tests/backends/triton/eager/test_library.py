"""The C++ functions are compiled in the background."""

import shutil

import pytest
from native_steps import output_of, start

# The parent's compiler waits until the child has had its own. They compile a module that has nothing in it.
FORK = """
import os, sys, time
from pathlib import Path
from iternorm.backends.triton.eager import library
begun, go, source = map(Path, sys.argv[1:])
made = library.source()
library.source = lambda: made._replace(path=source)
assert library.functions() is None
while not begun.exists():
    time.sleep(0.01)
child = os.fork()
if not child:
    del os.environ["CXX"]
    print(library.wait().__name__, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
go.touch()
assert status == 0
print(library.wait().__name__)
"""
MODULE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "iternorm_step", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_iternorm_step() { return PyModule_Create(&definition); }
"""


def test_a_child_forked_while_they_compile_has_its_own(tmp_path):
    real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if real is None:
        pytest.skip("no C++ compiler")
    compiler, begun, go, source = (tmp_path / name for name in ("compiler", "begun", "go", "step.cpp"))
    compiler.write_text(f'#!/bin/sh\ntouch {begun}\nwhile [ ! -e {go} ]; do sleep 0.1; done\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    source.write_text(MODULE)
    environment = {"CXX": compiler, "ITERNORM_CACHE": tmp_path / "cache", "TRITON_INTERPRET": 0}
    assert output_of(start(FORK, str(begun), str(go), str(source), **environment)).split() == ["iternorm_step"] * 2
