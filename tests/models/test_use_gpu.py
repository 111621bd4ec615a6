"""Conversion, synchronization, calibration and folding on a GPU, where the layers run fused kernels."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import iternorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def network():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 48, 3, padding=1),
        nn.BatchNorm2d(48), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5),
    )  # fmt: skip


def test_a_model_on_the_gpu_converts_trains_recalibrates_and_folds():
    model = network().cuda().eval()
    x = torch.randn(64, 3, 16, 16, device="cuda")
    with torch.no_grad():
        expected = model(x)
        iternorm.convert_batchnorm(model, group_size=32)
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    assert {t.device.type for t in model.state_dict().values()} == {"cuda"}
    model.train()
    model(x).square().mean().backward()
    iternorm.recalibrate(model, x.split(16), progress=False)
    double = copy.deepcopy(model).double().eval()
    for example in (None, x.double()):
        folded, table = iternorm.fold(double, example)
        assert [row.how for row in table] == ["previous"] * 2
        torch.testing.assert_close(folded(x.double()), double(x.double()), rtol=1e-10, atol=1e-10)
    # In fp32 the recorded run goes through the inference kernel, which no operation shows.
    _, table = iternorm.fold(model.eval(), x)
    assert [row.how for row in table] == ["previous"] * 2


def test_one_nccl_process_is_iter_norm(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer, base = iternorm.SyncIterNorm(8, device="cuda"), iternorm.IterNorm2d(8, device="cuda")
        x = torch.randn(4, 8, 6, 6, device="cuda")
        torch.testing.assert_close(layer(x), base(x))
    finally:
        dist.destroy_process_group()
