"""What a normalization does to the conditioning of its data, and how much noise its batch statistics add."""

from .conditioning import (
    Moments,
    condition_number,
    correlation,
    covariance,
    effective_rank,
    mean_absolute_correlation,
    merge_moments,
    moments,
    spectrum,
    whiteness_error,
)

__all__ = [
    "Moments",
    "condition_number",
    "correlation",
    "covariance",
    "effective_rank",
    "mean_absolute_correlation",
    "merge_moments",
    "moments",
    "spectrum",
    "whiteness_error",
]
