"""Stochastic Normalization Disturbance: how far the output of a sample moves with the batch it is normalized by.

For a sample x and reference batches X_1 ... X_s of B examples (the paper's Eq. 9 and its estimate, Eq. 10)

    SND(x) = mean over i of ‖ F(X_i; x) - mean over j of F(X_j; x) ‖,

and the SND of the operation F is the mean of SND(x) over samples x.
"""

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iternorm.analysis.operations import AffineMaps, Whitening
from iternorm.whitening import groups

# Maps a reference batch [B, C, ...] and samples [N, C, ...] to outputs [N, C, ...].
Operation = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SND:
    """An estimate of Stochastic Normalization Disturbance.

    Attributes:
        value: The SND of the operation: the mean of `per_sample`.
        standard_error: Of `value`, over the choice of both batches and samples.
        per_sample: The SND of each sample, ``[N]``.
        per_sample_standard_error: Over the choice of batches, ``[N]``.
        output_norm: Mean over samples of the norm of their mean output. SND is in the units of the output, which an
            operation may shrink: IterNorm with few iterations does.
        batch_size: Examples in a reference batch.
        draws: Number of reference batches.
    """

    value: float
    standard_error: float
    per_sample: Tensor
    per_sample_standard_error: Tensor
    output_norm: float
    batch_size: int
    draws: int

    @property
    def relative(self) -> float:
        """SND as a share of the output's norm, which compares operations of different output scales."""
        return self.value / self.output_norm if self.output_norm else float("nan")


def snd(
    operation: Whitening | Operation,
    data: Tensor,
    batch_size: int,
    *,
    samples: Tensor | int = 1000,
    draws: int = 100,
    seed: int | torch.Generator = 0,
    memory_budget: int = 256 * 2**20,
) -> SND:
    """Stochastic Normalization Disturbance of an operation, over reference batches drawn from `data`.

    A batch holds different examples of `data`; batches are drawn independently. With ``[M, C, ...]`` an example has
    several positions: a batch is normalized over all positions of its examples, and distances are taken between the
    channel vectors of each position and averaged. The same seed draws the same batches and samples for every
    operation, so differences between operations are more accurate than either estimate.

    Args:
        operation: A `Whitening` (BatchNorm, DBN, IterNorm: computed for many batches at once), or any function of
            (reference batch ``[B, C, ...]``, samples ``[N, C, ...]``) that returns the outputs of the samples, such as
            `in_training` of a layer.
        data: The examples ``[M, C]`` or ``[M, C, ...]`` that batches are drawn from.
        batch_size: Examples in a batch, 2 or more.
        samples: The samples ``[N, C, ...]`` whose outputs are watched, or the number of examples of `data` to take.
        draws: Number of batches, the paper's s.
        seed: Decides the draws; a CPU generator is used, and moved on.
        memory_budget: Bytes of working memory to stay below, as far as one batch at a time allows.

    Example:
        >>> from iternorm.analysis import batch_norm, iter_norm
        >>> data = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
        >>> small, large = (snd(batch_norm(), data, size, samples=50) for size in (16, 256))
        >>> small.value > large.value
        True
        >>> snd(iter_norm(num_iters=5), data, 16, samples=50).value < small.value
        True
    """
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(operator.index(seed))
    batch_size, draws = operator.index(batch_size), operator.index(draws)
    data, samples = _checked(data, batch_size, samples, draws, generator)
    indices = torch.stack([torch.randperm(len(data), generator=generator)[:batch_size] for _ in range(draws)])
    with torch.no_grad():
        if isinstance(operation, Whitening):
            distances, norms = _affine_distances(operation, data, samples, indices, memory_budget)
        else:
            distances, norms = _distances(operation, data, samples, indices, memory_budget)
    return summarize(distances, norms, batch_size)


