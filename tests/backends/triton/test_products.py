"""The formats that the kernels multiply in: what they hold of a number, in Triton's interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_kernels.py", allow_module_level=True)

import triton
import triton.language as tl

from iternorm.backends.triton import precision
from iternorm.backends.triton.device import newton, products


@triton.jit
def _parts_of(x_ptr, out_ptr, PARTS: tl.constexpr):
    i = tl.arange(0, 64)
    x = tl.load(x_ptr + i)
    first, second, third = products.in_parts(x, PARTS)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(out_ptr + i, first.to(tl.float32))
    tl.store(out_ptr + 64 + i, second.to(tl.float32))
    tl.store(out_ptr + 128 + i, third.to(tl.float32))


@pytest.mark.parametrize(("parts", "bits"), [(2, 16), (3, 24)])
def test_parts_are_bfloat16_and_add_up(parts, bits):
    x = torch.randn(64) * 10.0 ** torch.randint(-20, 20, (64,))
    found = torch.empty(3, 64)
    _parts_of[(1,)](x, found, PARTS=parts)
    found = found[:parts]
    assert torch.equal(found.bfloat16().float(), found)
    assert ((found.double().sum(0) - x).abs() <= 2.0**-bits * x.abs()).all()
    # Rounded and not truncated, so that what is left is of either sign.
    assert ((found[0] - x).abs() <= 2.0**-8 * x.abs()).all()


@pytest.mark.parametrize("value", ["0x7f800000", "-0x800000", "0x7fffffff", "0x7fc00000"])
def test_what_is_not_finite_has_a_part_that_is_not(value):
    x = torch.full((64,), int(value, 16), dtype=torch.int32).view(torch.float32)
    found = torch.empty(3, 64)
    _parts_of[(1,)](x, found, PARTS=tl.constexpr(2))
    assert found[1].isnan().all()


@triton.jit
def _scaled(x_ptr, scale_ptr, LARGEST: tl.constexpr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i[:, None] * 16 + i[None, :])
    tl.store(scale_ptr, newton.power_of_two(x, LARGEST, 0))


@pytest.mark.parametrize("size", [1e-33, 1e-20, 0.7, 1.0, 65504.0, 1e30])
@pytest.mark.parametrize("largest", [2.0**14, 1.0, 2.0**-9])
def test_a_gradient_is_scaled_by_a_power_of_two(size, largest):
    x, scale = torch.rand(16, 16), torch.empty(1)
    x[3, 5] = -1.0
    x *= size
    _scaled[(1,)](x, scale, LARGEST=largest)
    assert math.frexp(scale.item())[0] == 0.5
    assert largest / 2 <= (x.double().abs().sum(1).max() * scale.double()).item() < largest


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-36])
def test_a_tiny_gradient_is_scaled_by_a_finite_number(size):
    scale = torch.empty(1)
    _scaled[(1,)](torch.full((16, 16), size), scale, LARGEST=tl.constexpr(2.0**14))
    assert scale.isfinite().all()
    assert (1 / scale).isfinite().all()


def test_float16_holds_the_gradients_on_their_way():
    # Past these steps another format is taken. The worst case: all the gradient where the covariance is next to zero.
    for num_iters in range(2, 13):
        assert precision.newton_split(2, False, num_iters) == 1
        raised = precision.newton_raised(num_iters)
        for size in (1, 100, 1024):
            largest = precision.newton_range(num_iters, size)
            assert math.log2(largest).is_integer()
            iterate, d_residual, d_iterate = 1.5, size * largest, 0.5 * size * largest
            for _ in range(1, num_iters):
                taken = [raised * iterate, 1.5 * d_residual, d_iterate]
                d_residual *= 2.25
                assert max(*taken, d_residual) <= 2**15
                d_iterate = 1.5 * d_iterate + 0.5 * iterate * d_residual
                iterate *= 1.5
    assert (
        precision.newton_split(2, False, 13)
        == precision.newton_split(3, False, 8)
        == precision.newton_split(2, True, 2)
        == 3
    )
    assert precision.newton_split(3, False, 7) == 2
