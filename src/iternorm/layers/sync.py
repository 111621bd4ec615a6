"""SyncIterNorm and SyncDecorrelatedBatchNorm: whitening over the batches of all processes of a group.

The statistics are exchanged by `iternorm.whitening.processes`: one collective forward, one backward.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from iternorm import solvers
from iternorm.layers.base import WhiteningNorm
from iternorm.layers.norms import _DecorrelatedBatchNorm, _IterNorm
from iternorm.whitening.processes import collective

Self = TypeVar("Self", bound="Synchronized")


class Synchronized(WhiteningNorm):
    """A whitening layer whose batch is that of all processes of a group together."""

    process_group: Any
    # The group whose ranks have been seen to agree on this layer, by name.
    _agreed: str | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        """Any rank that `iternorm.functional` takes."""

    def _check_impl(self, impl: str) -> None:
        if impl == "reference":
            name = "IterNorm" if isinstance(self, _IterNorm) else "DecorrelatedBatchNorm"
            raise ValueError(f'impl="{impl}" does not synchronize; use impl="auto", or {name}1d/2d/3d')

    def _process_group(self, input: Tensor) -> collective.Group | None:
        group = collective.active_group(self.process_group)
        # Asked before anything is checked: a rank whose input does not fit its layer raises, and its peers must hear of
        # it first.
        if group is not None and self.training and self._agreed != group.name:
            self._check_agreement(input, group)
            self._agreed = group.name
        return group

    def _random_order(self, input: Tensor) -> Tensor:
        """The same permutation on all ranks: that of the sum of what each has drawn."""
        values = torch.rand(input.shape[1], device=input.device)
        group = self._process_group(input)
        if group is not None:
            values, _ = collective.global_sums(values, values[:0], group)
        return values.argsort()

    def _check_agreement(self, input: Tensor, group: collective.Group) -> None:
        """Collectives of different sizes hang or mix up memory, so the ranks compare what decides the size, once."""
        size = self.num_features if self.group_size is None else self.group_size
        double = int(input.dtype == torch.float64)
        # The layer's own number where they agree: under `torch.compile` the input's may be a symbol.
        channels = self.num_features if input.shape[1] == self.num_features else input.shape[1]
        solver = solvers.SOLVERS.index(self.solver)
        own = (channels, self.num_features, size, self.num_iters, double, solver)
        # In torch 2.6 the layer's own numbers may be symbols too, once layers of two sizes were compiled. A range makes
        # them numbers.
        own = tuple(len(range(number)) for number in own)
        every = collective.gather_integers(own, group, input.device)
        names = ("the channel count of the input", "num_features", "group_size", "num_iters", "fp64 input (1) or not")
        names += (f"solver (an index into {solvers.SOLVERS})",)
        for name, values in zip(names, zip(*every, strict=True), strict=True):
            if len(set(values)) > 1:
                each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise ValueError(
                    f"the ranks of the process group disagree on {name} ({each}); "
                    "build the same layer, and give inputs of the same channels and dtype, on every rank"
                )

    def __getstate__(self) -> dict[str, Any]:
        # A saved layer may be loaded by some ranks of another group: those have not agreed yet.
        return {**self.__dict__, "_agreed": None}

    def __deepcopy__(self: Self, memo: dict) -> Self:
        # A process group cannot be copied, and a copy of the layer belongs to the same one.
        memo[id(self.process_group)] = self.process_group
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate


class SyncIterNorm(Synchronized, _IterNorm):
    """Iterative normalization over the batches of all processes together, after `torch.nn.SyncBatchNorm`.

    In training, the mean and the covariance are those of the concatenated batches of all ranks of `process_group`;
    ranks may have different numbers of samples, or none. The output, the gradient of the input and the running
    statistics are what one process gets on the concatenated batch. Gradients of `weight` and `bias` are each rank's
    own part, which DDP or FSDP reduces. In eval, in a group of one process and outside any process group the layer
    works as IterNorm.

    It runs on the CPU (gloo) and on CUDA (nccl), there in the same kernels as IterNorm, and under
    `torch.compile(fullgraph=True)` too, with one collective forward and one backward. The first training step of a
    layer takes one more to see that the ranks agree on the layer, and `shuffle` one more in each step. Second
    derivatives (``create_graph=True``) do not reach over processes and raise.

    Args:
        num_features: C of an input ``[N, C, ...]`` of 2 to 5 dimensions.
        eps: added to the diagonal of the covariance.
        momentum: the share of the new batch in the running averages; None averages all batches alike.
        affine: learn a `weight` and a `bias` for each channel.
        track_running_stats: keep running averages; without them batch statistics are used in eval too, each rank's own.
        process_group: the processes to synchronize over; None is all of them.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: False learns no `bias`, only the `weight`, if `affine` is set.
        group_size: the number of channels whitened together; None is all of them.
        num_iters: the paper's T, the number of Newton steps, from 0. A large T tends to ZCA: at most 24 steps are taken
            in fp32, and 49 in fp64, which is convergence, and the output stays finite where channels depend on each
            other.
        running: "whitening" or "covariance"; see `IterNorm2d`.
        impl: "auto", "triton", "native" or "torch".
        activation: None, or "relu": the output goes through it.
        correction: 1 divides the covariance by the number of values of all ranks minus one; 0 by their number.
        shrinkage: (1 - shrinkage) Σ + shrinkage I replaces the covariance Σ; from 0 to 1.
        shuffle: in training, put the channels into groups at random, the same on all ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        group_size: int | None = 64,
        num_iters: int = 5,
        running: str = "whitening",
        impl: str = "auto",
        activation: str | None = None,
        correction: int = 0,
        shrinkage: float = 0.0,
        shuffle: bool = False,
    ) -> None:
        self._check_impl(impl)
        options: dict[str, Any] = {"group_size": group_size, "num_iters": num_iters, "running": running, "impl": impl}
        options |= {"activation": activation, "bias": bias}
        options |= {"correction": correction, "shrinkage": shrinkage, "shuffle": shuffle}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group
        self._agreed = None


