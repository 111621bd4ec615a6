"""The first call in a process may be one inside `torch.compile`: nothing of the kernels is imported until then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = """
import sys, torch, iternorm
device, backend = sys.argv[1:]
torch.manual_seed(0)
x = torch.randn(6, 8, 3, 3, device=device, requires_grad=True)
layer = iternorm.IterNorm2d(8, group_size=4, impl="triton", device=device)
other = iternorm.IterNorm2d(8, group_size=4, impl="torch", device=device)
assert "iternorm.backends.triton.run" not in sys.modules
compiled = torch.compile(layer, fullgraph=True, backend=backend)
results = []
for run in (compiled, other):
    y = run(x)
    results.append((y, *torch.autograd.grad(y, (x, *run.parameters()), torch.ones_like(y).cumsum(0))))
for a, b in zip(*results, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
for key, value in other.state_dict().items():
    torch.testing.assert_close(layer.state_dict()[key], value, rtol=1e-4, atol=1e-4)
# And what was imported while compiling is there for an eager call.
torch.testing.assert_close(layer(x), other(x), rtol=1e-4, atol=1e-4)
"""


def run(device: str, backend: str, **environment: str) -> None:
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, device, backend],
        env={**os.environ, "PYTHONPATH": str(source), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled")
def test_the_first_call_may_be_inside_a_compiled_graph():
    run("cpu", "aot_eager", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_first_call_may_be_inside_a_compiled_graph_on_a_gpu():
    run("cuda", "inductor", TRITON_INTERPRET="0")
