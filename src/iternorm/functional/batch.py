"""Whitening over a batch, with the signature of `torch.nn.functional.batch_norm`."""

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from iternorm.whitening import groups, validation
from iternorm.whitening.normalize import normalize
from iternorm.whitening.settings import Running, Settings


def iter_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_whitening: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    running_covariance: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    group_size: int | None = 64,
    num_iters: int = 5,
    impl: str = "auto",
    activation: str | None = None,
    residual: Tensor | None = None,
    correction: int = 0,
    shrinkage: float = 0.0,
) -> Tensor:
    """Iterative normalization: whiten each group of channels by `num_iters` Newton steps, scale and shift.

    With ``training=True`` the statistics are those of the batch, and the running ones, where given, are updated in
    place; a batch with a NaN or an infinity leaves them as they are. Otherwise the running statistics are used.

    Statistics and products are fp32 for half and bfloat16 input, fp64 for fp64.

    Args:
        input: ``[N, C, ...]``, floating point. Other memory than contiguous and channels_last may be copied first.
        running_mean: ``[C]``.
        running_whitening: ``[G, d, d]``, the average of the whitening matrices (the paper's running estimate).
        weight: ``[C]``, the scale.
        bias: ``[C]``, the shift.
        training: use the statistics of the batch.
        momentum: the share of the new value in a running statistic; None is the cumulative average, for which
            `num_batches_tracked` is needed.
        eps: added to the diagonal of the covariance. With 0, a group without full rank may give NaN.
        running_covariance: ``[G, d, d]``, in place of `running_whitening`: the average of the covariances.
        num_batches_tracked: a counter of batches, counted up on its device.
        group_size: channels whitened together, the last group holding the remainder; None is all of them.
        num_iters: the paper's T, from 0. A large T is ZCA: at most 24 steps are taken in fp32, and 49 in fp64, which
            is convergence. A group whose channels depend on each other may stop earlier, where it would diverge.
        impl: "auto", "triton", "native", "torch" or "reference".
        activation: None, or "relu", which is applied to the output. The kernels fuse it, which saves a read and a write
            of the activation.
        residual: of the input's shape; added to the output before the activation. The kernels fuse it too.
        correction: 1 divides the covariance by the number of values minus one, as `torch.cov` does; 0 by their number.
        shrinkage: (1 - shrinkage) Σ + shrinkage I replaces the covariance Σ; from 0 to 1.

    Example:
        >>> import torch
        >>> x = torch.randn(32, 8, 4, 4)
        >>> y = iter_norm(x, training=True, group_size=4)
        >>> y.shape
        torch.Size([32, 8, 4, 4])
    """
    tensors = (input, running_mean, running_whitening, weight, bias, running_covariance, num_batches_tracked, residual)
    if has_torch_function(tensors):
        return handle_torch_function(
            iter_norm,
            tensors,
            input,
            running_mean,
            running_whitening,
            weight,
            bias,
            training,
            momentum,
            eps,
            running_covariance=running_covariance,
            num_batches_tracked=num_batches_tracked,
            group_size=group_size,
            num_iters=num_iters,
            impl=impl,
            activation=activation,
            residual=residual,
            correction=correction,
            shrinkage=shrinkage,
        )
    num_iters = validation.check_num_iters(num_iters)
    return _normalize(
        input,
        running_mean,
        running_whitening,
        running_covariance,
        num_batches_tracked,
        weight,
        bias,
        training,
        momentum,
        eps,
        group_size,
        "newton",
        num_iters,
        impl,
        activation,
        residual,
        correction,
        shrinkage,
    )


def decorrelated_batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_whitening: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    running_covariance: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    group_size: int | None = 16,
    solver: str = "zca",
    impl: str = "auto",
    activation: str | None = None,
    residual: Tensor | None = None,
    correction: int = 0,
    shrinkage: float = 0.0,
) -> Tensor:
    """Decorrelated batch normalization: whiten each group of channels exactly, scale and shift.

    As `iter_norm`, with `solver` "zca" (the paper's DBN), "pca" or "cholesky" in place of the Newton iteration.
    """
    tensors = (input, running_mean, running_whitening, weight, bias, running_covariance, num_batches_tracked, residual)
    if has_torch_function(tensors):
        return handle_torch_function(
            decorrelated_batch_norm,
            tensors,
            input,
            running_mean,
            running_whitening,
            weight,
            bias,
            training,
            momentum,
            eps,
            running_covariance=running_covariance,
            num_batches_tracked=num_batches_tracked,
            group_size=group_size,
            solver=solver,
            impl=impl,
            activation=activation,
            residual=residual,
            correction=correction,
            shrinkage=shrinkage,
        )
    validation.check_solver(solver)
    return _normalize(
        input,
        running_mean,
        running_whitening,
        running_covariance,
        num_batches_tracked,
        weight,
        bias,
        training,
        momentum,
        eps,
        group_size,
        solver,
        0,
        impl,
        activation,
        residual,
        correction,
        shrinkage,
    )


def _normalize(
    x: Tensor,
    running_mean: Tensor | None,
    running_whitening: Tensor | None,
    running_covariance: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    group_size: int | None,
    solver: str,
    num_iters: int,
    impl: str,
    activation: str | None,
    residual: Tensor | None,
    correction: int,
    shrinkage: float,
) -> Tensor:
    validation.check_input(x)
    validation.check_residual(residual, x)
    group_size = validation.check_group_size(group_size)
    momentum = validation.check_momentum(momentum)
    validation.check_impl(impl)
    validation.check_activation(activation)
    num_features = x.shape[1]
    size = groups.effective_size(num_features, group_size)
    eps, correction = validation.check_eps(eps), validation.check_correction(correction)
    shrinkage = validation.check_shrinkage(shrinkage)
    settings = Settings(size, solver, num_iters, eps, activation, impl, None, correction, shrinkage)
    matrix_shape = (groups.num_groups(num_features, group_size), size, size)
    for name, tensor, shape in (
        ("running_mean", running_mean, (num_features,)),
        ("running_whitening", running_whitening, matrix_shape),
        ("running_covariance", running_covariance, matrix_shape),
        ("weight", weight, (num_features,)),
        ("bias", bias, (num_features,)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; an input of {num_features} channels with "
                f"group_size={group_size} needs {list(shape)}"
            )
    if running_whitening is not None and running_covariance is not None:
        raise ValueError("running_whitening and running_covariance are both given; give the one the layer keeps")
    running_matrix = running_covariance if running_whitening is None else running_whitening
    if (running_mean is None) != (running_matrix is None):
        raise ValueError("running_mean and running_whitening (or running_covariance) go together; give both or neither")

    if not training and running_mean is None:
        raise ValueError("training=False needs running_mean and running_whitening; give them, or training=True")
    if momentum is None and training and running_mean is not None and num_batches_tracked is None:
        raise ValueError("momentum=None is the cumulative average and needs num_batches_tracked; give it, or a number")
    statistics = None
    if running_mean is not None and running_matrix is not None:
        statistics = Running(
            running_mean, running_matrix, num_batches_tracked, momentum, running_covariance is not None
        )
    return normalize(x, weight, bias, settings, statistics, training, residual=residual)
