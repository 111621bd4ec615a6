"""The base of all layers, with the whole contract of `torch.nn.BatchNorm1d/2d/3d`."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from iternorm.backends.torch.verbs import compute_dtype
from iternorm.layers import checkpoints
from iternorm.layers.batchnorm import BatchNormWithoutVariance
from iternorm.whitening import dispatch, fused, groups, modes, validation
from iternorm.whitening.autograd import inverse_sqrt
from iternorm.whitening.dispatch import Backend
from iternorm.whitening.normalize import normalize
from iternorm.whitening.processes import synchronized
from iternorm.whitening.settings import Running, Settings

RUNNING = ("whitening", "covariance")


class SmallBatchWarning(UserWarning):
    """A batch has fewer values per channel than a group has channels, so its covariance is singular."""


class WhiteningNorm(BatchNormWithoutVariance):
    """Whiten groups of channels over the mini-batch, then scale and shift: the base of all layers here.

    In training the statistics are those of the batch (math.md, Eq. 1-4), and running averages of the mean and of the
    whitening matrix (or of the covariance) are kept, as the paper does: they start at 0 and at the identity. In eval
    the running averages are used. A batch that holds a NaN or an infinity leaves them unchanged.

    Statistics and accumulation are fp32 for half and bfloat16 input and fp64 for fp64; gradients are exact, in
    training and in eval, and twice differentiable.

    It is a `torch.nn.modules.batchnorm._BatchNorm`, so that tools which look for that class find it, and it has no
    `running_var`, so that those which would take it for a BatchNorm fail (docs/tools.md).

    Args:
        num_features: C of an input ``[N, C, ...]``.
        eps: added to the diagonal of the covariance.
        momentum: the share of the new batch in the running averages; None averages all batches alike.
        affine: learn a `weight` and a `bias` for each channel.
        track_running_stats: keep running averages; without them batch statistics are used in eval too.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: False learns no `bias`, only the `weight`, if `affine` is set.
        group_size: the number of channels whitened together; None is all of them. Channels are taken in order and the
            last group holds the remainder: 160 channels by 64 are groups of 64, 64 and 32. With 1 the layer is
            BatchNorm in training; in eval it uses the average of 1/σ (biased) where BatchNorm uses that of σ²
            (unbiased), which scales the output by about 1 + 5/(4m) for m values per channel in a batch.
        running: "whitening" averages the whitening matrices, as the paper does; "covariance" averages the covariances
            and computes the whitening matrix from their average in eval.
        impl: "auto" takes the fastest that can run; "triton", "native" (C, on a CPU), "torch" and "reference" ask for
            one by name and raise where it cannot run. See `iternorm.functional`.
        activation: None, or "relu": the output goes through it, which on a GPU saves a pass over the activation.
        correction: 1 divides the covariance by the number of values less one, as `torch.cov` does; 0 by their number.
        shrinkage: (1 - shrinkage) Σ + shrinkage I takes the place of the covariance Σ; from 0 to 1.
        shuffle: in training, put the channels into groups at random, anew for each batch (Hua et al., ICCV 2021). No
            group is the same for long, so it goes with ``track_running_stats=False``.
    """

    _version = 1
    __constants__ = ("num_features", "eps", "momentum", "affine", "track_running_stats")

    num_features: int
    eps: float
    momentum: float | None
    affine: bool
    track_running_stats: bool
    group_size: int | None
    running: str
    impl: str
    activation: str | None = None
    correction: int = 0
    shrinkage: float = 0.0
    shuffle: bool = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_whitening: Tensor | None
    running_covariance: Tensor | None
    num_batches_tracked: Tensor | None

    # The solver of `iternorm.solvers`, and its number of steps where it has one.
    solver: str
    num_iters: int = 0

    # Whether this layer has warned of a small batch: it does so once.
    _warned: bool = False
    # The options that were checked last, and what follows from them.
    _checked: tuple | None = None
    _matrix_shape: tuple[int, int, int] = (0, 0, 0)
    _settings: Settings
    # `_cache_key` of the last batch that went to the fused kernels, what was asked of them, and what they remember.
    _last_key: tuple | None = None
    _last_settings: Settings
    _repeated: fused.Repeated

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        group_size: int | None = 64,
        running: str = "whitening",
        impl: str = "auto",
        activation: str | None = None,
        correction: int = 0,
        shrinkage: float = 0.0,
        shuffle: bool = False,
    ) -> None:
        # BatchNorm's own would make a running_var.
        nn.Module.__init__(self)
        num_features = validation.integer("num_features", num_features, "the number of channels")
        if num_features < 1:
            raise ValueError(f"num_features={num_features} must be at least 1; give the number of channels")
        if running not in RUNNING:
            raise ValueError(f"running={running!r} is not known; choose one of {', '.join(map(repr, RUNNING))}")
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.group_size = group_size
        self.running = running
        self.impl = impl
        self.activation = activation
        self.correction = correction
        self.shrinkage = shrinkage
        self.shuffle = shuffle
        self._check_attributes()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, learned in (("weight", affine), ("bias", affine and bias)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_features, **factory)) if learned else None)
        tracked = ("running_mean", f"running_{running}", "num_batches_tracked")
        for name in ("running_mean", "running_whitening", "running_covariance", "num_batches_tracked"):
            self.register_buffer(name, None)
        if track_running_stats:
            matrix = torch.empty(self._matrix_shape, **factory)
            count = torch.tensor(0, dtype=torch.long, device=device)
            for name, value in zip(tracked, (torch.empty(num_features, **factory), matrix, count), strict=True):
                self.register_buffer(name, value)
        self.reset_parameters()

    @property
    def running_matrix(self) -> Tensor | None:
        """`running_whitening` or `running_covariance`, whichever this layer keeps."""
        return self.running_whitening if self.running == "whitening" else self.running_covariance

    @torch.no_grad()
    def reset_running_stats(self) -> None:
        """Mean 0, whitening (or covariance) the identity, no batches seen."""
        if self.running_mean is None or self.running_matrix is None or self.num_batches_tracked is None:
            return
        self.running_mean.zero_()
        ones = torch.ones_like(self.running_mean)
        self.running_matrix.copy_(torch.diag_embed(groups.pad_vector(ones, self.group_size)))
        self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, running statistics as new."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def whitening_matrix(self) -> Tensor:
        """The whitening matrices ``[G, d, d]`` that eval uses; the rest of a smaller last group is zero."""
        if self.running_matrix is None:
            raise ValueError(
                "this layer keeps no running statistics, so eval has no fixed whitening matrix; "
                "build it with track_running_stats=True"
            )
        matrix = self.running_matrix.detach().to(compute_dtype(self.running_matrix.dtype))
        if self.running == "whitening":
            return matrix
        if self._options() != self._checked:
            self._check_attributes()
        return inverse_sqrt(matrix, self.num_features, self._settings)[0]

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalize `input`, and add `residual`, which is like it, to the output before the activation."""
        if isinstance(input, Proxy):
            # A layer is one node of a traced graph, as torch's own layers are.
            tracer: Any = input.tracer
            more = {} if residual is None else {"residual": residual}
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), more)
        weight, bias, mean, matrix, count = self._tensors()
        training = self.training
        order = self._random_order(input) if self.shuffle and training else None
        if order is not None:
            validation.check_residual(residual, input)
            input = input.index_select(1, order)
            residual = None if residual is None else residual.index_select(1, order)
            weight, bias = (None if t is None else t[order] for t in (weight, bias))
        # As in BatchNorm: running statistics are updated in training if they are kept, and used in eval if they exist.
        batch_statistics = training or mean is None
        statistics = None
        if mean is not None and (self.track_running_stats or not batch_statistics):
            statistics = Running(mean, matrix, count, self.momentum, self.running == "covariance")
        # A compiler is not shown what changes from call to call: it would compile again.
        eager = not (modes.is_recorded(input) or modes.is_transformed())
        group = self._process_group(input) if training else None
        key = self._cache_key(input, weight, bias, mean, matrix, group) if eager else None
        if eager and key == self._last_key:
            # Same shape, dtype and settings as the last batch: the checks below have already passed.
            if residual is not None:
                validation.check_residual(residual, input)
            settings, repeated = self._last_settings, self._repeated
            if group is None:
                output = repeated.whiten(input, weight, bias, settings, statistics, residual)
            else:
                output = synchronized.whiten_eagerly(input, weight, bias, settings, statistics, residual, repeated)
            return _in_place(output, order)
        self._check(input, weight, bias, mean, matrix)
        validation.check_residual(residual, input)
        settings = self._settings
        if group is not None:
            # Not `_replace`, which the compiler of torch 2.6 does not look into.
            size, solver, num_iters, eps, activation, impl, _, correction, shrinkage = settings
            settings = Settings(size, solver, num_iters, eps, activation, impl, group, correction, shrinkage)
        if eager and batch_statistics and group is None and not self._warned:
            self._warn_of_few_values(input, settings.group_size)
        backend = dispatch.choose(settings, input)
        output = normalize(input, weight, bias, settings, statistics, batch_statistics, backend, residual)
        if backend is Backend.TRITON and training and eager:
            self._last_key, self._last_settings, self._repeated = key, settings, fused.Repeated()
        return _in_place(output, order)

    def _cache_key(self, input: Tensor, weight, bias, mean, matrix, group) -> tuple:
        """All that `_check` looks at, and that the choice of a backend depends on."""
        return (
            input.shape,
            input.dtype,
            input.device,
            None if weight is None else weight.numel(),
            None if bias is None else bias.numel(),
            None if mean is None else mean.numel(),
            None if matrix is None else matrix.shape,
            self.training,
            self._options(),
            group,
        )

    def _check(self, input: Tensor, weight, bias, mean, matrix) -> None:
        validation.check_input(input)
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected an input of {self.num_features} channels (num_features), got {input.shape[1]}: "
                f"shape {list(input.shape)}"
            )
        if self._options() != self._checked:
            self._check_attributes()
        for name, vector in (("weight", weight), ("bias", bias), ("running_mean", mean)):
            if vector is not None and vector.numel() != self.num_features:
                raise ValueError(
                    f"{name} has shape {list(vector.shape)}; {self.num_features} channels need [{self.num_features}]"
                )
        if mean is not None and matrix is None:
            raise ValueError(
                f"running={self.running!r}, but this layer was built with another and keeps no running_{self.running}; "
                f"build it with running={self.running!r}"
            )
        if matrix is not None and matrix.shape != self._matrix_shape:
            raise ValueError(
                f"running_{self.running} has shape {list(matrix.shape)}; {self.num_features} channels with "
                f"group_size={self.group_size} need {list(self._matrix_shape)}"
            )

    def _warn_of_few_values(self, input: Tensor, group_size: int) -> None:
        values = input.numel() // self.num_features
        # One value has no variance at all, which is an error and not a warning.
        if 1 < values < group_size:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}({self.num_features}) whitens groups of {group_size} channels, but this batch "
                f"has only {values} values per channel (input of shape {list(input.shape)}): the covariance is "
                f"singular, and what it says of most directions is noise. Use a group_size well below {values}, a "
                "larger batch, or SyncIterNorm over several processes",
                SmallBatchWarning,
                stacklevel=3,
            )

    def _tensors(self) -> tuple[Tensor | None, ...]:
        """Weight, bias, running mean, running matrix and the counter of batches."""
        matrix = "running_whitening" if self.running == "whitening" else "running_covariance"
        parameters, buffers = self._parameters, self._buffers
        try:
            # A module's own search for an attribute takes ten times as long.
            values = parameters["weight"], parameters["bias"], buffers["running_mean"], buffers[matrix]
            return *values, buffers["num_batches_tracked"]
        except KeyError:
            # A parametrization, or a replica on another GPU, has it in another place.
            values = self.weight, self.bias, self.running_mean, self.running_matrix
            return *values, self.num_batches_tracked

    def _process_group(self, input: Tensor) -> Any:
        """The processes whose batches are one: none here; `iternorm.SyncIterNorm` has its own."""
        return None

    def _random_order(self, input: Tensor) -> Tensor:
        """A permutation of the channels."""
        return torch.rand(input.shape[1], device=input.device).argsort()

    def _check_input_dim(self, input: Tensor) -> None:
        raise NotImplementedError

    def _check_attributes(self) -> None:
        """When the layer is made, and again where one of them has been set since. They become Python's own numbers."""
        self.eps = validation.check_eps(self.eps)
        self.momentum = validation.check_momentum(self.momentum)
        self.group_size = validation.check_group_size(self.group_size)
        self.num_iters = validation.check_num_iters(self.num_iters)
        validation.check_impl(self.impl)
        validation.check_activation(self.activation)
        size = groups.effective_size(self.num_features, self.group_size)
        self._matrix_shape = (groups.num_groups(self.num_features, self.group_size), size, size)
        self.correction = validation.check_correction(self.correction)
        self.shrinkage = validation.check_shrinkage(self.shrinkage)
        if self.shuffle and self.track_running_stats:
            raise ValueError(
                "shuffle=True makes new groups for each batch, so there is nothing to average over batches; "
                "use track_running_stats=False"
            )
        settings = Settings(size, self.solver, self.num_iters, self.eps, self.activation, self.impl)
        self._settings = settings._replace(correction=self.correction, shrinkage=self.shrinkage)
        self._checked = self._options()

    def _options(self) -> tuple:
        """The attributes that a user may set between two batches."""
        numbers = self.num_features, self.eps, self.momentum, self.group_size, self.num_iters
        return *numbers, self.solver, self.impl, self.activation, self.correction, self.shrinkage, self.shuffle

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, group_size={self.group_size}, {self._solver_repr()}, "
            f"running={self.running!r}"
            + (", bias=False" if self.affine and self.bias is None else "")
            + (f", activation={self.activation!r}" if self.activation else "")
            + (f", correction={self.correction}" if self.correction else "")
            + (f", shrinkage={self.shrinkage}" if self.shrinkage else "")
            + (", shuffle=True" if self.shuffle else "")
        )

    def _solver_repr(self) -> str:
        return f"solver={self.solver!r}"

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        assigned = bool(local_metadata.get("assign_to_params_buffers", False))
        translated = checkpoints.translate(self, own, assigned=assigned)
        for name, value in translated.items():
            expected = getattr(self, name, None)
            if isinstance(expected, Tensor) and isinstance(value, Tensor) and value.shape != expected.shape:
                raise checkpoints.StateDictError(
                    f"state_dict[{prefix + name!r}] has shape {list(value.shape)}, this layer has "
                    f"{list(expected.shape)}; build the layer with the num_features ({self.num_features} here) and "
                    f"group_size ({self.group_size} here) of the saved one"
                )
        # The caller's dict may be shared between layers: what was translated goes into a copy.
        renamed = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
        renamed.update({prefix + name: value for name, value in translated.items()})
        # Not BatchNorm's own, which adds a count of batches to what it is given.
        nn.Module._load_from_state_dict(
            self, renamed, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _in_place(output: Tensor, order: Tensor | None) -> Tensor:
    """Channels back where they were before they were put into `order`."""
    return output if order is None else output.index_select(1, order.argsort())
