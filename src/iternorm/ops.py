"""The normalization of a batch as one differentiable function: moments, inverse_sqrt, apply, and their backward.

`whiten` joins the three verbs with an analytic backward (docs/math.md, section 5) that saves the input and small
matrices. The verbs that touch the activation are torch.library operators with a schema and a fake, so that
`torch.compile` and `torch.export` see four opaque calls in place of loops over tiles; eager code calls them directly.
Each of them is computed in C (`iternorm.native`) or by torch (`iternorm.plain`), which `impl` decides: see `_verbs`.
"""

from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from iternorm import collective, groups, plain, running, solvers
from iternorm.native import verbs as native


def _verbs(impl: str, group_size: int, *activations: Tensor) -> ModuleType:
    """Where the four verbs are, for these activations.

    "torch" is `plain`. "auto" is the C kernels where they can be built and are faster. "native" is the C kernels, which
    raise where they cannot be built; what comes in another memory format than the kernels read stays with torch.
    """
    x = activations[-1]
    if impl == "auto":
        return native if native.is_worthwhile(x, group_size) and native.can_run(*activations) else plain
    return native if impl == "native" and native.can_read(*activations) else plain


@torch.library.custom_op("iternorm::moments", mutates_args=())
def _moments_op(x: Tensor, group_size: int, impl: str = "torch") -> tuple[Tensor, Tensor]:
    with no_autocast(x):
        return _verbs(impl, group_size, x).moments(x, group_size)


@_moments_op.register_fake
def _(x, group_size, impl="torch"):
    dtype = plain.compute_dtype(x.dtype)
    return x.new_empty(x.shape[1], dtype=dtype), _matrices_like(x, group_size, dtype)


@torch.library.custom_op("iternorm::cross_moments", mutates_args=())
def _cross_moments_op(
    grad: Tensor, x: Tensor, mean: Tensor, group_size: int, impl: str = "torch"
) -> tuple[Tensor, Tensor]:
    with no_autocast(x):
        return _verbs(impl, group_size, grad, x).cross_moments(grad, x, mean, group_size)


@_cross_moments_op.register_fake
def _(grad, x, mean, group_size, impl="torch"):
    return torch.empty_like(mean), _matrices_like(x, group_size, mean.dtype)


@torch.library.custom_op("iternorm::affine", mutates_args=())
def _affine_op(x: Tensor, matrix: Tensor, offset: Tensor, group_size: int, impl: str = "torch") -> Tensor:
    with no_autocast(x):
        return _verbs(impl, group_size, x).affine(x, matrix, offset, group_size)


@_affine_op.register_fake
def _(x, matrix, offset, group_size, impl="torch"):
    return plain.empty_output(x)


@torch.library.custom_op("iternorm::affine_pair", mutates_args=())
def _affine_pair_op(
    grad: Tensor, x: Tensor, first: Tensor, second: Tensor, offset: Tensor, group_size: int, impl: str = "torch"
) -> Tensor:
    with no_autocast(x):
        return _verbs(impl, group_size, grad, x).affine_pair(grad, x, first, second, offset, group_size)


@_affine_pair_op.register_fake
def _(grad, x, first, second, offset, group_size, impl="torch"):
    return plain.empty_output(x)