def summarize(distances: Tensor, norms: Tensor, batch_size: int) -> SND:
    """The estimate and its standard errors.

    `distances` ``[s, N]`` are those of each output to its sample's mean output, `norms` ``[N]`` those of the latter.

    Batches and samples are two crossed random choices. The variance of the mean over both is the variance of the
    batches' means and that of the samples' means, less the share of the residual that both contain.
    """
    draws, num_samples = distances.shape
    distances = distances.double()
    per_sample = distances.mean(0)
    value = per_sample.mean()
    by_draw = distances.mean(1)
    variance = by_draw.var() / draws
    if num_samples > 1:
        residual = distances - by_draw[:, None] - per_sample + value
        residual_variance = residual.square().sum() / ((draws - 1) * (num_samples - 1))
        by_sample = per_sample.var() / num_samples
        shared = residual_variance / (draws * num_samples)
        variance = torch.maximum(variance + by_sample - shared, torch.maximum(variance, by_sample))
    return SND(
        value=value.item(),
        standard_error=variance.sqrt().item(),
        per_sample=per_sample,
        per_sample_standard_error=distances.std(0) / draws**0.5,
        output_norm=norms.mean().item(),
        batch_size=batch_size,
        draws=draws,
    )


def in_training(layer: nn.Module) -> Operation:
    """A layer in training mode as an operation of (reference batch, samples), for `snd`.

    As in training, the sample is a member of its own batch: it takes the place of the batch's last example. The layer
    runs once for each pair of a sample and a batch, so choose few samples. A copy is run; `layer` is left alone.
    """
    layer = copy.deepcopy(layer).train()

    def operation(batch: Tensor, samples: Tensor) -> Tensor:
        others = batch[:-1]
        return torch.cat([layer(torch.cat([others, sample[None]]))[-1:] for sample in samples])

    return operation


