"""Compile a layer's kernels for a GPU that is not there.

    python compile_for.py CAPABILITY SHARED_BYTES exact|tf32|bf16|fp16 rows|planes [SIZE] [relu] [many] [ranks] [alone]
    python compile_for.py CAPABILITY SHARED_BYTES roots ROWS
    python compile_for.py CAPABILITY SHARED_BYTES stream FEATURES
    python compile_for.py CAPABILITY SHARED_BYTES exact|tf32|bf16|fp16 rows|planes [HALF_THE_CHANNELS] items ROWS [relu]

With `many`, for 24 steps in place of 5; with `ranks`, for a layer that 8 of them share; with `alone`, for one group,
whose moments have the most parts. Prints, for each launch, its name, the samples of a tile, its stages, and what it
asks for of shared memory. For a layer it also prints the most bytes that a thread has on its stack, which is where
registers spill to.

    python compile_for.py -

reads such words from its input, line after line, and writes `ended` and an exit status after what each line prints.
Each line is a fork of this process, which has imported everything.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from iternorm.backends.triton import items, plan, runtime
from iternorm.backends.triton.tools import roots, stream
from iternorm.linalg.roots import _schedule
from iternorm.whitening.settings import Running

DTYPES = {"exact": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Absent:
    """What Triton asks of a GPU's driver until a kernel is launched."""

    def __init__(self, capability: int, shared_bytes: int):
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared_bytes, "multiprocessor_count": 132},
            load_binary=self._load,
        )
        self.launcher_cls = lambda source, metadata: SimpleNamespace(metadata=metadata)
        self.most_on_the_stack = 0

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (stack,) = re.findall(r"\bSTACK:(\d+)", found)
        self.most_on_the_stack = max(self.most_on_the_stack, int(stack))
        return object(), object(), 0, 0, 1024

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_stream(self, device=0) -> int:
        return 0


def print_roots(size: int) -> None:
    """The launches of inverse roots of matrices of so many rows."""
    steps, damping = _schedule(torch.float32, 4, "minimax")
    chain = roots._chain_for(16, size, steps, 4, damping, torch.device("cuda", 0))
    for name in ("bound", "begin", "multiply", "finish"):
        launch = chain._launches[name]
        matrices = launch.constants["MATRICES"]
        print(name, matrices.DEPTH, matrices.STAGES, launch.prepared[0].metadata.shared)


def print_stream(size: int) -> None:
    """The launches of a batch of a stream."""
    with FakeTensorMode():
        x = torch.empty(2**18, size, device="cuda:0")
        made = stream._plan_for(x)
    for name, launch in (("moments", made.launches["moments"]), ("join", made.join)):
        print(name, launch.prepared[0].metadata.shared)


def print_items(x: torch.Tensor, rows: int, relu: bool) -> None:
    """The launches for a batch whose items have so many rows each."""
    weight = torch.empty(x.shape[1], device="cuda:0")
    made = items.plan_for(x, weight, weight, rows, rows, 5, False, relu)
    for name in ("moments", "reduce", "whiten", "cross_moments", "cross_reduce", "whiten_backward", "learned"):
        print(name, made.launches[name].prepared[0].metadata.shared)


def main(capability: str, shared_bytes: str, precision: str, layout: str, *more: str) -> None:
    # Triton calls no more of a driver than `Absent` has.
    absent = Absent(int(capability), int(shared_bytes))
    driver.set_active(absent)  # pyright: ignore[reportArgumentType]
    runtime._known[0] = runtime.Device("a GPU that is not there", divmod(int(capability), 10), 132)
    runtime._at_once = lambda compiled, device: 132
    torch.cuda.device = lambda index: nullcontext()
    if precision == "roots":
        print_roots(int(layout))
        return
    if precision == "stream":
        print_stream(int(layout))
        return
    torch.set_float32_matmul_precision("highest" if precision == "exact" else "high")
    size = int(more[0]) if more and more[0].isdigit() else 64
    with FakeTensorMode():
        channels = size if "alone" in more else max(2 * size, 128)
        x = torch.empty(64, channels, 32, 32, device="cuda:0", dtype=DTYPES[precision])
        if layout == "rows":
            x = x.to(memory_format=torch.channels_last)
        if "items" in more:
            print_items(x, int(more[more.index("items") + 1]), "relu" in more)
            return
        weight = torch.empty(channels, device="cuda:0")
        steps, residual = 24 if "many" in more else 5, "residual" in more
        words = {"relu": "relu" in more, "residual": residual, "summed": residual, "ranks": 8 * ("ranks" in more)}
        matrix = torch.empty(-(-channels // size), size, size, device="cuda:0")
        count = torch.zeros((), dtype=torch.int64, device="cuda:0")
        made = plan.plan_for(x, weight, weight, size, steps, Running(weight, matrix, count, 0.1, False), **words)
    names = ("moments", "reduce", "cross_moments", "cross_reduce", "apply")
    if made.exchange is not None:
        names += ("merge", "unpack", "sent_weight_gradient")
    if made.iteration is None:
        iterates = ("whiten", "whiten_backward")
    else:
        iterates = ("iterate", "blend", "iterate_backward", "wide_weight_gradient", "apply_backward")
        if made.maps.in_blocks("apply"):
            iterates += ("operands", "backward_operands")
    for name in (*names, *iterates):
        launch = made.launches[name]
        bundle = launch.constants.get("TILE") or launch.constants.get("MATRICES")
        samples, stages = getattr(bundle, "BL", None), getattr(bundle, "STAGES", None)
        print(name, samples, stages, launch.prepared[0].metadata.shared)
    print("stack", absent.most_on_the_stack)


def in_fork(words: list[str]) -> int:
    """Compile in a process of its own, and return its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Ends a compiler that hangs.
    signal.alarm(600)
    status = 1
    try:
        main(*words)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        # The first fake tensor imports more.
        with FakeTensorMode():
            torch.empty(1, device="cuda:0")
        for line in sys.stdin:
            status = in_fork(line.split())
            print("ended", status, flush=True)
    else:
        main(*sys.argv[1:])
