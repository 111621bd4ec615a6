"""Eval models leave torch: torch.export, and ONNX run by onnxruntime, with a batch of another size."""

import pytest
import torch
from torch import nn

import iternorm
import third_party
from iternorm import DecorrelatedBatchNorm2d, IterNorm1d, IterNorm2d, IterNorm3d, SyncIterNorm
from third_party import BatchNormAct2d, logits

# The ONNX exporter of torch 2.13 uses a part of torch that torch has deprecated, in the name of the caller.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

MODELS = {
    "1d": (lambda: IterNorm1d(10, group_size=4), (10,)),
    "1d, signal": (lambda: IterNorm1d(10, group_size=5), (10, 6)),
    "2d": (lambda: nn.Sequential(nn.Conv2d(3, 10, 3), IterNorm2d(10, group_size=4), nn.ReLU()), (3, 6, 6)),
    "3d": (lambda: IterNorm3d(6, group_size=3), (6, 3, 4, 4)),
    "sync": (lambda: nn.Sequential(SyncIterNorm(6, group_size=4), nn.Flatten()), (6, 4, 4)),
    "running covariance": (lambda: IterNorm2d(6, running="covariance", group_size=4), (6, 4, 4)),
    "zca": (lambda: DecorrelatedBatchNorm2d(6, group_size=4), (6, 4, 4)),
    "activation": (lambda: iternorm.convert_batchnorm(BatchNormAct2d(6, nn.SiLU)), (6, 4, 4)),
    "features": (lambda: iternorm.decorrelate_features(nn.Sequential(nn.ReLU(), nn.Linear(6, 3))), (6,)),
}


def trained(name):
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build()
    for _ in range(3):
        model(torch.randn(16, *shape) + 0.5)
    return model.eval(), torch.randn(4, *shape), torch.randn(7, *shape)


def exported(model, example):
    return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))


def run_onnx(model, example, x, folder):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = folder / "model.onnx"
    torch.onnx.export(model, (example,), path, dynamo=True, verbose=False, dynamic_shapes=({0: "batch"},))
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("name", MODELS)
def test_torch_export_with_a_dynamic_batch(name):
    model, example, x = trained(name)
    with torch.no_grad():
        torch.testing.assert_close(exported(model, example).module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_equals_torch(name, tmp_path):
    model, example, x = trained(name)
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(model, example, x, tmp_path), model(x), rtol=1e-5, atol=1e-5)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return logits(self.model, x)


@pytest.mark.parametrize(
    ("name", "folded"),
    [("transformers ResNet", False), ("transformers ResNet", True), ("transformers MobileNetV2", True)],
)
def test_a_third_party_model_in_onnxruntime(name, folded, tmp_path):
    model, x = third_party.converted_and_trained(name)
    if folded:
        model, _ = iternorm.fold(model, x)
    model = Logits(model).eval()
    with torch.no_grad():
        expected = model(x)
        result = run_onnx(model, x[:2], x, tmp_path)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_a_folded_model_has_no_operator_of_its_own():
    model, example, _ = trained("2d")
    folded, _ = iternorm.fold(model)
    targets = {str(node.target) for node in exported(folded, example).graph.nodes if node.op == "call_function"}
    assert targets == {"aten.conv2d.default", "aten.relu.default"}
