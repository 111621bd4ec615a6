"""What the tests of the kernels on a real GPU share: activations, layers, and errors against fp64."""

import checks
import torch
from checks import relative_error

from iternorm import reference

# Error budgets against fp64: output, gradients. fp32 and TF32 are the project's own targets. For half precision the
# budget is a small multiple of one rounding of the output (2^-9 and 2^-12).
BUDGETS = {
    "fp32": (torch.float32, "highest", 2e-6),
    "tf32": (torch.float32, "high", 2e-3),
    "bf16": (torch.bfloat16, "highest", 5e-3),
    "fp16": (torch.float16, "highest", 2e-3),
}


def activation(shape, dtype, last=False, mean=0.0):
    """Correlated channels of moderate condition, with means of their own."""
    channels = shape[1]
    mixing = torch.eye(channels, device="cuda", dtype=torch.float64)
    mixing += 0.5 * torch.randn_like(mixing) / channels**0.5
    x = torch.einsum("ij,nj...->ni...", mixing, torch.randn(shape, device="cuda", dtype=torch.float64))
    x = (x + mean + torch.randn(channels, device="cuda").view(1, -1, *(1,) * (len(shape) - 2))).to(dtype).contiguous()
    return checks.channels_last(x) if last else x


def layer_for(shape, **arguments):
    return checks.layer_for(shape, device="cuda", **arguments)


def errors(layer, x, grad):
    """Relative errors of the output and of the three gradients."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = reference.iter_norm(*inputs, group_size=layer.group_size, num_iters=layer.num_iters)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    assert y.stride() == x.stride() == x.grad.stride()
    actual = (y, x.grad, layer.weight.grad, layer.bias.grad)
    return [relative_error(a, b) for a, b in zip(actual, (expected, *wanted), strict=True)]