class SyncDecorrelatedBatchNorm(Synchronized, _DecorrelatedBatchNorm):
    """Decorrelated batch normalization over the batches of all processes together: exact whitening.

    In training and eval it is to DecorrelatedBatchNorm what `SyncIterNorm` is to IterNorm, with the same arguments
    except that `solver` replaces `num_iters`.

    Args:
        num_features: C of an input ``[N, C, ...]`` of 2 to 5 dimensions.
        eps: added to the diagonal of the covariance.
        momentum: the share of the new batch in the running averages; None averages all batches alike.
        affine: learn a `weight` and a `bias` for each channel.
        track_running_stats: keep running averages; without them batch statistics are used in eval too, each rank's own.
        process_group: the processes to synchronize over; None is all of them.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: False learns no `bias`, only the `weight`, if `affine` is set.
        group_size: the number of channels whitened together; None is all of them.
        solver: "zca", "pca" or "cholesky".
        running: "whitening" or "covariance"; see `IterNorm2d`.
        impl: "auto", "triton", "native" or "torch".
        activation: None, or "relu": the output goes through it.
        correction: 1 divides the covariance by the number of values of all ranks minus one; 0 by their number.
        shrinkage: (1 - shrinkage) Σ + shrinkage I replaces the covariance Σ; from 0 to 1.
        shuffle: in training, put the channels into groups at random, the same on all ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        group_size: int | None = 16,
        solver: str = "zca",
        running: str = "whitening",
        impl: str = "auto",
        activation: str | None = None,
        correction: int = 0,
        shrinkage: float = 0.0,
        shuffle: bool = False,
    ) -> None:
        self._check_impl(impl)
        options: dict[str, Any] = {"group_size": group_size, "solver": solver, "running": running, "impl": impl}
        options |= {"activation": activation, "bias": bias}
        options |= {"correction": correction, "shrinkage": shrinkage, "shuffle": shuffle}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group
        self._agreed = None
