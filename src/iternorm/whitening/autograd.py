"""The normalization of a batch as one differentiable function: moments, inverse_sqrt, apply, and their backward.

`whiten` joins the three verbs with an analytic backward (docs/math.md, section 5) that saves the input and small
matrices. `composed` is the same function in operators that torch differentiates itself.
"""

from types import ModuleType

import torch
from torch import Tensor

from iternorm import solvers
from iternorm.backends.torch import verbs as torch_verbs
from iternorm.whitening import groups, modes, operators
from iternorm.whitening.operators import no_autocast
from iternorm.whitening.processes import collective
from iternorm.whitening.settings import Settings, regularized, unbiased

NOT_OVER_PROCESSES = "{} does not reach over processes; use IterNorm in place of SyncIterNorm where it is needed"


def whiten(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, iteration: ModuleType | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whiten a batch, scale and shift. With a process group, the batch is that of all its ranks together.

    `iteration` is where Newton's iteration is in kernels: see `dispatch.iteration_for`.

    Returns:
        The output, and without gradient the mean ``[C]``, the covariance (without eps) and the whitening matrices
        ``[G, d, d]`` of the batch.
    """
    if torch.compiler.is_compiling() and modes.is_exporting_in_torch_2_6():
        # It cannot export an autograd.Function with a dynamic batch. Without a gradient it sees only the forward, which
        # is all that an exported program has in any version.
        x, (weight, bias) = x.detach(), (t if t is None else t.detach() for t in (weight, bias))
    return _Whiten.apply(x, weight, bias, settings, iteration)  # pyright: ignore[reportReturnType]


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, settings, iteration):
        group_size = settings.group_size
        with no_autocast(x):
            num_samples, mean, covariance = _batch_moments(x, settings)
            steps = settings.num_iters if iteration is None else _steps(settings)
            keep = ctx.needs_input_grad[0] and _is_cheap_to_keep(covariance, steps, x)
            whitening, solved = inverse_sqrt(covariance, x.shape[1], settings, keep, iteration)
            matrix, offset = fold_affine(whitening, mean, weight, bias, group_size)
            if _is_empty(x):
                y = torch.empty_like(x)
            else:
                y = operators.call(operators.apply, x, matrix, offset, group_size, settings.impl)
        ctx.save_for_backward(x, weight, bias, mean, whitening, num_samples, *(t for state in solved for t in state))
        ctx.mark_non_differentiable(mean, covariance, whitening)
        # Else autograd would fill zeros for the three of them.
        ctx.set_materialize_grads(False)
        ctx.lengths = [len(state) for state in solved]
        ctx.settings, ctx.iteration = settings, iteration
        return y, mean, covariance, whitening

    @staticmethod
    def backward(ctx, grad, *_unused):  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 5
        x, weight, bias, mean, whitening, num_samples, *state = ctx.saved_tensors
        settings, needs = ctx.settings, ctx.needs_input_grad[:3]
        group_size, num_features = settings.group_size, x.shape[1]
        if modes.wants_graph(grad):
            if settings.process_group:
                raise RuntimeError(NOT_OVER_PROCESSES.format("a graph of the backward (create_graph=True)"))
            return *composed_backward(grad, (x, weight, bias), needs, settings), None, None
        grad_x = grad_weight = grad_bias = None
        with no_autocast(x):
            grad_sum, cross = _batch_cross_moments(grad, x, mean, settings)
            if needs[1]:
                grad_weight = groups.unpad_vector((cross * whitening).sum(-1), num_features).to(weight.dtype)
            if needs[2]:
                grad_bias = grad_sum.to(bias.dtype)
            if needs[0]:
                # By slices: a compiled backward of torch 2.6 does not follow an iterator from part to part.
                solved, begin = [], 0
                for length in ctx.lengths:
                    solved.append(tuple(state[begin : begin + length]))
                    begin += length
                if settings.process_group:
                    # The gradients of weight and bias stay those of this rank, as in SyncBatchNorm: DDP averages them.
                    grad_sum, cross = collective.global_sums(grad_sum, cross, settings.process_group)
                else:
                    num_samples = x.numel() // num_features
                grad_whitening = _scale_rows(cross, weight, group_size)
                grad_covariance = inverse_sqrt_backward(
                    grad_whitening, whitening, solved, num_features, settings, ctx.iteration
                )
                second = grad_covariance * (2 * (1 - settings.shrinkage) / (num_samples - settings.correction))
                first = _scale_rows(whitening, weight, group_size).mT
                offset = _on_vector(first, grad_sum, group_size) / -num_samples - _on_vector(second, mean, group_size)
                if _is_empty(x):
                    grad_x = torch.empty_like(x)
                else:
                    arguments = (grad, x, first, second, offset, group_size, settings.impl)
                    grad_x = operators.call(operators.apply_backward, *arguments)
        return grad_x, grad_weight, grad_bias, None, None


def _is_empty(x: Tensor) -> bool:
    """Only a rank among others can have no samples: it takes part in the collectives and has nothing to compute."""
    return x.numel() == 0


def _batch_moments(x: Tensor, settings: Settings):
    """Mean and covariance of the batch, over all ranks where there is a process group, and then their global count."""
    if _is_empty(x):
        dtype = torch_verbs.compute_dtype(x.dtype)
        mean = x.new_zeros(x.shape[1], dtype=dtype)
        covariance = operators.matrices_like(x, settings.group_size, dtype).zero_()
    else:
        mean, covariance = operators.call(operators.moments, x, settings.group_size, settings.impl)
    count = x.numel() // x.shape[1]
    if settings.process_group:
        total, mean, covariance = collective.global_moments(count, mean, covariance, settings.process_group)
        return total, mean, unbiased(covariance, total, settings)
    return None, mean, unbiased(covariance, count, settings)


def _batch_cross_moments(grad: Tensor, x: Tensor, mean: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    if _is_empty(x):
        # Zeros computed from the gradient: a compiler would move a collective of constants into the forward.
        total = torch_verbs.as_planes(grad).sum((0, 2)).to(mean.dtype)
        return total, operators.matrices_like(x, settings.group_size, mean.dtype).zero_()
    return operators.call(operators.cross_moments, grad, x, mean, settings.group_size, settings.impl)


def _is_cheap_to_keep(covariance: Tensor, num_iters: int, x: Tensor) -> bool:
    """Whether the iterates take little memory compared with the activation, which is kept too, or little at all."""
    kept = 2 * (num_iters - 1) * covariance.numel() * covariance.element_size()
    return kept <= max(x.numel() * x.element_size() // 8, 1 << 20)


def inverse_sqrt(
    covariance: Tensor,
    num_features: int,
    settings: Settings,
    keep: bool = False,
    iteration: ModuleType | None = None,
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Whitening matrices ``[G, d, d]`` of covariances without eps, and what `inverse_sqrt_backward` needs by part.

    With `keep`, that includes the matrices of Newton's iteration, which would otherwise be computed once more.
    """
    matrices, solved = [], []
    for part in groups.parts(num_features, settings.group_size):
        matrix = regularized(part.of(covariance), settings)
        if iteration is None:
            whitening, saved = solvers.solve(matrix, settings.solver, settings.num_iters, keep)
        else:
            whitening, kept = iteration.solve(matrix, _steps(settings))
            # Kernels that keep nothing have nothing that could be computed once more.
            saved = (kept,) if keep or not kept.numel() else ()
        matrices.append(whitening)
        solved.append((matrix, *saved))
    return groups.pad(matrices), solved


def _steps(settings: Settings) -> int:
    """Steps of an iteration in its own kernels, which may be in fp64. ZCA is the iteration run to convergence."""
    return settings.steps if settings.exact else settings.num_iters


def inverse_sqrt_backward(
    grad: Tensor,
    whitening: Tensor,
    solved: list[tuple[Tensor, ...]],
    num_features: int,
    settings: Settings,
    iteration: ModuleType | None = None,
) -> Tensor:
    """The gradient for the covariances, given the one for the whitening matrices."""
    gradients = []
    for part, (matrix, *saved) in zip(groups.parts(num_features, settings.group_size), solved, strict=True):
        part_grad, part_whitening = part.of(grad), part.of(whitening)
        if iteration is None:
            arguments = (part_grad, matrix, part_whitening, tuple(saved), settings.solver, settings.num_iters)
            gradients.append(solvers.solve_backward(*arguments))
        else:
            steps = _steps(settings)
            kept = saved[0] if saved else iteration.solve(matrix, steps)[1]
            gradients.append(iteration.solve_backward(part_grad, matrix, part_whitening, kept, steps))
    return groups.pad(gradients)


def fold_affine(
    whitening: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor]:
    """A ``[G, d, d]`` and c ``[C]`` of y = A x + c: A = diag(γ) W, c = β - A μ (math.md, Eq. 2)."""
    matrix = _scale_rows(whitening, weight, group_size)
    offset = -_on_vector(matrix, mean, group_size)
    return matrix, offset if bias is None else offset + bias.to(offset.dtype)


def _scale_rows(matrix: Tensor, weight: Tensor | None, group_size: int) -> Tensor:
    return matrix if weight is None else matrix * groups.pad_vector(weight.to(matrix.dtype), group_size)[:, :, None]


def _on_vector(matrix: Tensor, vector: Tensor, group_size: int) -> Tensor:
    padded = groups.pad_vector(vector, group_size)
    if matrix.device.type == "cpu":
        # Not as a product of matrices, for which MKL opens a parallel region: it would wait for a core that is taken.
        return groups.unpad_vector((matrix * padded[:, None, :]).sum(-1), len(vector))
    return groups.unpad_vector(matrix @ padded[:, :, None], len(vector))


def composed_backward(grad: Tensor, inputs, needs, settings: Settings, compose=None) -> list:
    """The gradients as differentiable functions of `grad` and the inputs, for a graph of the backward.

    The forward is written out once more from the input, in operators that autograd and `iternorm.solvers`
    differentiate, and differentiated with `create_graph`. Batched gradients come here too: they need no graph.
    `compose` is that forward, where it is not `whiten`'s.
    """
    wanted = [t for t, needed in zip(inputs, needs, strict=True) if needed]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), no_autocast(inputs[0]):
        solve = solvers.composed if modes.is_batched(grad) else _solved
        y = (compose or _composed)(*inputs, settings=settings, solve=solve)[0]
        gradients = iter(torch.autograd.grad(y, wanted, grad, create_graph=create_graph))
    return [next(gradients) if needed else None for needed in needs]


def composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`whiten` in ordinary operators, which function transforms take apart and traces save."""
    if settings.process_group:
        what = "a function transform (torch.func), forward-mode derivative or trace"
        raise RuntimeError(NOT_OVER_PROCESSES.format(what))
    return _composed(x, weight, bias, settings, solvers.composed)


def _composed(x, weight, bias, settings: Settings, solve) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A centred copy and batched products: differentiable to any order the solver is."""
    parts = groups.parts(x.shape[1], settings.group_size)
    with no_autocast(x):
        blocks, mean, covariance = centered_moments(x, settings.group_size)
        covariance = unbiased(covariance, x.numel() // x.shape[1], settings)
        covariances = [regularized(part.of(covariance), settings) for part in parts]
        matrices = [solve(matrix, settings.solver, settings.num_iters) for matrix in covariances]
        y = torch.cat([(m @ block).flatten(1, 2) for m, block in zip(matrices, blocks, strict=True)], 1)
    statistics = mean.detach(), covariance.detach(), groups.pad(matrices).detach()
    return scale_and_shift(y, weight, bias).to(x.dtype).reshape(x.shape), *statistics


def scale_and_shift(planes: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """γ x + β of ``[N, C, L]``, in its dtype."""
    if weight is not None:
        planes = planes * weight[:, None].to(planes.dtype)
    return planes if bias is None else planes + bias[:, None].to(planes.dtype)


def centered_moments(x: Tensor, group_size: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """The centred activation by part, ``[N, G, d, L]``, its mean ``[C]`` and covariance ``[G, d, d]``."""
    planes = torch_verbs.as_planes(x).to(torch_verbs.compute_dtype(x.dtype))
    blocks, means, covariances = [], [], []
    for part in groups.parts(x.shape[1], group_size):
        block = planes[:, part.channels].unflatten(1, (part.count, part.size))
        mean = block.mean((0, 3), keepdim=True)
        block = block - mean
        samples = block.permute(1, 2, 0, 3).flatten(2)  # [G, d, m]
        blocks.append(block)
        means.append(mean.flatten())
        covariances.append(samples @ samples.mT / samples.shape[2])
    return blocks, torch.cat(means), groups.pad(covariances)


def _solved(covariance: Tensor, solver: str, num_iters: int) -> Tensor:
    """The public function of a solver, with its own backward."""
    return solvers.newton(covariance, num_iters) if solver == "newton" else getattr(solvers, solver)(covariance)
