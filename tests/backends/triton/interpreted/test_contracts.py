"""What the Triton backend promises: reasons, operators, plans, and programs that cover all samples."""

import pytest
import torch
from checks import channels_last, correlated, layer_for

from iternorm import functional

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: gpu/test_kernels.py", allow_module_level=True)

from iternorm.backends.triton import layout, plan, tiling
from iternorm.whitening import fused

# Of an operator's arguments: no residual, and no running statistics.
NOT_ASKED = (None, None, None, None, None, False)


def test_kernels_that_cannot_run_say_why():
    with pytest.raises(ValueError, match=r'^the kernels of impl="triton" cannot run: they take .*64; use impl="auto"'):
        layer_for((4, 8, 2, 2), group_size=4, dtype=torch.float64)(torch.randn(4, 8, 2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="groups of up to 1024 channels for 'newton', not 1025"):
        layer_for((4, 1025), group_size=None)(torch.randn(4, 1025))
    with pytest.raises(ValueError, match="up to 65535 groups, not 65536"):
        layer_for((4, 65536), group_size=1)(torch.randn(4, 65536))
    with pytest.raises(ValueError, match="not 'pca'"):
        functional.decorrelated_batch_norm(torch.randn(4, 8, 2, 2), training=True, solver="pca", impl="triton")
    with pytest.raises(ValueError, match="groups of up to 64 channels for 'zca', not 65"):
        functional.decorrelated_batch_norm(torch.randn(4, 65), training=True, group_size=65, impl="triton")


def test_a_tensor_that_outlives_a_transform_is_normalized():
    x, left = torch.randn(6, 8, 3, 3), []

    def keep(t):
        left.append(t)
        return t.sum()

    torch.func.grad(keep)(x)
    layer = layer_for(x.shape, group_size=4, affine=False)
    assert torch.equal(layer(left[0]), layer(x))


def test_a_transform_is_computed_by_ordinary_operators():
    layer = layer_for((6, 8, 3, 3), group_size=4)
    x = torch.randn(6, 8, 3, 3)
    layer(x)
    leaf = x.clone().requires_grad_()
    layer(leaf).sin().sum().backward()
    transformed = torch.func.grad(lambda t: layer(t).sin().sum())(x)
    torch.testing.assert_close(transformed, leaf.grad, rtol=1e-4, atol=1e-5)


def test_the_operators_keep_their_contracts():
    x, weight, bias = correlated(4, 12, 3, 3, dtype=torch.float32), torch.ones(12), torch.zeros(12)
    torch.library.opcheck(fused.forward_op, (x, weight, bias, *NOT_ASKED, 8, 3, 1e-5, False, False))
    running = (torch.zeros(12), torch.eye(8).repeat(2, 1, 1), torch.tensor(0), None, True)
    arguments = (channels_last(x), None, None, channels_last(x).cos(), *running, 8, 0, 1e-5, True, True)
    torch.library.opcheck(fused.forward_op, arguments)
    y, state = fused.forward_op(x, weight, bias, *NOT_ASKED, 8, 3, 1e-5, False, True)
    grad = torch.randn_like(x)
    torch.library.opcheck(fused.backward_op, (grad, None, x, weight, state, y, 8, 3, 1e-5, False, True, False))
    torch.library.opcheck(fused.backward_op, (grad, None, x, weight, state, y, 8, 3, 1e-5, False, True, True))
    torch.library.opcheck(fused.backward_op, (grad, None, x, None, state, None, 8, 3, 1e-5, True, False, False))


def test_the_operators_keep_their_contracts_in_wide_groups():
    # Planes, which are turned for the kernels and must come back.
    x, grad, weight = *torch.randn(2, 4, 130, 3, 3).unbind(), torch.ones(130)
    # Of the tests that there are, those that do not trace: each run takes seconds here.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused.forward_op, (x, weight, None, *NOT_ASKED, 130, 1, 1e-5, False, True), test_utils=checks)
    y, state = fused.forward_op(x, weight, None, *NOT_ASKED, 130, 1, 1e-5, False, True)
    arguments = (grad, None, x, weight, state, y, 130, 1, 1e-5, False, True, False)
    torch.library.opcheck(fused.backward_op, arguments, test_utils=checks)


def test_a_plan_is_made_once_and_depends_on_all_it_must():
    x = correlated(4, 12, 3, 3, dtype=torch.float32)
    first = plan.plan_for(x, None, None, 8, 3, None)
    assert plan.plan_for(x.clone(), None, None, 8, 3, None) is first
    for other in (
        plan.plan_for(x[:3], None, None, 8, 3, None),
        plan.plan_for(channels_last(x), None, None, 8, 3, None),
        plan.plan_for(x, torch.ones(12), None, 8, 3, None),
        plan.plan_for(x, None, None, 4, 3, None),
        plan.plan_for(x, None, None, 8, 4, None),
    ):
        assert other is not first


@pytest.mark.parametrize(("samples", "num_groups"), [(1, 1), (100, 3), (65536, 1), (65536, 8), (3211264, 1), (999, 40)])
@pytest.mark.parametrize("others", [0, 1])
def test_no_program_is_without_a_tile_and_all_fit_the_gpu(samples, num_groups, others):
    shape = layout.Layout(samples, 64 * num_groups, 1, True, 64, 64, num_groups, False, True)
    tiles = tiling.Tiles(64, 4, 3, 2)
    count = tiling.programs(shape, tiles, 132, others)
    total = -(-samples // tiles.samples)
    assert 1 <= count <= total
    assert (count + others) * num_groups <= max(132 * tiles.per_sm, (1 + others) * num_groups)