def _matrices_like(x: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    size = groups.effective_size(x.shape[1], group_size)
    return x.new_empty(groups.num_groups(x.shape[1], group_size), size, size, dtype=dtype)


def no_autocast(x: Tensor):
    """Autocast would turn the products of fp32 statistics into half precision."""
    # The meta device knows no autocast.
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


class Running(NamedTuple):
    """Running statistics to update: mean ``[C]``, whitening or covariance ``[G, d, d]``, the counter of batches."""

    mean: Tensor
    matrix: Any  # a tensor
    num_batches: Tensor | None
    momentum: float | None
    is_covariance: bool


def update_running(statistics: Running, mean: Tensor, covariance: Tensor, whitening: Tensor) -> None:
    value = covariance if statistics.is_covariance else whitening
    running.update(statistics.mean, statistics.matrix, statistics.num_batches, mean, value, statistics.momentum)


def whiten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    solver: str,
    num_iters: int,
    eps: float,
    process_group: collective.Group | None = None,
    impl: str = "torch",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whiten a batch, scale and shift. With a process group, the batch is that of all its ranks together.

    `impl` is "torch", "auto" or "native": see `_verbs`.

    Returns:
        The output, and without gradient the mean ``[C]``, the covariance (without eps) and the whitening matrices
        ``[G, d, d]`` of the batch.
    """
    if torch.compiler.is_compiling() and _is_exporting_in_torch_2_6():
        # It cannot export an autograd.Function with a dynamic batch. Without a gradient it sees only the forward, which
        # is all that an exported program has in any version.
        x, (weight, bias) = x.detach(), (t if t is None else t.detach() for t in (weight, bias))
    args = (x, weight, bias, group_size, solver, num_iters, eps, process_group, impl)
    return _Whiten.apply(*args)  # pyright: ignore[reportReturnType]


def _is_exporting_in_torch_2_6() -> bool:
    # Later ones have the question that this one answers by itself.
    if hasattr(torch.compiler, "is_exporting"):
        return False
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().export


# What torch.compiler.assume_constant_result sets, without the import of torch._dynamo: called, not traced.
_is_exporting_in_torch_2_6._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group_size, solver, num_iters, eps, process_group, impl):
        with no_autocast(x):
            num_samples, mean, covariance = _batch_moments(x, group_size, process_group, impl)
            keep = ctx.needs_input_grad[0] and _is_cheap_to_keep(covariance, num_iters, x)
            whitening, solved = inverse_sqrt(covariance, x.shape[1], group_size, solver, num_iters, eps, keep)
            matrix, offset = fold_affine(whitening, mean, weight, bias, group_size)
            y = torch.empty_like(x) if _is_empty(x) else _call(_affine_op, x, matrix, offset, group_size, impl)
        ctx.save_for_backward(x, weight, bias, mean, whitening, num_samples, *(t for state in solved for t in state))
        ctx.mark_non_differentiable(mean, covariance, whitening)
        # Else autograd would fill zeros for the three of them.
        ctx.set_materialize_grads(False)
        ctx.num_parts = len(solved)
        ctx.config = group_size, solver, num_iters, eps
        ctx.process_group, ctx.impl = process_group, impl
        return y, mean, covariance, whitening

    @staticmethod
    def backward(ctx, grad, *_unused):  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 9
        x, weight, bias, mean, whitening, num_samples, *state = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if ctx.process_group:
                raise RuntimeError(
                    "a graph of the backward (create_graph=True) does not reach over processes; "
                    "use IterNorm in place of SyncIterNorm where second derivatives are needed"
                )
            return *differentiable_backward(grad, (x, weight, bias), needs, ctx.config), *(None,) * 6
        group_size = ctx.config[0]
        num_features = x.shape[1]
        grad_x = grad_weight = grad_bias = None
        with no_autocast(x):
            grad_sum, cross = _batch_cross_moments(grad, x, mean, group_size, ctx.impl)
            if needs[1]:
                grad_weight = groups.unpad_vector((cross * whitening).sum(-1), num_features).to(weight.dtype)
            if needs[2]:
                grad_bias = grad_sum.to(bias.dtype)
            if needs[0]:
                each = len(state) // ctx.num_parts
                solved = [tuple(state[i * each : (i + 1) * each]) for i in range(ctx.num_parts)]
                if ctx.process_group:
                    # The gradients of weight and bias stay those of this rank, as in SyncBatchNorm: DDP averages them.
                    grad_sum, cross = collective.global_sums(grad_sum, cross, ctx.process_group)
                else:
                    num_samples = x.numel() // num_features
                grad_whitening = _scale_rows(cross, weight, group_size)
                grad_covariance = inverse_sqrt_backward(grad_whitening, whitening, solved, x, ctx.config)
                second = grad_covariance * (2 / num_samples)
                first = _scale_rows(whitening, weight, group_size).mT
                offset = _on_vector(first, grad_sum, group_size) / -num_samples - _on_vector(second, mean, group_size)
                if _is_empty(x):
                    grad_x = torch.empty_like(x)
                else:
                    grad_x = _call(_affine_pair_op, grad, x, first, second, offset, group_size, ctx.impl)
        return grad_x, grad_weight, grad_bias, *(None,) * 6


def _is_empty(x: Tensor) -> bool:
    """Only a rank among others can have no samples: it takes part in the collectives and has nothing to compute."""
    return x.numel() == 0


def _batch_moments(x: Tensor, group_size: int, process_group: collective.Group | None, impl: str):
    """Mean and covariance of the batch, over all ranks where there is a process group, and then their global count."""
    if _is_empty(x):
        dtype = plain.compute_dtype(x.dtype)
        mean, covariance = x.new_zeros(x.shape[1], dtype=dtype), _matrices_like(x, group_size, dtype).zero_()
    else:
        mean, covariance = _call(_moments_op, x, group_size, impl)
    if process_group:
        return collective.global_moments(x.numel() // x.shape[1], mean, covariance, process_group)
    return None, mean, covariance


def _batch_cross_moments(grad: Tensor, x: Tensor, mean: Tensor, group_size: int, impl: str) -> tuple[Tensor, Tensor]:
    if _is_empty(x):
        # Zeros made of the gradient: a compiler would move a collective of constants into the forward.
        return plain.as_planes(grad).sum((0, 2)).to(mean.dtype), _matrices_like(x, group_size, mean.dtype).zero_()
    return _call(_cross_moments_op, grad, x, mean, group_size, impl)


def _call(op, *args):
    """An operator in eager mode is its Python function: the dispatcher is needed only where a graph is recorded."""
    return op(*args) if torch.compiler.is_compiling() else op._init_fn(*args)


def _is_cheap_to_keep(covariance: Tensor, num_iters: int, x: Tensor) -> bool:
    """Whether the iterates take little memory beside the activation, which is kept too, or little at all."""
    kept = 2 * (num_iters - 1) * covariance.numel() * covariance.element_size()
    return kept <= max(x.numel() * x.element_size() // 8, 1 << 20)


def inverse_sqrt(
    covariance: Tensor,
    num_features: int,
    group_size: int,
    solver: str,
    num_iters: int,
    eps: float,
    keep: bool = False,
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Whitening matrices ``[G, d, d]`` of covariances without eps, and what `inverse_sqrt_backward` needs by part."""
    matrices, solved = [], []
    for part in groups.parts(num_features, group_size):
        regularized = _regularized(part.of(covariance), eps)
        whitening, saved = solvers.solve(regularized, solver, num_iters, keep)
        matrices.append(whitening)
        solved.append((regularized, *saved))
    return groups.pad(matrices), solved


def inverse_sqrt_backward(grad, whitening, solved, x, config) -> Tensor:
    group_size, solver, num_iters, _ = config
    gradients = [
        solvers.solve_backward(part.of(grad), state[0], part.of(whitening), state[1:], solver, num_iters)
        for part, state in zip(groups.parts(x.shape[1], group_size), solved, strict=True)
    ]
    return groups.pad(gradients)


def fold_affine(
    whitening: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor]:
    """A ``[G, d, d]`` and c ``[C]`` of y = A x + c: A = diag(γ) W, c = β - A μ (math.md, Eq. 2)."""
    matrix = _scale_rows(whitening, weight, group_size)
    offset = -_on_vector(matrix, mean, group_size)
    return matrix, offset if bias is None else offset + bias.to(offset.dtype)


def _regularized(covariance: Tensor, eps: float) -> Tensor:
    return covariance + eps * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)


