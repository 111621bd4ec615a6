"""The estimator: parameters, moments and matrices under scikit-learn's names."""

import json
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from iternorm.backends.torch.verbs import compute_dtype
from iternorm.whitener import arrays, matrices, moments, options
from iternorm.whitener.conventions import Estimator, not_fitted
from iternorm.whitening.operators import no_autocast

Self = TypeVar("Self", bound="Whitener")


class Whitener(Estimator):
    """Whiten vectors by the mean and covariance of the data it was fitted to.

    ``transform`` computes W (x - μ) with W Σ' Wᵀ = I, where Σ' = (1 - shrinkage) Σ + (shrinkage + eps) I. `fit` takes
    all samples at once, `partial_fit` batches of any size, and `merge` what other workers have fitted: all three give
    the same moments, which are kept in fp64. The covariance is computed about the mean, so a mean of 1000 deviations
    in fp32 does no harm.

    Without `eps` and `shrinkage`, directions in which the data do not vary are dropped: "pca" has no output for them,
    and "zca" gives zero there, as a pseudo-inverse does.

    It follows scikit-learn's conventions and works in its pipelines. Tensors give tensors on their own device, and
    anything else gives numpy arrays. Gradients flow through `transform` and `inverse_transform` to their input, and
    not into the fitted matrices; for those use `iternorm.functional.decorrelated_batch_norm`.

    Args:
        solver: "zca" (symmetric: closest to the input), "pca" (along the principal axes, largest variance first),
            "cholesky" (lower triangular) or "newton" (`num_iters` steps towards ZCA, as in IterNorm).
        n_components: keep the directions of largest variance, so many; None keeps all that the data vary in. "pca"
            then has so many outputs; "zca" has as many as there are features and lets the other directions be zero.
        eps: added to the diagonal of the covariance.
        shrinkage: from 0 to 1; how far the covariance is moved towards the identity.
        num_iters: the steps of "newton".
        correction: 1 divides the covariance by the number of samples minus one, as `torch.cov` does; 0 by their number.
        tol: a direction is empty whose variance is at most this share of the largest. None measures each direction by
            the features that it is made of: it is empty if the roundings of their dtype can make its variance.

    Attributes:
        mean_: ``[features]``, fp64, as the following.
        covariance_: ``[features, features]``, without eps and shrinkage.
        whitening_: ``[outputs, features]``.
        coloring_: ``[features, outputs]``, what `inverse_transform` multiplies by.
        n_components_: the number of directions that are whitened.
        n_features_in_: the number of features.
        n_samples_seen_: the number of samples.

    Example:
        >>> x = torch.randn(1000, 3, dtype=torch.float64) @ torch.randn(3, 3, dtype=torch.float64)
        >>> whitener = Whitener()
        >>> for batch in x.split(300):
        ...     whitener = whitener.partial_fit(batch)
        >>> torch.allclose(whitener.transform(x).T.cov(), torch.eye(3, dtype=torch.float64))
        True
    """

    # An estimator has no attribute but its parameters before it is fitted.
    _moments: moments.Moments | None = None
    # What takes the place of the moments while batches are fitted on a GPU.
    _stream: moments.Stream | None = None
    _matrices: tuple[options.Options, matrices.Matrices] | None = None

    def __init__(
        self,
        solver: str = "zca",
        n_components: int | None = None,
        *,
        eps: float = 0.0,
        shrinkage: float = 0.0,
        num_iters: int = 5,
        correction: int = 1,
        tol: float | None = None,
    ) -> None:
        self.solver = solver
        self.n_components = n_components
        self.eps = eps
        self.shrinkage = shrinkage
        self.num_iters = num_iters
        self.correction = correction
        self.tol = tol

    def fit(self: Self, X: Any, y: Any = None) -> Self:
        """Forget what was fitted before, and fit ``[samples, features]``."""
        checked = options.check(self.get_params())
        samples, _ = arrays.as_samples(X)
        if len(samples) == 0:
            raise ValueError(f"X has 0 sample(s) (shape={tuple(samples.shape)}) while a minimum of 2 is required.")
        fitted = moments.of(samples.detach())
        solved = matrices.solve(fitted, checked)
        self._moments, self._stream, self._matrices = fitted, None, (checked, solved)
        return self

    def partial_fit(self: Self, X: Any, y: Any = None) -> Self:
        """Fit a batch on top of those before; an empty one changes nothing.

        A call does not wait for a GPU. There a batch that is not finite is left out, and the first use of the fit
        raises to say so.
        """
        stream = self._stream
        if stream is None:
            options.check(self.get_params())
        samples, _ = arrays.as_samples(X)
        self._check_features(samples, stream.size if stream is not None else _size(self._moments))
        if len(samples) == 0:
            return self
        samples = samples.detach()
        if stream is None or not stream.takes(samples):
            before = self._seen()
            stream = moments.begin(before, samples)
            if stream is None:
                self._moments, self._matrices = moments.add(before, samples), None
                return self
        stream.add(samples)
        self._moments, self._stream, self._matrices = None, stream, None
        return self

    def merge(self: Self, *others: "Whitener") -> Self:
        """Take in what other whiteners have seen, as if this one had seen it; they stay as they are."""
        seen = [part._seen() for part in (self, *others)]
        parts = [part for part in seen if part is not None]
        sizes = sorted({len(part.mean) for part in parts})
        if len(sizes) > 1:
            raise ValueError(f"whiteners of {sizes} features cannot be merged; fit all of them to the same features")
        if parts:
            self._moments = moments.merge(parts)
            self._matrices = None
        return self

    def transform(self, X: Any) -> Any:
        """W (x - μ) of ``[samples, features]``, in its dtype."""
        samples, is_array = arrays.as_samples(X)
        solved = self._solved()
        self._check_features(samples, _size(self._fitted()))
        arrays.check_finite(samples, is_array)
        return _result(samples, solved.whitening, self.mean_, None, is_array)

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """`fit`, then `transform`."""
        return self.fit(X).transform(X)

    def inverse_transform(self, X: Any) -> Any:
        """x from ``[samples, outputs]``: `transform` undone, except for directions that were dropped."""
        samples, is_array = arrays.as_samples(X)
        coloring = self._solved().coloring
        if samples.shape[1] != coloring.shape[1]:
            raise ValueError(
                f"X has {samples.shape[1]} features, but transform of this Whitener has {coloring.shape[1]}"
            )
        arrays.check_finite(samples, is_array)
        return _result(samples, coloring, None, self.mean_, is_array)

    def to_linear(self, dtype: torch.dtype | None = None, *, inverse: bool = False) -> nn.Linear:
        """`transform`, or with `inverse` its inverse, as one `nn.Linear`, whose weights are not trained until asked to.

        A Linear adds the mean's part at the end: in fp32 with a mean of 1000 deviations that costs three digits, which
        `transform` keeps.

        Args:
            dtype: of the layer; None is torch's default.
            inverse: the way back.
        """
        solved = self._solved()
        weight = solved.coloring if inverse else solved.whitening
        layer = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=dtype).requires_grad_(False)
        layer.weight.copy_(weight)
        assert layer.bias is not None
        layer.bias.copy_(self.mean_ if inverse else -(weight @ self.mean_))
        return layer

    @property
    def mean_(self) -> Tensor:
        return self._fitted().mean

    @property
    def covariance_(self) -> Tensor:
        fitted = self._fitted()
        correction = options.check(self.get_params()).correction
        return fitted.covariance * (fitted.num_samples / max(fitted.num_samples - correction, 1))

    @property
    def whitening_(self) -> Tensor:
        return self._solved().whitening

    @property
    def coloring_(self) -> Tensor:
        return self._solved().coloring

    @property
    def n_components_(self) -> int:
        return self._solved().rank

    @property
    def n_features_in_(self) -> int:
        return len(self._fitted().mean)

    @property
    def n_samples_seen_(self) -> int:
        return self._fitted().num_samples

    def to(self: Self, device: torch.device | str) -> Self:
        """Move the fitted moments; batches on any device can be fitted and transformed wherever they are."""
        self._moments, self._matrices = self._fitted().to(torch.device(device)), None
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """The fitted moments as tensors, which safetensors can save. The parameters are not part of them."""
        fitted = self._fitted()
        return {
            "mean": fitted.mean.clone(),
            "covariance": fitted.covariance.clone(),
            "num_samples": torch.tensor(fitted.num_samples),
            "resolution": torch.tensor(fitted.resolution, dtype=torch.float64),
        }

    def load_state_dict(self: Self, state_dict: dict[str, Tensor]) -> Self:
        """Take over what `state_dict` returned."""
        expected = {"mean", "covariance", "num_samples", "resolution"}
        if set(state_dict) != expected:
            raise ValueError(f"the state_dict has {sorted(state_dict)}; that of a Whitener has {sorted(expected)}")
        mean, covariance = state_dict["mean"].double(), state_dict["covariance"].double()
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(
                f"the state_dict has a mean of shape {list(mean.shape)} and a covariance of shape "
                f"{list(covariance.shape)}; those of d features are [d] and [d, d]"
            )
        count, resolution = int(state_dict["num_samples"]), float(state_dict["resolution"])
        self._moments = moments.Moments(count, mean.clone(), covariance.clone(), resolution)
        self._stream = self._matrices = None
        return self

    def save(self, path: Any) -> None:
        """Write parameters and moments to one safetensors file."""
        from safetensors.torch import save_file

        # Numpy's numbers, which a grid search sets, become Python's.
        parameters = self.get_params() | options.check(self.get_params())._asdict()
        save_file(self.state_dict(), path, metadata={"iternorm.Whitener": json.dumps(parameters)})

    @classmethod
    def load(cls: type[Self], path: Any, device: str = "cpu") -> Self:
        """The whitener that `save` has written."""
        from safetensors import safe_open

        with safe_open(path, framework="pt", device=device) as file:
            metadata = file.metadata() or {}
            if "iternorm.Whitener" not in metadata:
                raise ValueError(f"{path} was not written by Whitener.save; load its tensors with load_state_dict")
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(**json.loads(metadata["iternorm.Whitener"])).load_state_dict(state)

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Names of the outputs, for scikit-learn."""
        import numpy as np

        return np.asarray([f"whitener{i}" for i in range(len(self.whitening_))], dtype=object)

    def __sklearn_is_fitted__(self) -> bool:
        return self._seen() is not None

    def __getstate__(self) -> dict[str, Any]:
        self._seen()
        return self.__dict__

    def _seen(self) -> moments.Moments | None:
        """The moments so far, or None before the first batch. Raises if batches were left out."""
        if self._stream is not None:
            (self._moments, left_out), self._stream = self._stream.moments(), None
            if left_out:
                raise moments.not_finite(left_out)
        return self._moments

    def _fitted(self) -> moments.Moments:
        fitted = self._seen()
        if fitted is None:
            raise not_fitted(f"this {type(self).__name__} is not fitted yet; call fit or partial_fit first")
        return fitted

    def _solved(self) -> matrices.Matrices:
        fitted, checked = self._fitted(), options.check(self.get_params())
        if self._matrices is None or self._matrices[0] != checked:
            self._matrices = checked, matrices.solve(fitted, checked)
        return self._matrices[1]

    def _check_features(self, samples: Tensor, expected: int | None) -> None:
        if expected is not None and samples.shape[1] != expected:
            raise ValueError(
                f"X has {samples.shape[1]} features, but {type(self).__name__} is expecting {expected} "
                "features as input, as it was fitted to"
            )


def _size(fitted: moments.Moments | None) -> int | None:
    return None if fitted is None else len(fitted.mean)


def _result(samples: Tensor, matrix: Tensor, before: Tensor | None, after: Tensor | None, is_array: bool) -> Any:
    """matrix (x - before) + after, computed in fp32 for half precision."""
    dtype, device = compute_dtype(samples.dtype), samples.device
    x = samples.to(dtype)
    if before is not None:
        # In two parts: the first difference is exact where x is near the mean, and the second is the mean's rounding.
        high = before.to(device, dtype)
        x = x - high - (before.to(device) - high).to(dtype)
    with no_autocast(x):
        y = linear(x, matrix.to(device, dtype))
    if after is not None:
        y = y + after.to(device, dtype)
    y = y.to(samples.dtype)
    return y.numpy() if is_array else y
