"""Samples as tensors: what `Whitener` takes, and the form in which it gives results back."""

import warnings
from typing import Any

import torch
from torch import Tensor

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_samples(data: Any) -> tuple[Tensor, bool]:
    """``[m, d]`` as a tensor, and whether it came as something else, which gets numpy arrays back."""
    is_array = not isinstance(data, Tensor)
    samples = _from_array(data) if is_array else data
    if samples.dtype not in _FLOATING:
        raise TypeError(f"X has dtype {samples.dtype}; convert it to a floating-point dtype, e.g. X.float()")
    if samples.ndim != 2:
        raise ValueError(
            f"X has shape {list(samples.shape)}; expected [samples, features]. Reshape your data: X.flatten(1) makes "
            "each image one sample, X.flatten(0, -2) each token, X.reshape(-1, 1) a single feature"
        )
    if samples.shape[1] == 0:
        raise ValueError(f"X has 0 feature(s) (shape={tuple(samples.shape)}) while a minimum of 1 is required.")
    return samples, is_array


def check_finite(samples: Tensor, is_array: bool) -> None:
    """Arrays are checked, as scikit-learn does; in tensors a NaN goes through, and no device has to be waited for."""
    if is_array and not bool(samples.isfinite().all()):
        raise ValueError("Input X contains NaN or infinity; drop those samples")


def _from_array(data: Any) -> Tensor:
    import numpy as np

    if hasattr(data, "toarray"):
        raise TypeError("X is a sparse matrix; whitening makes it dense: give X.toarray()")
    array = np.asarray(data)
    if array.dtype.kind == "c":
        raise ValueError("Complex data not supported: X has complex numbers; give their real and imaginary parts")
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Memory that cannot be written to is not written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array))
