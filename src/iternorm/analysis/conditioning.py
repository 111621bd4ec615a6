"""Second-order statistics of an activation, and the measures of its conditioning that follow from them.

Channels are dimension 1 of an activation ``[N, C, ...]``; samples are everything else. Covariances are biased (1/m),
as in the layers, and may carry leading batch dimensions ``[..., C, C]``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Channels in one band of `update_moments`.
_BAND = 256


class Moments(NamedTuple):
    """Sufficient statistics for everything this module measures, for a stream as well as for one batch."""

    num_samples: int
    # [C]
    mean: Tensor
    # [C, C]: the sum over samples of (x - mean)(x - mean)ᵀ, on and above the diagonal; what is below is undefined.
    scatter: Tensor

    @property
    def covariance(self) -> Tensor:
        """The biased covariance ``[C, C]``."""
        upper = self.scatter.triu() / self.num_samples
        return upper + upper.triu(1).mT


def samples_by_channels(x: Tensor) -> Tensor:
    """The activation ``[N, C, ...]`` as a matrix ``[m, C]`` of samples by channels."""
    if x.ndim < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, but an activation [N, C] or [N, C, ...] is needed")
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}, but a floating-point activation is needed: convert it, x.float() say")
    if x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)} and holds no samples")
    return x if x.ndim == 2 else x.movedim(1, -1).reshape(-1, x.shape[1])


def moments(x: Tensor) -> Moments:
    """Count, mean and scatter of the activation ``[N, C, ...]``; half precision is taken in fp32."""
    samples = samples_by_channels(x)
    if samples.dtype in (torch.float16, torch.bfloat16):
        samples = samples.float()
    return update_moments(None, samples)


def update_moments(total: Moments | None, samples: Tensor) -> Moments:
    """The moments of all samples so far and of `samples` ``[m, C]`` together; the scatter of `total` is overwritten.

    This is Chan's update, exact and stable for a large mean: each batch is centred by its own mean, and the distance
    between the means enters as one more sample.
    """
    count, num_channels = samples.shape
    batch_mean = samples.mean(0)
    centered = samples.new_empty(count + 1, num_channels)
    torch.sub(samples, batch_mean, out=centered[:count])
    if total is None:
        centered[count] = 0
        num_samples, mean = count, batch_mean
        scatter = samples.new_zeros(num_channels, num_channels)
    else:
        num_samples = total.num_samples + count
        shift = batch_mean - total.mean
        torch.mul(shift, (total.num_samples * count / num_samples) ** 0.5, out=centered[count])
        mean = total.mean + shift * (count / num_samples)
        scatter = total.scatter
    # torch has no symmetric rank-k update. Computing bands from the diagonal to the right saves half of the products.
    for start in range(0, num_channels, _BAND):
        band = slice(start, start + _BAND)
        scatter[band, start:].addmm_(centered[:, band].T, centered[:, start:])
    return Moments(num_samples, mean, scatter)


def merge_moments(total: Moments | None, batch: Moments) -> Moments:
    """The moments of two sets of samples together; the scatter of `total` is overwritten."""
    if total is None:
        return Moments(batch.num_samples, batch.mean, batch.scatter.clone())
    num_samples = total.num_samples + batch.num_samples
    shift = batch.mean - total.mean
    weight = total.num_samples * batch.num_samples / num_samples
    total.scatter.add_(batch.scatter).addr_(shift, shift, alpha=weight)
    return Moments(num_samples, total.mean + shift * (batch.num_samples / num_samples), total.scatter)


def covariance(x: Tensor) -> Tensor:
    """The biased covariance ``[C, C]`` of the channels of an activation ``[N, C]`` or ``[N, C, ...]``.

    Example:
        >>> covariance(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
        tensor([[1., 2.],
                [2., 4.]])
    """
    return moments(x).covariance


def spectrum(covariance: Tensor) -> Tensor:
    """The eigenvalues ``[..., C]`` of a covariance, in descending order, computed in the covariance's dtype.

    Eigenvalues that rounding made negative are returned as zero, since those of a covariance are not.
    """
    _check_square(covariance)
    return torch.linalg.eigvalsh(covariance).flip(-1).clamp_min(0)


def condition_number(covariance: Tensor) -> Tensor:
    """The largest eigenvalue divided by the smallest: 1 for white data, ``inf`` where a direction has no variance.

    A smallest eigenvalue within rounding error of zero (√C · the dtype's epsilon · the largest, the size of a matrix of
    independent rounding errors) counts as zero, so that rounding does not decide the condition number of a
    rank-deficient covariance.

    Example:
        >>> condition_number(torch.diag(torch.tensor([4.0, 1.0])))
        tensor(4.)
    """
    return condition_number_of_spectrum(spectrum(covariance))


def condition_number_of_spectrum(eigenvalues: Tensor) -> Tensor:
    """`condition_number`, from descending eigenvalues ``[..., C]``."""
    largest, smallest = eigenvalues[..., 0], eigenvalues[..., -1]
    floor = largest * eigenvalues.shape[-1] ** 0.5 * torch.finfo(eigenvalues.dtype).eps
    return torch.where(smallest > floor, largest / smallest, torch.inf)


def effective_rank(covariance: Tensor) -> Tensor:
    """The exponential of the entropy of the normalized spectrum (Roy and Vetterli, 2007).

    It is C for white data, 1 where all variance lies in one direction, and 0 for a covariance of zeros.
    """
    return effective_rank_of_spectrum(spectrum(covariance))


def effective_rank_of_spectrum(eigenvalues: Tensor) -> Tensor:
    """`effective_rank`, from eigenvalues ``[..., C]``."""
    total = eigenvalues.sum(-1, keepdim=True)
    share = eigenvalues / torch.where(total > 0, total, 1)
    rank = torch.special.entr(share).sum(-1).exp()
    return torch.where(total[..., 0] > 0, rank, 0)


def correlation(covariance: Tensor) -> Tensor:
    """The correlation matrix ``[..., C, C]``. A channel without variance correlates with nothing but itself."""
    _check_square(covariance)
    deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = torch.where(deviation > 0, deviation.reciprocal(), 0)
    matrix = (covariance * scale[..., :, None] * scale[..., None, :]).clamp(-1, 1)
    matrix.diagonal(dim1=-2, dim2=-1).fill_(1)
    return matrix


def mean_absolute_correlation(covariance: Tensor) -> Tensor:
    """The mean absolute correlation of different channels: 0 where they are decorrelated, and for one channel."""
    num_channels = covariance.shape[-1]
    matrix = correlation(covariance)
    if num_channels == 1:
        return matrix.new_zeros(matrix.shape[:-2])
    return (matrix.abs().sum((-2, -1)) - num_channels) / (num_channels * (num_channels - 1))


def whiteness_error(covariance: Tensor) -> Tensor:
    """The distance of a covariance from the identity, relative to the identity: 0 for white data.

    It is ‖Σ - I‖ ∕ ‖I‖ in the Frobenius norm.
    """
    _check_square(covariance)
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return torch.linalg.matrix_norm(covariance - identity) / covariance.shape[-1] ** 0.5


def _check_square(covariance: Tensor) -> None:
    if covariance.ndim < 2 or covariance.shape[-1] != covariance.shape[-2] or covariance.shape[-1] == 0:
        raise ValueError(f"covariance has shape {tuple(covariance.shape)}, but a square matrix [..., C, C] is needed")
    if not covariance.is_floating_point():
        raise TypeError(f"covariance is {covariance.dtype}, but a floating-point matrix is needed")
