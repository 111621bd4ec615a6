"""What users have come to rely on: public names, and checkpoints of the first layout of the package."""

from pathlib import Path

import pytest
import torch

import iternorm

SAVED = Path(__file__).parent / "data" / "layers-0.1.pt"
# The names of 0.1 and of what was added since; more may come, none may go.
NAMES = [
    "ConversionReport",
    "DecorrelatedBatchNorm1d",
    "DecorrelatedBatchNorm2d",
    "DecorrelatedBatchNorm3d",
    "DecorrelatedLinear",
    "FoldTable",
    "Folded",
    "GroupWhitening1d",
    "GroupWhitening2d",
    "GroupWhitening3d",
    "InstanceWhitening1d",
    "InstanceWhitening2d",
    "InstanceWhitening3d",
    "IterNorm1d",
    "IterNorm2d",
    "IterNorm3d",
    "SyncDecorrelatedBatchNorm",
    "SyncIterNorm",
    "Whitener",
    "convert_batchnorm",
    "convert_sync_iternorm",
    "convert_to_batchnorm",
    "decorrelate_features",
    "eval_map",
    "fold",
    "fold_into_next",
    "fold_into_next_layer",
    "fold_into_previous",
    "fold_into_previous_layer",
    "fold_pointwise",
    "freeze",
    "functional",
    "linalg",
    "recalibrate",
    "reference",
    "solvers",
    "unfreeze",
]


def test_no_public_name_is_lost():
    assert set(NAMES) <= set(iternorm.__all__)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("iternorm", lambda: iternorm.IterNorm2d(5, group_size=3)),
        ("dbn", lambda: iternorm.DecorrelatedBatchNorm2d(5, group_size=2, running="covariance", momentum=None)),
    ],
)
def test_a_state_dict_of_the_first_layout_loads_and_gives_its_output(name, layer):
    saved = torch.load(SAVED, weights_only=True)[name]
    made = layer()
    made.load_state_dict(saved["state"])
    torch.testing.assert_close(made.eval()(saved["input"]), saved["output"])