def _scale_rows(matrix: Tensor, weight: Tensor | None, group_size: int) -> Tensor:
    return matrix if weight is None else matrix * groups.pad_vector(weight.to(matrix.dtype), group_size)[:, :, None]


def _on_vector(matrix: Tensor, vector: Tensor, group_size: int) -> Tensor:
    product = matrix @ groups.pad_vector(vector, group_size)[:, :, None]
    return groups.unpad_vector(product, len(vector))


def differentiable_backward(grad, inputs, needs, config):
    """The gradients as differentiable functions of `grad` and the inputs, for a graph of the backward.

    The forward is written out once more from the input, in operations that autograd and `iternorm.solvers`
    differentiate, and differentiated with `create_graph`.
    """
    wanted = [t for t, needed in zip(inputs, needs, strict=True) if needed]
    with torch.enable_grad(), no_autocast(inputs[0]):
        y = differentiable_whiten(*inputs, *config)
        gradients = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return [next(gradients) if needed else None for needed in needs]


def differentiable_whiten(x, weight, bias, group_size, solver, num_iters, eps) -> Tensor:
    """`whiten` by a centred copy and batched products: differentiable to any order the solver is."""
    planes = plain.as_planes(x).to(plain.compute_dtype(x.dtype))
    outputs = []
    for part in groups.parts(x.shape[1], group_size):
        block = planes[:, part.channels].unflatten(1, (part.count, part.size))  # [N, G, d, L]
        centered = block - block.mean((0, 3), keepdim=True)
        samples = centered.permute(1, 2, 0, 3).flatten(2)  # [G, d, m]
        covariance = _regularized(samples @ samples.mT / samples.shape[2], eps)
        outputs.append((SOLVE[solver](covariance, num_iters) @ centered).flatten(1, 2))
    y = torch.cat(outputs, 1)
    if weight is not None:
        y = y * weight[:, None]
    if bias is not None:
        y = y + bias[:, None]
    return y.to(x.dtype).view(x.shape)


SOLVE = {
    "newton": solvers.newton,
    "newton_triton": solvers.newton,
    "zca": lambda covariance, _: solvers.zca(covariance),
    "pca": lambda covariance, _: solvers.pca(covariance),
    "cholesky": lambda covariance, _: solvers.cholesky(covariance),
}
