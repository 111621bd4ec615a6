"""Launches by the driver, with a driver that writes down what it is told."""

import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
import torch

from iternorm.kernels import driver
from iternorm.kernels.driver import Chain, Prepared

DEVICE = torch.device("cuda", 0)
# Arguments: a pointer, one that is absent, a float, an integer of 32 bits, one that is compiled in, one of 64 bits.
MIXED = Prepared(11, (5, 2), 128, 4096, ("Q", None, "f", "i", None, "q", None), 3, (7, 1, 2**40))
SMALL = Prepared(12, (3, 1), 64, 0, ("Q", "Q"), 2, ())


def read(address: int, kind: str):
    return struct.unpack(f"={kind}", ctypes.string_at(address, struct.calcsize(kind)))[0]


class FakeDriver:
    def __init__(self, codes=(), sizes=()):
        self.calls = []
        self.codes = list(codes)
        self.sizes = sizes

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        assert extra is None
        config = config._obj
        attribute = config.attributes[0]
        self.calls.append(
            SimpleNamespace(
                function=function.value,
                grid=tuple(config.grid),
                block=tuple(config.block),
                shared=config.shared,
                stream=config.stream,
                attributes=(config.num_attributes, attribute.id, attribute.value),
                addresses=list(arguments),
            )
        )
        kinds = {11: "QfiqQQ", 12: "QQQQ"}[function.value]
        self.calls[-1].values = [read(a, k) for a, k in zip(arguments, kinds, strict=True)]
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"out of luck"

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0


@pytest.fixture
def fake(monkeypatch):
    found = FakeDriver()
    monkeypatch.setattr(driver, "_driver", lambda: found)
    return found


def test_every_kernel_gets_its_arguments(fake):
    Chain([MIXED, SMALL], DEVICE)(99, ((2**63 + 5, 0, 0.5), (3, 2**64 - 1)))
    first, second = fake.calls
    assert (first.function, first.grid, first.block, first.shared) == (11, (5, 2, 1), (128, 1, 1), 4096)
    # What is absent or compiled in takes no place; two addresses of scratch memory, which are zero, come last.
    assert first.values == [2**63 + 5, 0.5, 7, 2**40, 0, 0]
    assert (second.function, second.grid, second.block, second.shared) == (12, (3, 1, 1), (64, 1, 1), 0)
    assert second.values == [3, 2**64 - 1, 0, 0]
    for call in fake.calls:
        assert call.stream == 99
        assert call.attributes == (1, 6, 1)
        assert all(address % 8 == 0 for address in call.addresses)


def test_the_structures_are_laid_out_as_cuda_has_them():
    assert ctypes.sizeof(driver._Attribute) == 72
    assert driver._Attribute.value.offset == 8
    assert ctypes.sizeof(driver._Config) == 56
    assert (driver._Config.stream.offset, driver._Config.attributes.offset) == (32, 40)


def test_arguments_and_stream_are_those_of_the_call(fake):
    chain = Chain([SMALL], DEVICE)
    for stream, pair in ((1, (10, 20)), (1, (30, 40)), (2, (50, 60))):
        chain(stream, (pair,))
    assert [(c.stream, tuple(c.values[:2])) for c in fake.calls] == [(1, (10, 20)), (1, (30, 40)), (2, (50, 60))]
    assert len({c.addresses[0] for c in fake.calls}) == 1


def test_two_threads_do_not_write_each_others_arguments(fake):
    chain, inside, go_on = Chain([SMALL, SMALL], DEVICE), threading.Event(), threading.Event()
    launch = fake.cuLaunchKernelEx

    def slow(*call):
        if threading.current_thread() is thread and not inside.is_set():
            inside.set()
            assert go_on.wait(10)
        return launch(*call)

    fake.cuLaunchKernelEx = slow
    thread = threading.Thread(target=chain, args=(1, ((10, 11), (12, 13))))
    thread.start()
    assert inside.wait(10)
    chain(2, ((20, 21), (22, 23)))
    go_on.set()
    thread.join()
    seen = [(c.stream, *c.values[:2]) for c in fake.calls]
    assert seen == [(2, 20, 21), (2, 22, 23), (1, 10, 11), (1, 12, 13)]


def test_a_failed_launch_raises_and_the_next_call_works(fake):
    chain = Chain([SMALL, SMALL], DEVICE)
    fake.codes = [0, 700]
    with pytest.raises(RuntimeError, match=r"could not be launched on cuda:0: out of luck \(CUDA error 700\)"):
        chain(1, ((1, 2), (3, 4)))
    chain(1, ((5, 6), (7, 8)))
    assert [c.values[0] for c in fake.calls] == [1, 3, 5, 7]


def test_a_thread_without_a_context_gets_one(fake, monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "synchronize", used.append)
    fake.codes = [201, 0]
    Chain([SMALL], DEVICE)(1, ((1, 2),))
    assert used == [DEVICE]
    assert [c.values[:2] for c in fake.calls] == [[1, 2], [1, 2]]


def compiled(types, **changes):
    metadata = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, **changes}
    source = SimpleNamespace(signature=dict(enumerate(types)))
    return SimpleNamespace(metadata=SimpleNamespace(**metadata), src=source, function=5)


TYPES = ("*fp32", "constexpr", "fp32", "i32", "i64", "constexpr")


def test_formats_are_those_that_the_driver_confirms(fake):
    fake.sizes = (8, 4, 4, 8, 8, 8)
    assert driver.formats_of(compiled(TYPES)) == ("Q", None, "f", "i", "q", None)


@pytest.mark.parametrize("sizes", [(8, 4, 4, 8, 8), (8, 4, 4, 8, 8, 8, 8), (8, 8, 4, 8, 8, 8), ()])
def test_a_kernel_with_other_arguments_is_left_to_triton(fake, sizes):
    fake.sizes = sizes
    assert driver.formats_of(compiled(TYPES)) is None


@pytest.mark.parametrize(
    "kernel",
    [
        compiled((*TYPES, "nvTmaDesc")),
        compiled(TYPES, num_ctas=2),
        compiled(TYPES, global_scratch_size=64),
        compiled(TYPES, profile_scratch_size=64),
        compiled(TYPES, launch_cooperative_grid=True),
    ],
)
def test_a_kernel_that_wants_more_is_left_to_triton(fake, kernel):
    fake.sizes = (8, 4, 4, 8, 8, 8)
    assert driver.formats_of(kernel) is None


def test_an_old_driver_leaves_all_to_triton(monkeypatch):
    monkeypatch.setattr(driver, "_driver", SimpleNamespace)
    assert driver.formats_of(compiled(TYPES)) is None
