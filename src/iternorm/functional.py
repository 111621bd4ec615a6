"""Public functions: check the arguments, choose the implementation, nothing else.

The signatures follow `torch.nn.functional.batch_norm`. ``impl="auto"`` takes the Triton kernels on CUDA tensors in
half, bfloat16 or single precision, for Newton's iteration with groups of up to 1024 channels (above that, and where
cuBLAS is faster, for the iteration itself), and for ZCA with groups of up to 64, which they compute by that iteration
run to convergence. They need an NVIDIA GPU of compute capability 8.0 or above, and triton 3.5. On the CPU it takes C
kernels for training in single and double precision, where the machine has a C compiler and they are faster. It takes
the torch path for the rest.
``impl="native"`` is the C kernels, and ``impl="torch"`` never takes them. ``impl="reference"`` is the paper written
plainly. An implementation that is named and cannot run raises.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from iternorm import collective, fused, groups, ops, plain, reference
from iternorm.native import build, verbs

IMPLS = ("auto", "triton", "native", "torch", "reference")
ACTIVATIONS = ("relu",)


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
) -> Tensor:
    """Iterative normalization: whiten each group of channels by `num_iters` Newton steps, scale and shift.

    With ``training=True`` the statistics are those of the batch, and the running ones, where given, are updated in
    place; a batch with a NaN or an infinity leaves them as they are. Otherwise the running statistics are used.

    Statistics and products are fp32 for half and bfloat16 input, fp64 for fp64.

    Args:
        input: ``[N, C, ...]``, floating point, contiguous or channels_last.
        running_mean: ``[C]``.
        running_whitening: ``[G, d, d]``, the average of the whitening matrices (the paper's running estimate).
        weight: ``[C]``, the scale.
        bias: ``[C]``, the shift.
        training: use the statistics of the batch.
        momentum: the share of the new value in a running statistic; None is the cumulative average, for which
            `num_batches_tracked` is needed.
        eps: added to the diagonal of the covariance.
        running_covariance: ``[G, d, d]``, in place of `running_whitening`: the average of the covariances.
        num_batches_tracked: a counter of batches, counted up on its device.
        group_size: channels whitened together, the last group holding the remainder; None is all of them.
        num_iters: the paper's T, from 0.
        impl: "auto", "triton", "native", "torch" or "reference".
        activation: None, or "relu": the output goes through it. The kernels do that in passing, which saves reading and
            writing the activation once more.

    Example:
        >>> x = torch.randn(32, 8, 4, 4)
        >>> y = iter_norm(x, training=True, group_size=4)
        >>> y.shape
        torch.Size([32, 8, 4, 4])
    """
    check_num_iters(num_iters)
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
) -> Tensor:
    """Decorrelated batch normalization: whiten each group of channels exactly, scale and shift.

    As `iter_norm`, with `solver` "zca" (the paper's DBN), "pca" or "cholesky" in place of the Newton iteration.
    """
    check_solver(solver)
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
) -> Tensor:
    check_input(x)
    check_group_size(group_size)
    check_eps(eps)
    check_momentum(momentum)
    check_impl(impl)
    check_activation(activation)
    num_features = x.shape[1]
    size = groups.effective_size(num_features, group_size)
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
        statistics = ops.Running(
            running_mean, running_matrix, num_batches_tracked, momentum, running_covariance is not None
        )
    impl = choose_impl(impl, x, size, solver)
    return normalize(x, statistics, weight, bias, training, eps, size, solver, num_iters, impl, activation)


def normalize(
    x: Tensor,
    statistics: ops.Running | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
    group_size: int,
    solver: str,
    num_iters: int,
    impl: str,
    activation: str | None = None,
    process_group: collective.Group | None = None,
) -> Tensor:
    """What a layer calls, its arguments checked.

    `group_size` is that of a full group (`groups.effective_size`), `impl` what `choose_impl` says. With a process group
    the statistics are those of the batches of all its ranks.
    """
    if not training and statistics is not None:
        with torch.no_grad():
            dtype = plain.compute_dtype(x.dtype)
            whitening, mean = statistics.matrix.to(dtype), statistics.mean.to(dtype)
            if statistics.is_covariance:
                whitening, _ = ops.inverse_sqrt(whitening, x.shape[1], group_size, solver, num_iters, eps)
        if impl == "triton" and fused.can_infer(x, weight, bias):
            return fused.infer_fused(x, whitening, mean, weight, bias, group_size, activation is not None)
        return _activated(apply(x, whitening, mean, weight, bias, group_size), activation)

    if process_group is None and x.numel() // x.shape[1] <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {list(x.shape)}; "
            "use a larger batch, or eval mode"
        )
    if impl == "triton":
        settings = fused.Settings(group_size, solver, num_iters, eps, activation is not None)
        return fused.whiten_fused(x, weight, bias, settings, statistics)
    if impl == "reference":
        y, mean, covariance, whitening = _reference(x, weight, bias, group_size, solver, num_iters, eps)
    else:
        if impl == "auto" and fused.has_large_newton(x, group_size, solver, num_iters):
            solver = "newton_triton"
        y, mean, covariance, whitening = ops.whiten(
            x, weight, bias, group_size, solver, num_iters, eps, process_group, impl
        )
    if statistics is not None:
        ops.update_running(statistics, mean, covariance, whitening)
    return _activated(y, activation)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    return y if activation is None else F.relu(y)


def apply(
    x: Tensor, whitening: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """The third verb on given statistics, as one grouped 1x1 convolution (one more for a smaller last group).

    Built of ordinary operators, so that it exports, and differentiable in everything but the statistics.
    """
    spatial = max(x.ndim - 2, 1)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    dtype = plain.compute_dtype(x.dtype)
    with ops.no_autocast(x):
        matrix, offset = ops.fold_affine(whitening, mean, weight, bias, group_size)
        activation = (x.unsqueeze(2) if x.ndim == 2 else x).to(dtype)
        parts = groups.parts(x.shape[1], group_size)
        operands = [(activation, matrix, offset)]
        if len(parts) > 1:
            # Inductor of torch 2.6 to 2.9 cannot lower a convolution of a slice on the CPU, and removes some copies of
            # slices. A product it keeps. Eager convolutions copy a slice anyway.
            operands = [(activation[:, p.channels] * 1, p.of(matrix) * 1, offset[p.channels] * 1) for p in parts]
        outputs = [
            convolve(values, weights.reshape(-1, part.size, *(1,) * spatial), shift, groups=part.count)
            for part, (values, weights, shift) in zip(parts, operands, strict=True)
        ]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    if x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous():
        # A grouped conv3d on the CPU returns contiguous memory; a no-op where it kept the input's format.
        y = y.contiguous(memory_format=torch.channels_last_3d)
    return (y.squeeze(2) if x.ndim == 2 else y).to(x.dtype)


def _reference(x, weight, bias, group_size, solver, num_iters, eps):
    solve = getattr(reference, solver)
    whitened, mean, matrices = reference.whiten(
        x.to(plain.compute_dtype(x.dtype)),
        (lambda covariance: solve(covariance, num_iters)) if solver == "newton" else solve,
        group_size,
        eps,
    )
    y = reference.scale_and_shift(whitened, weight, bias).to(x.dtype)
    parts = groups.parts(x.shape[1], group_size)
    whitening = groups.pad([torch.stack(matrices[p.first : p.first + p.count]) for p in parts])
    covariance = plain.moments(x.detach(), group_size)[1]
    return y, mean.detach(), covariance, whitening.detach()


def check_impl(impl: str) -> None:
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not known; choose one of {', '.join(map(repr, IMPLS))}")


def check_activation(activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f'activation={activation!r} is not known; use "relu", or None and a module after the layer')


def choose_impl(
    impl: str, x: Tensor, group_size: int, solver: str, process_group: collective.Group | None = None
) -> str:
    """What `impl` means for this input: "auto" is the Triton kernels, or left to the verbs (see `iternorm.ops`).

    The Triton kernels do not know a process group.
    """
    if process_group is not None and impl != "native":
        return "auto" if impl == "auto" else "torch"
    if impl == "triton":
        reason = fused.no_kernels(x, group_size, solver)
        if reason is not None:
            raise ValueError(f'impl="triton" cannot run: {reason}; use impl="auto"')
    if impl == "native":
        reason = verbs.unsupported(x)
        # A compiler of graphs cannot look into building; then it is the call that raises.
        if reason is None and not torch.compiler.is_compiling():
            reason = build.failure(x.dtype)
        if reason is not None:
            raise ValueError(f'impl="native" cannot run: {reason}; use impl="auto"')
    if impl == "auto":
        return "triton" if x.is_cuda and fused.are_kernels_best(x, group_size, solver) else "auto"
    return impl


def check_input(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"input must be a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"input has dtype {x.dtype}; convert it to a floating-point dtype, e.g. input.float()")
    if not 2 <= x.ndim <= 5:
        raise ValueError(f"expected an input of 2 to 5 dimensions [N, C, ...], got {x.ndim}: shape {list(x.shape)}")
    if x.shape[1] == 0:
        raise ValueError(f"input has no channels: shape {list(x.shape)}; the second dimension must be at least 1")


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_group_size(group_size: int | None) -> None:
    if group_size is None:
        return
    if not _is_integer(group_size):
        raise TypeError(f"group_size={group_size!r} is not an integer; give the number of channels a group, or None")
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1; use None to whiten all channels together")


def check_num_iters(num_iters: int) -> None:
    if not _is_integer(num_iters):
        raise TypeError(f"num_iters={num_iters!r} is not an integer; give the number of Newton steps, 5 by default")
    if num_iters < 0:
        raise ValueError(f"num_iters={num_iters} must be at least 0; the paper uses 5")


def check_solver(solver: str) -> None:
    if solver not in ("zca", "pca", "cholesky"):
        raise ValueError(f"solver={solver!r} is not known; choose one of 'zca', 'pca', 'cholesky'")


def check_eps(eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps={eps!r} is not a number; give a small positive one, 1e-5 by default")
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps={eps} must be positive and finite; it keeps the covariance invertible, 1e-5 by default")


def check_momentum(momentum: float | None) -> None:
    if momentum is None:
        return
    if isinstance(momentum, bool) or not isinstance(momentum, (int, float)):
        raise TypeError(f"momentum={momentum!r} is not a number; give one from 0 to 1, or None for the average of all")
    if not 0 <= momentum <= 1:
        raise ValueError(f"momentum={momentum} must be from 0 to 1; None is the average of all batches")
