"""Training steps by the C kernels in processes of their own: one that has loaded a library keeps it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import iternorm

# One training step of a layer, by the implementation that is the first argument.
STEP = """
import sys, torch
from iternorm import functional
x = torch.randn(8, 32, 32, 32, requires_grad=True)
functional.iter_norm(x, training=True, group_size=16, impl=sys.argv[1]).square().sum().backward()
assert x.grad.isfinite().all()
"""


def start(code, *args, **variables):
    source = Path(iternorm.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), **{k: str(v) for k, v in variables.items()}}
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
