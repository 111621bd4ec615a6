"""Whitening normalization for PyTorch: the one list of public names."""

from iternorm import functional, reference, solvers
from iternorm.modules import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    IterNorm1d,
    IterNorm2d,
    IterNorm3d,
)

__version__ = "0.1.0"

__all__ = [
    "DecorrelatedBatchNorm1d",
    "DecorrelatedBatchNorm2d",
    "DecorrelatedBatchNorm3d",
    "IterNorm1d",
    "IterNorm2d",
    "IterNorm3d",
    "functional",
    "reference",
    "solvers",
]
