"""What a normalization does to the conditioning of its data, and how much noise its batch statistics add."""

from iternorm.analysis.conditioning import (
    Moments,
    condition_number,
    correlation,
    covariance,
    effective_rank,
    mean_absolute_correlation,
    merge_moments,
    moments,
    spectrum,
    update_moments,
    whiteness_error,
)
from iternorm.analysis.model import analyze
from iternorm.analysis.operations import Whitening, batch_norm, decorrelated_batch_norm, iter_norm, operation_of
from iternorm.analysis.stochasticity import SND, in_training, snd
from iternorm.analysis.summary import LayerAnalysis, ModelAnalysis

__all__ = [
    "SND",
    "LayerAnalysis",
    "ModelAnalysis",
    "Moments",
    "Whitening",
    "analyze",
    "batch_norm",
    "condition_number",
    "correlation",
    "covariance",
    "decorrelated_batch_norm",
    "effective_rank",
    "in_training",
    "iter_norm",
    "mean_absolute_correlation",
    "merge_moments",
    "moments",
    "operation_of",
    "snd",
    "spectrum",
    "update_moments",
    "whiteness_error",
]
