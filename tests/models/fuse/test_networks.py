"""`convert_batchnorm(model, fuse=True)`: the same model, in which a norm adds the shortcut and applies the ReLU."""

# A converted model is a Module to a checker, whatever it was.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportUnusedExpression=false

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import third_party
import torch
from fusible import (
    ADDS,
    NETWORKS,
    BasicBlock,
    ResNet,
    Wired,
    assert_same,
    conv,
    count,
    pair,
)
from third_party import BatchNormAct2d, logits
from torch import fx, nn
from torch.nn import functional as F

import iternorm
from iternorm import ConversionReport, IterNorm2d, SyncIterNorm, convert_batchnorm, convert_to_batchnorm, fold
from iternorm.layers.base import WhiteningNorm
from iternorm.models.fuse.junctions import Absorbed


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fused_network_is_the_same_function(name):
    build, shape, expected = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double()
    kinds = {key: type(module) for key, module in model.named_modules()}
    plain, fused, report = pair(model)
    assert fused is model
    assert dict(report.fused) == expected
    assert [key for key, _ in report.fused] == [key for key, _ in report.converted if key in expected]
    assert {key for key, _ in report.fused + report.unfused} == {key for key, _ in report.converted}
    for key, module in fused.named_modules():
        assert isinstance(module, (kinds[key], WhiteningNorm, Absorbed))
        assert type(module).__name__ in (kinds[key].__name__, "IterNorm2d", "Absorbed")
    x = torch.randn(4, *shape, dtype=torch.float64)
    assert_same(plain, fused, x)
    # Copies, too.
    state = copy.deepcopy(plain)
    for duplicate in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert_same(copy.deepcopy(state), duplicate, x)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_norm_does_is_not_done_again(name):
    build, _, expected = NETWORKS[name]
    plain, fused, _ = pair(build())
    (relus, sums), (relus_left, sums_left) = count(plain), count(fused)
    assert relus - relus_left == sum("ReLU" in text for text in expected.values())
    assert sums - sums_left == sum("adds" in text for text in expected.values())


def test_without_it_nothing_is_fused():
    report = ConversionReport()
    model = convert_batchnorm(ResNet(), report=report)
    assert not report.fused
    assert not report.unfused
    assert "fused" not in str(report)
    assert all(layer.activation is None for layer in model.modules() if isinstance(layer, WhiteningNorm))
    assert type(model.layer1[0]) is BasicBlock


def test_the_report_names_what_was_fused_and_what_was_not():
    _, _, report = pair(BasicBlock(8, 12, 2))
    assert str(report).splitlines()[-3:] == [
        "fused      bn1: ReLU",
        f"fused      bn2: {ADDS}",
        "not fused  downsample.1: its module returns its output",
    ]


def test_an_activation_that_the_layer_has_and_other_layers_of_the_model():
    model = nn.Sequential(IterNorm2d(3, activation="relu"), nn.ReLU(), IterNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    report = ConversionReport()
    convert_batchnorm(model, fuse=True, report=report)
    assert report.fused == [("2", "ReLU")]
    assert report.unfused[0] == ("0", "it has activation='relu' already")
    # What is fused is left alone by a second conversion, and there is nothing more to do.
    with pytest.warns(UserWarning, match="no BatchNorm layer was selected"):
        convert_batchnorm(model, fuse=True)


def test_synchronized_layers():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ResNet()).double()
    plain, fused, report = pair(model)
    assert isinstance(fused.bn1, SyncIterNorm)
    assert dict(report.fused) == NETWORKS["resnet"][2]
    assert_same(plain, fused, torch.randn(3, 3, 8, 8, dtype=torch.float64))
    # A fused model is synchronized, and is still fused.
    plain, fused, _ = pair(ResNet().double())
    iternorm.convert_sync_iternorm(plain), iternorm.convert_sync_iternorm(fused)
    assert isinstance(fused.layer1[0].bn2, SyncIterNorm)
    assert_same(plain, fused, torch.randn(3, 3, 8, 8, dtype=torch.float64))
    assert type(convert_to_batchnorm(fused).layer1[0]) is BasicBlock