def _checked(
    data: Tensor, batch_size: int, samples: Tensor | int, draws: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`data` and the samples to estimate SND on, checked, in fp32 or fp64."""
    if data.ndim < 2 or not data.is_floating_point():
        shape = f"{data.dtype} of shape {tuple(data.shape)}"
        raise ValueError(f"data is {shape}, but floating-point examples [M, C] or [M, C, ...] are needed")
    if batch_size < 2:
        raise ValueError(f"batch_size is {batch_size}, but a batch needs 2 or more examples to have a variance")
    if len(data) < batch_size:
        raise ValueError(f"data holds {len(data)} examples, fewer than batch_size={batch_size}: give more or lower it")
    if draws < 2:
        raise ValueError(f"draws is {draws}, but 2 or more batches are needed to see a spread")
    if not isinstance(samples, Tensor):
        samples = operator.index(samples)
        if samples < 1:
            raise ValueError(f"samples is {samples}, but 1 or more are needed")
        samples = data[torch.randperm(len(data), generator=generator)[:samples].to(data.device)]
    if samples.ndim < 2 or samples.shape[1] != data.shape[1] or len(samples) == 0:
        raise ValueError(
            f"samples have shape {tuple(samples.shape)}, but [N, {data.shape[1]}, ...] is needed: one or more samples "
            f"with the channels of data, {tuple(data.shape)}"
        )
    for name, tensor in (("data", data), ("samples", samples)):
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} hold NaN or Inf: remove these examples first")
    dtype = torch.promote_types(data.dtype, torch.float32)
    return data.to(dtype), samples.to(dtype)


def _affine_distances(
    operation: Whitening, data: Tensor, samples: Tensor, indices: Tensor, budget: int
) -> tuple[Tensor, Tensor]:
    """Distances ``[s, N]`` and norms ``[N]`` of the mean outputs."""
    num_channels = data.shape[1]
    # The operations are equivariant to a shift, so the data may be centred first. With a mean of 1000 deviations, A x
    # and c would otherwise cancel to a few digits.
    center = data.flatten(2).mean((0, 2)) if data.ndim > 2 else data.mean(0)
    rows = data.flatten(2).mT.contiguous() - center if data.ndim > 2 else (data - center)[:, None]  # [M, P, C]
    positions = samples.flatten(2).mT if samples.ndim > 2 else samples[:, None]  # [N, P, C]
    points = positions.flatten(0, 1) - center  # [N P, C]

    size = groups.effective_size(num_channels, operation.group_size)
    itemsize = data.element_size()
    # Working copies a batch of rows and a map go through in `Whitening.fit`, those in fp64 counted twice.
    copies = 3 if operation.solver == "newton" or size == 1 else 5
    map_bytes = num_channels * (size + 1) * itemsize
    batch_bytes = copies * (indices.shape[1] * rows.shape[1] * num_channels * itemsize + 3 * map_bytes)

    def fits() -> Iterator[list[AffineMaps]]:
        for chunk in indices.split(max(1, budget // 2 // batch_bytes)):
            yield operation.fit(rows[chunk.to(rows.device)].flatten(1, 2))

    kept = len(indices) * map_bytes <= budget // 2
    distances, norms = spread(fits, groups.parts(num_channels, operation.group_size), points, kept, budget // 2)
    return distances.unflatten(1, (len(samples), -1)).mean(2), norms.unflatten(0, (len(samples), -1)).mean(1)


def spread(
    fits: Callable[[], Iterator[list[AffineMaps]]], parts: list[groups.Part], points: Tensor, kept: bool, budget: int
) -> tuple[Tensor, Tensor]:
    """Distances ``[s, n]`` of the outputs of points ``[n, C]`` to their means over s maps, and norms ``[n]`` of these.

    The mean output of a point is the output of the mean map, so no output is kept.

    Args:
        fits: Makes the maps, some at a time.
        parts: The groups of channels.
        points: The points.
        kept: Keep all maps, instead of making them a second time.
        budget: Bytes for the outputs that are worked on at a time.
    """
    maps = list(fits()) if kept else None
    count = 0
    totals: list[AffineMaps] = []
    for chunk in maps if maps is not None else fits():
        sums = [AffineMaps(block.linear.sum(0), block.shift.sum(0)) for block in chunk]
        pairs = zip(totals or sums, sums, strict=True)
        totals = [AffineMaps(a.linear + b.linear, a.shift + b.shift) for a, b in pairs] if totals else sums
        count += len(chunk[0].shift)
    means = [AffineMaps(block.linear / count, block.shift / count) for block in totals]

    def norms_of(maps: list[AffineMaps]) -> Tensor:
        point_bytes = 2 * len(maps[0].shift) * points.shape[1] * points.element_size()
        return torch.cat([_norms(maps, parts, some) for some in points.split(max(1, budget // point_bytes))], 1)

    distances = []
    for chunk in maps if maps is not None else fits():
        pairs = zip(chunk, means, strict=True)
        distances.append(norms_of([AffineMaps(a.linear - b.linear, a.shift - b.shift) for a, b in pairs]))
    return torch.cat(distances), norms_of([AffineMaps(mean.linear[None], mean.shift[None]) for mean in means])[0]


def _norms(maps: list[AffineMaps], parts: list[groups.Part], points: Tensor) -> Tensor:
    """‖A x + c‖ over all groups, ``[k, n]``, of maps of k batches at points ``[n, C]``."""
    squares = 0
    for (linear, shift), part in zip(maps, parts, strict=True):
        block = points[:, part.channels]
        if part.size == 1:
            outputs = torch.addcmul(shift.flatten(1)[:, None], linear.flatten(1)[:, None], block)  # [k, n, C]
            squares = squares + outputs.square_().sum(2)
        else:
            grouped = block.unflatten(1, (part.count, part.size)).transpose(0, 1)  # [G, n, d]
            outputs = (grouped @ linear.mT).add_(shift[:, :, None])  # [k, G, n, d]
            squares = squares + outputs.square_().sum((1, 3))
    assert isinstance(squares, Tensor)
    return squares.sqrt()


def _distances(
    operation: Operation, data: Tensor, samples: Tensor, indices: Tensor, budget: int
) -> tuple[Tensor, Tensor]:
    """Distances ``[s, N]`` and norms ``[N]`` for a function; outputs that do not fit the budget are made twice."""

    def outputs() -> Iterator[Tensor]:
        for draw in indices:
            output = operation(data[draw.to(data.device)], samples)
            if output.shape[:2] != samples.shape[:2]:
                expected = f"[{samples.shape[0]}, {samples.shape[1]}, ...]"
                raise ValueError(f"operation returned shape {tuple(output.shape)}, but {expected} is needed")
            yield output

    kept = list(outputs()) if len(indices) * samples.nbytes <= budget else None
    mean = torch.as_tensor(sum(kept if kept is not None else outputs())) / len(indices)
    distances = [_channel_norms(output - mean) for output in (kept if kept is not None else outputs())]
    return torch.stack(distances), _channel_norms(mean)


def _channel_norms(output: Tensor) -> Tensor:
    """The norm over channels of ``[N, C, ...]``, its mean over positions: ``[N]``."""
    return torch.linalg.vector_norm(output, dim=1).flatten(1).mean(1) if output.ndim > 2 else output.norm(dim=1)
