"""Whitening normalization for PyTorch: the one list of public names."""

from importlib import metadata as _metadata

from iternorm import functional, linalg, reference, solvers
from iternorm.layers.base import SmallBatchWarning
from iternorm.layers.lazy import (
    LazyDecorrelatedBatchNorm1d,
    LazyDecorrelatedBatchNorm2d,
    LazyDecorrelatedBatchNorm3d,
    LazyIterNorm1d,
    LazyIterNorm2d,
    LazyIterNorm3d,
)
from iternorm.layers.norms import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    IterNorm1d,
    IterNorm2d,
    IterNorm3d,
)
from iternorm.layers.per_sample import (
    GroupWhitening1d,
    GroupWhitening2d,
    GroupWhitening3d,
    InstanceWhitening1d,
    InstanceWhitening2d,
    InstanceWhitening3d,
)
from iternorm.layers.sync import SyncDecorrelatedBatchNorm, SyncIterNorm
from iternorm.models.calibrate import freeze, recalibrate, unfreeze
from iternorm.models.convert import ConversionReport, convert_batchnorm, convert_to_batchnorm
from iternorm.models.features import DecorrelatedLinear, decorrelate_features
from iternorm.models.fold.model import Folded, FoldTable, fold
from iternorm.models.fold.weights import (
    eval_map,
    fold_into_next,
    fold_into_next_layer,
    fold_into_previous,
    fold_into_previous_layer,
    fold_pointwise,
)
from iternorm.models.synchronize import convert_sync_iternorm
from iternorm.whitener.estimator import Whitener

try:
    __version__ = _metadata.version("iternorm")
except _metadata.PackageNotFoundError:
    # The tree is on the path and nothing is installed.
    __version__ = "0+unknown"

__all__ = [
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
    "LazyDecorrelatedBatchNorm1d",
    "LazyDecorrelatedBatchNorm2d",
    "LazyDecorrelatedBatchNorm3d",
    "LazyIterNorm1d",
    "LazyIterNorm2d",
    "LazyIterNorm3d",
    "SmallBatchWarning",
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
