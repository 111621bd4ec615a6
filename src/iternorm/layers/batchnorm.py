"""What the layers are to tools that know BatchNorm.

docs/tools.md has the tools, docs/decisions/layers-are-batchnorms.md the reasons.
"""

from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

NO_VARIANCE = (
    "{name} has no running_var: it keeps running_{running}, which is no variance of each channel. "
    "Use iternorm.convert_sync_iternorm(model, batchnorm=True) to synchronize, iternorm.fold(model.eval()) to fuse, "
    "iternorm.recalibrate(model, batches) to set statistics, iternorm.freeze(model) to keep them; see docs/tools.md"
)


class BatchNormWithoutVariance(_BatchNorm):
    """A BatchNorm for tools that look for one, and not for those that would put another layer in its place.

    The latter take its `running_var`, so there is none.
    """

    running: str
    running_whitening: Tensor | None
    running_covariance: Tensor | None

    @property
    def running_var(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise AttributeError

    @running_var.setter
    def running_var(self, value: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not None:
            raise AttributeError(NO_VARIANCE.format(name=type(self).__name__, running=self.running))
        # How BatchNorm is told to keep no statistics, along with its running_mean.
        self.running_whitening = self.running_covariance = None

    def __getattr__(self, name: str) -> Any:
        # Python comes here when the property has raised, and drops a text given there.
        if name == "running_var":
            raise AttributeError(NO_VARIANCE.format(name=type(self).__name__, running=self.running))
        return super().__getattr__(name)

    def __prepare_scriptable__(self) -> None:
        """What `torch.jit.script` calls first."""
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}; script what iternorm.fold(model.eval()) returns, "
            "or use torch.jit.trace, or torch.compile and torch.export, which replace TorchScript"
        )
