"""GPUs that are not here: what the kernels ask of one, what is said where it lacks that, and that they compile."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_kernels.py", allow_module_level=True)

from checks import relative_error
from triton import OutOfResources

from iternorm import IterNorm2d, reference
from iternorm.backends.triton import plan, runtime, tiling
from iternorm.whitening import dispatch
from iternorm.whitening.dispatch import Backend
from iternorm.whitening.settings import Settings

GPUS = {
    "V100": (7, 0, 98304),
    "T4": (7, 5, 65536),
    "A100": (8, 0, 166912),
    "RTX 4090": (8, 9, 101376),
    "H200": (9, 0, 232448),
}


@pytest.fixture
def gpu(monkeypatch):
    """Put a GPU of this name into the machine, as far as torch tells of it."""
    monkeypatch.setattr(runtime, "_known", {})
    monkeypatch.setattr(runtime, "_lacking", {})

    def choose(name):
        major, minor, _ = GPUS[name]
        found = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=100)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)

    return choose


def activation(channels=64):
    with FakeTensorMode():
        return torch.empty(4, channels, 5, 5, device="cuda:0")


def chosen(impl, x, group_size):
    return dispatch.choose(Settings(group_size, impl=impl), x)


@pytest.mark.parametrize("name", ["A100", "RTX 4090", "H200"])
def test_auto_takes_the_kernels_from_ampere_on(name, gpu):
    gpu(name)
    assert chosen("auto", activation(), 64) is Backend.TRITON


@pytest.mark.parametrize(("name", "has"), [("V100", "7.0"), ("T4", "7.5")])
def test_an_older_gpu_gets_torch_and_who_asks_for_the_kernels_the_reason(name, has, gpu):
    gpu(name)
    assert chosen("auto", activation(), 64) is Backend.VERBS
    with pytest.raises(ValueError, match=f'capability 8.0 or above, and {name} has {has}; use impl="auto"'):
        chosen("triton", activation(), 64)


def test_a_gpu_of_amd_gets_torch(gpu, monkeypatch):
    gpu("H200")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert chosen("auto", activation(), 64) is Backend.VERBS
    with pytest.raises(ValueError, match="they are for NVIDIA's GPUs"):
        chosen("triton", activation(), 64)


def test_groups_above_1024_channels_run_the_iteration_in_kernels(gpu, monkeypatch):
    gpu("H200")
    # Fake tensors stand for real ones here.
    monkeypatch.setattr(dispatch.modes, "is_recorded", lambda *tensors: False)
    with FakeTensorMode():
        x = torch.empty(64, 2048, 14, 14, device="cuda:0")
        assert chosen("auto", x, 1024) is Backend.TRITON
        assert chosen("auto", x, 1025) is Backend.TRITON_ITERATION
        with pytest.raises(ValueError, match="groups of up to 1024 channels for 'newton', not 1025"):
            chosen("triton", x, 1025)


def test_zca_of_groups_above_64_runs_the_iteration_in_kernels(gpu, monkeypatch):
    gpu("H200")
    monkeypatch.setattr(dispatch.modes, "is_recorded", lambda *tensors: False)
    x = activation(128)
    for size, impl, backend in (
        (64, "auto", Backend.TRITON),
        (128, "auto", Backend.TRITON_ITERATION),
        (128, "torch", Backend.VERBS),
    ):
        assert dispatch.choose(Settings(size, "zca", 0, impl=impl), x) is backend
    assert dispatch.choose(Settings(128, "pca", 0), x) is Backend.VERBS
    # What the kernels of a whole layer do not know, eps and the covariance's correction do.
    assert dispatch.choose(Settings(64, "zca", 0, correction=1), x) is Backend.TRITON_ITERATION


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.4.0", "they need triton 3.5 or newer, and 3.4.0 is installed"),
        ("2.3.1", "they need triton 3.5 or newer, and 2.3.1 is installed"),
        ("3.5.1", None),
        ("3.10.0+git1234", None),
        ("4.0.0", None),
    ],
)
def test_an_old_triton_is_no_triton(version, reason, monkeypatch, gpu):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert dispatch.find_no_triton() == reason
    monkeypatch.setattr(dispatch, "NO_TRITON", reason)
    gpu("H200")
    assert chosen("auto", activation(), 64) is (Backend.TRITON if reason is None else Backend.VERBS)


def test_a_launch_is_called_as_its_triton_wants():
    def compiled(**attributes):
        run = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, **attributes)
        return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

    # 3.5 and 3.6: straight to the launcher in C.
    made = compiled(launch="in C", launch_cooperative_grid=False, launch_pdl=True)
    before = ("function", False, True, None, None, "metadata", None, None, None)
    assert runtime._call_of(made) == ("in C", before)
    # 3.7, whose launcher in C takes a signature, and where there is scratch memory: by Triton's own call.
    own = ("function", "metadata", None, None, None)
    made = compiled(launch="in C", launch_cooperative_grid=False, launch_pdl=True, kernel_signature=b"")
    assert runtime._call_of(made) == (made.run, own)
    made = compiled(launch="in C", launch_cooperative_grid=False, launch_pdl=True)
    made.run.global_scratch_size = 128
    assert runtime._call_of(made) == (made.run, own)


@pytest.mark.parametrize(("name", "able"), [("A100", False), ("H200", True)])
def test_launches_depend_on_each_other_from_hopper_on(name, able, gpu):
    gpu(name)
    assert runtime.device_of(torch.device("cuda", 0)).launches_dependents == able


def test_tiles_become_smaller_until_a_product_cannot_take_them():
    tiles, found = tiling.Tiles(64, 4, 3, 2), []
    while tiles is not None:
        found.append((tiles.samples, tiles.stages))
        tiles = tiles.smaller()
    assert found == [(64, 3), (64, 2), (64, 1), (32, 1), (16, 1)]


@pytest.fixture
def room_for(monkeypatch):
    """Let so many samples fit a GPU at a time, counted once for each stage of the tiles and of the iteration."""

    def choose(limit):
        class Narrow(plan.Launch):
            def __init__(self, kernel, grid, pointers, floats, integers, specialized, constants, *more, **others):
                tile, newton = constants.get("TILE"), constants.get("NEWTON")
                wanted = 0 if tile is None else tile.BL * tile.STAGES * (1 if newton is None else newton.STAGES)
                if wanted > limit:
                    raise OutOfResources(wanted, limit, "shared memory")
                super().__init__(kernel, grid, pointers, floats, integers, specialized, constants, *more, **others)

        monkeypatch.setattr(plan, "Launch", Narrow)
        monkeypatch.setattr(plan, "_plans", {})

    return choose


@pytest.mark.parametrize("limit", [64, 16])
def test_a_layer_in_smaller_tiles_is_the_same(limit, room_for):
    room_for(limit)
    torch.manual_seed(0)
    layer = IterNorm2d(24, group_size=16, impl="triton")
    x, grad = torch.randn(2, 4, 24, 9, 11).unbind()
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = reference.iter_norm(*wide, group_size=16, num_iters=5)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    actual = (y, x.grad, layer.weight.grad, layer.bias.grad)
    assert all(relative_error(a, b) < 2e-6 for a, b in zip(actual, (expected, *wanted), strict=True))
    chosen = [tiles for made in plan._plans.values() for tiles in made._chosen.values()]
    assert len(chosen) == 4
    assert all(tiles.samples * tiles.stages <= limit for tiles in chosen)


def test_the_iteration_keeps_its_stages_until_tiles_have_fewer(room_for, monkeypatch):
    monkeypatch.setattr(plan, "tiles_for", lambda *_: tiling.Tiles(64, 4, 5, 1))
    room_for(64 * 3 * 3)
    x = torch.randn(4, 16, 3, 3, requires_grad=True)
    IterNorm2d(16, impl="triton")(x).sum().backward()
    found = [made.launches["whiten_backward"].constants for made in plan._plans.values()]
    assert {(each["TILE"].STAGES, each["NEWTON"].STAGES) for each in found} == {(3, 3)}


def test_a_gpu_with_no_room_at_all_says_so(monkeypatch):
    def refuse(*arguments, **others):
        raise OutOfResources(4096, 1024, "shared memory")

    monkeypatch.setattr(plan, "Launch", refuse)
    monkeypatch.setattr(plan, "_plans", {})
    with pytest.raises(OutOfResources, match="shared memory"):
        IterNorm2d(16, impl="triton")(torch.randn(4, 16, 3, 3))


@pytest.fixture(scope="module")
def shared_bytes(tmp_path_factory):
    """What tells the shared memory that each launch asks for on a GPU, compiled in a fork of another process."""
    folder = tmp_path_factory.mktemp("compiled")
    script = Path(__file__).parents[2] / "helpers" / "compile_for.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    pipe = subprocess.PIPE
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(script), "-"], env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as compiler,
    ):

        def compiled(name, arguments):
            major, minor, shared = GPUS[name]
            print(f"{major}{minor}", shared, *arguments, file=compiler.stdin, flush=True)
            lines = []
            while not (lines and lines[-1].startswith("ended ")):
                lines.append(compiler.stdout.readline())
                assert lines[-1], (folder / "errors").read_text()[-2000:]
            assert lines.pop() == "ended 0\n", (folder / "errors").read_text()[-2000:]
            return {line.split()[0]: int(line.split()[-1]) for line in lines}

        yield compiled


@pytest.mark.rare
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("A100", ("tf32", "rows")),
        ("RTX 4090", ("bf16", "planes", "48", "ranks")),
        # Steps that are watched, in one program and by launches. Whole matrices of 128 rows ask for 136 KiB in the
        # smallest tiles.
        ("RTX 4090", ("tf32", "rows", "64", "many")),
        ("RTX 4090", ("tf32", "planes", "128", "many")),
        ("RTX 4090", ("exact", "rows", "64", "relu", "residual")),
        # The iteration of float16 matrices, and that of fp32 ones.
        ("RTX 4090", ("bf16", "rows", "512")),
        ("RTX 4090", ("exact", "planes", "256", "ranks")),
        ("H200", ("tf32", "rows", "128", "alone")),
        # Blocks of 128 channels; samples as rows in contiguous memory.
        ("H200", ("bf16", "planes", "256")),
        ("H200", ("tf32", "planes", "256", "relu")),
        ("H200", ("exact", "rows", "512")),
    ],
)
def test_the_kernels_compile_for_other_gpus(name, arguments, shared_bytes):
    asked = shared_bytes(name, arguments)
    stack = asked.pop("stack")
    # Some spills are faster than smaller tiles. A reduction that spilled 5 KB made a step take twice its time.
    assert stack <= 600 or name != "H200"
    assert {"moments", "reduce", "cross_moments", "apply"} < set(asked)
    assert ("merge" in asked) == ("ranks" in arguments)
    assert max(asked.values()) <= GPUS[name][2]


@pytest.mark.rare
@pytest.mark.parametrize(("name", "size"), [("A100", "100"), ("RTX 4090", "1024"), ("H200", "1024")])
def test_the_kernels_of_matrix_roots_compile(name, size, shared_bytes):
    asked = shared_bytes(name, ("roots", size))
    assert set(asked) == {"bound", "begin", "multiply", "finish"}
    assert max(asked.values()) <= GPUS[name][2]


@pytest.mark.rare
@pytest.mark.parametrize(("name", "size"), [("A100", "64"), ("RTX 4090", "128"), ("H200", "128")])
def test_the_kernels_of_a_stream_compile(name, size, shared_bytes):
    asked = shared_bytes(name, ("stream", size))
    assert set(asked) == {"moments", "join"}
    assert max(asked.values()) <= GPUS[name][2]


@pytest.mark.rare
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("RTX 4090", ("exact", "rows", "items", "64")),
        ("RTX 4090", ("tf32", "planes", "items", "32")),
        ("RTX 4090", ("bf16", "rows", "items", "32")),
        # Few enough channels for one tile.
        ("RTX 4090", ("exact", "rows", "32", "items", "32")),
        ("A100", ("bf16", "rows", "32", "items", "8")),
        ("H200", ("exact", "rows", "items", "64")),
    ],
)
def test_the_kernels_of_items_compile(name, arguments, shared_bytes):
    asked = shared_bytes(name, (*arguments, "relu"))
    assert {"moments", "whiten", "cross_moments", "whiten_backward", "learned"} < set(asked)
    assert max(asked.values()) <= GPUS[name][2]