@pytest.mark.parametrize("name", NETWORKS)
def test_the_way_back_is_the_original(name):
    build, shape, _ = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double()
    original = copy.deepcopy(model)
    back = convert_to_batchnorm(convert_batchnorm(model, fuse=True))
    assert [type(m) for m in back.modules()] == [type(m) for m in original.modules()]
    assert [repr(m) for m in back.modules()] == [repr(m) for m in original.modules()]
    assert_same(original, back, torch.randn(4, *shape, dtype=torch.float64))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fused_network_folds_as_the_unfused_one(name):
    build, shape, _ = NETWORKS[name]
    plain, fused, _ = pair(build().double())
    x = torch.randn(4, *shape, dtype=torch.float64)
    plain(x), fused(x)
    plain.eval(), fused.eval()
    for example in (None, x):
        folded, table = fold(fused, example)
        torch.testing.assert_close(folded(x), fused(x), rtol=1e-10, atol=1e-10)
        expected, expected_table = fold(plain, example)
        assert table == expected_table
        assert [type(m) for m in folded.modules()] == [type(m) for m in expected.modules()]
    assert count(fused) != count(plain)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_of_a_fused_network_keeps_its_relus(name):
    build, shape, _ = NETWORKS[name]
    _, fused, _ = pair(build().double())
    x = torch.randn(4, *shape, dtype=torch.float64)
    expected = fused.eval()(x)
    traced = fx.symbolic_trace(fused)
    torch.testing.assert_close(fold(traced)[0](x), expected, rtol=1e-10, atol=1e-10)
    with pytest.warns(UserWarning, match="has activation='relu' in it, which no BatchNorm has"):
        back = convert_to_batchnorm(traced)
    torch.testing.assert_close(back(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(convert_to_batchnorm(fused)(x), expected, rtol=1e-10, atol=1e-10)


def test_statistics_are_recalibrated_and_frozen_as_before():
    batches = [torch.randn(6, 3, 8, 8, dtype=torch.float64) for _ in range(3)]
    plain, fused, _ = pair(ResNet().double())
    for model in (plain, fused):
        iternorm.recalibrate(model, batches, progress=False)
        iternorm.freeze(model, where=lambda name, layer: "bn2" in name)
    torch.testing.assert_close(dict(fused.state_dict()), dict(plain.state_dict()), rtol=1e-9, atol=1e-10)
    assert_same(plain, fused, batches[0])


def test_a_batchnorm_with_an_activation_takes_it_in():
    model = nn.Sequential(conv(3, 8), BatchNormAct2d(8), conv(8, 8), BatchNormAct2d(8, nn.Identity), nn.ReLU())
    original = copy.deepcopy(model.double())
    plain, fused, report = pair(model)
    assert dict(report.fused) == {"1": "ReLU", "3": "ReLU"}
    x = torch.randn(3, 3, 5, 5, dtype=torch.float64)
    assert_same(plain, fused, x)
    back = convert_to_batchnorm(fused)
    assert [type(m) for m in back.modules()] == [type(m) for m in original.modules()]
    residual = Wired(lambda m, x: F.relu(m.norm(m.conv(x)) + x), norm=BatchNormAct2d(8, nn.Identity)).double()
    plain, fused, report = pair(residual)
    assert dict(report.fused) == {"norm": ADDS}
    assert_same(plain, fused, torch.randn(3, 8, 5, 5, dtype=torch.float64))


@pytest.mark.rare
def test_a_converted_network_compiles_whole():
    torch.manual_seed(0)
    plain, fused, _ = pair(nn.Sequential(conv(3, 8), BasicBlock()))
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(torch.compile(fused, fullgraph=True)(x), plain(x), rtol=1e-4, atol=1e-4)
    program = torch.export.export(fused.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(x[:3]), plain.eval()(x[:3]), rtol=1e-4, atol=1e-4)


def test_blocks_of_one_structure_share_a_class():
    _, fused, _ = pair(nn.Sequential(BasicBlock(), BasicBlock(), BasicBlock(8, 8, 2)))
    assert type(fused[0]) is type(fused[1]) is type(copy.deepcopy(fused[0])) is not type(fused[2])


def test_a_block_can_be_fused_in_two_steps_and_taken_apart_in_one():
    block = BasicBlock().double()
    plain = convert_batchnorm(copy.deepcopy(block))
    x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
    convert_batchnorm(block, where="first", fuse=True)
    convert_batchnorm(block, fuse=True, report=(report := ConversionReport()))
    assert report.fused == [("bn2", ADDS)]
    assert_same(plain, block, x)
    back = convert_to_batchnorm(pickle.loads(pickle.dumps(block)))
    assert type(back) is BasicBlock


def test_a_forward_that_is_no_function_stays():
    class Callable:
        def __call__(self, x):
            return x

    class Odd(BasicBlock):
        forward = Callable()  # pyright: ignore[reportAssignmentType]

    _, _, report = pair(Odd())
    assert "Odd" in dict(report.unfused)["bn1"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_part_in_torchscript_stays_and_the_rest_is_fused():
    scripted = torch.jit.script(BasicBlock(3, 3))
    report = ConversionReport()
    with pytest.warns(UserWarning, match="convert the model before scripting it"):
        model = convert_batchnorm(nn.Sequential(scripted, nn.BatchNorm2d(3), nn.ReLU()), fuse=True, report=report)
    assert report.fused == [("1", "ReLU")]
    assert model[0] is scripted


# Importing torch._dynamo calls an operator here, which a trace refuses; in torch 2.6 the import fails there by itself.
# Newer versions of torch have imported it before a model is traced, in the checks of `convert_batchnorm`.
FIRST_CHECKPOINT = """
import sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from iternorm import IterNorm2d
from iternorm.models.fuse import rewrite

class Calls:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            torch.empty(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 3, 1), IterNorm2d(3), nn.ReLU()

    def saving(self, x):
        return self.relu(self.norm(self.conv(x)))

    def forward(self, x):
        return checkpoint(self.saving, x, use_reentrant=False) + x

assert "torch._dynamo" not in sys.modules
sys.meta_path.insert(0, Calls())
try:
    rewrite.trace(Block())
except rewrite.CannotTraceError as error:
    assert "torch._dynamo" in sys.modules, error
else:
    raise AssertionError("a checkpoint was traced")
"""


def test_a_first_checkpoint_is_not_met_inside_a_trace():
    source = Path(iternorm.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", FIRST_CHECKPOINT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bad_arguments_leave_the_model_as_it_was():
    model = BasicBlock()
    with pytest.raises(ValueError, match="group_size=0"):
        convert_batchnorm(model, fuse=True, group_size=0)
    model.bn1 = nn.LazyBatchNorm2d()
    with pytest.raises(ValueError, match="the first BatchNorm cannot be converted"):
        convert_batchnorm(model, where="first", fuse=True)
    assert type(model) is BasicBlock
    assert type(model.bn2) is nn.BatchNorm2d


def test_a_shape_that_the_structure_does_not_show_is_refused_by_the_layer():
    """A 1x1 image through a block with an unpadded shortcut: torch would broadcast."""
    wire = lambda m, x: F.relu(m.norm(m.conv(x)) + m.wide(x))  # noqa: E731
    _, fused, report = pair(Wired(wire, wide=nn.Conv2d(8, 8, 1, padding=1)))
    assert dict(report.fused) == {"norm": ADDS}
    before = {key: value.clone() for key, value in fused.state_dict().items()}
    with pytest.raises(ValueError, match=r"residual has shape \(2, 8, 3, 3\)"):
        fused(torch.randn(2, 8, 1, 1))
    torch.testing.assert_close(dict(fused.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["monai resnet18 2-D", "transformers ResNet", "monai DenseNet121"])
def test_third_party_models(name):
    model, x = third_party.build(name)
    with torch.no_grad():
        expected = logits(model, x)
        report = ConversionReport()
        convert_batchnorm(model, fuse=True, report=report)
        torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-4)
    assert len(report.fused) > len(report.unfused)
    assert ("monai resnet" in name) == (ADDS in dict(report.fused).values())
