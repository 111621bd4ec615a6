"""What scikit-learn asks of an estimator, without an import of it."""

import functools
import inspect
import sys
from typing import Any, TypeVar

Self = TypeVar("Self", bound="Estimator")


class Estimator:
    """Parameters are the arguments of the constructor, kept as they are given."""

    @classmethod
    # A signature takes as long to find as a batch of a stream to be read.
    @functools.cache
    def _parameters(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {name: getattr(self, name) for name in self._parameters()}

    def set_params(self: Self, **params: Any) -> Self:
        """Change arguments; what was fitted stays and is solved again."""
        unknown = [name for name in params if name not in self._parameters()]
        if unknown:
            raise ValueError(
                f"Invalid parameter {unknown[0]!r} for estimator {self}. Valid parameters are: {self._parameters()!r}."
            )
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        kept = TransformerTags(preserves_dtype=["float64", "float32"])
        return Tags(
            estimator_type=None, target_tags=TargetTags(required=False), transformer_tags=kept, input_tags=InputTags()
        )

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self).__init__).parameters
        changed = [
            f"{name}={value!r}" for name, value in self.get_params().items() if value != parameters[name].default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


class NotFittedError(ValueError, AttributeError):
    """A result was asked for before any sample was seen; it has the bases of scikit-learn's error."""


def not_fitted(text: str) -> Exception:
    """The error of a call that comes before `fit`."""
    # Where scikit-learn is in use, its own class is what callers catch.
    exceptions = sys.modules.get("sklearn.exceptions")
    return NotFittedError(text) if exceptions is None else exceptions.NotFittedError(text)
