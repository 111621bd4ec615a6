"""Decorrelated features: an IterNorm before the last linear layer of a model (the paper's DF)."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from iternorm.layers.norms import IterNorm1d
from iternorm.models import replace


class DecorrelatedLinear(nn.Linear):
    """A linear layer whose input is whitened first, by its child `norm`.

    It is an `nn.Linear` with the parameters of the one it replaces under the same names, so the code and the
    checkpoints of the model still find them. Features are the last dimension; all others count as samples.
    """

    norm: IterNorm1d

    def forward(self, input: Tensor) -> Tensor:
        features = self.norm(input.reshape(-1, input.shape[-1])).view(input.shape)
        return super().forward(features)


def decorrelate_features(
    model: nn.Module,
    *,
    name: str | None = None,
    group_size: int | None = 64,
    num_iters: int = 5,
    affine: bool = False,
    running: str = "whitening",
    impl: str = "auto",
) -> nn.Module:
    """Put an IterNorm before the last linear layer, without editing the model's source.

    In place, as `convert_batchnorm`. The running statistics start at 0 and the identity, so the model's output in eval
    is unchanged until it has been trained or recalibrated.

    Args:
        model: a model with an `nn.Linear`.
        name: of the linear layer; None is the last one in the order of `model.named_modules()`. One of an
            `nn.TransformerEncoderLayer` is refused: torch reads its weight in eval and does not call it.
        group_size: channels whitened together; None is all of them.
        num_iters: the paper's T.
        affine: a scale and a shift between the two; the linear layer can express both, so there is none by default.
        running: "whitening" or "covariance".
        impl: "auto", "triton", "native", "torch" or "reference".

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
        >>> list(decorrelate_features(model).state_dict())
        ['1.weight', '1.bias', '1.norm.running_mean', '1.norm.running_whitening', '1.norm.num_batches_tracked']
    """
    linears = {key: layer for key, layer in model.named_modules() if type(layer) is nn.Linear}
    kinds = [(key, parametrize.is_parametrized(m)) for key, m in model.named_modules() if isinstance(m, nn.Linear)]
    if name is None and kinds and kinds[-1][1]:
        raise ValueError(
            f"the last linear layer, {kinds[-1][0]!r}, is parametrized; decorrelate first and parametrize then, or "
            "give the name of another layer"
        )
    lazy = [key for key, layer in model.named_modules() if isinstance(layer, nn.LazyLinear)]
    if name is None and lazy and kinds[-1][0] == lazy[-1]:
        raise ValueError(
            f"the last linear layer, {lazy[-1]!r}, has not seen a batch; run one batch first, or give the name of "
            "another layer"
        )
    taken = [key for key, layer in model.named_modules() if isinstance(layer, DecorrelatedLinear)]
    if name is None and taken:
        raise ValueError(f"the features are decorrelated already, before {taken[-1]!r}; give the name of another layer")
    if name is None and not linears:
        raise ValueError("the model has no nn.Linear layer to put an IterNorm before; nothing was changed")
    if name is not None and name not in linears:
        raise ValueError(
            f"name={name!r} is no nn.Linear of this model; it has {', '.join(map(repr, linears)) or 'none'}"
        )
    chosen = next(reversed(linears)) if name is None else name
    parent = model.get_submodule(chosen.rpartition(".")[0])
    if isinstance(parent, nn.TransformerEncoderLayer) and type(parent).forward is nn.TransformerEncoderLayer.forward:
        raise ValueError(
            f"{chosen!r} belongs to an nn.TransformerEncoderLayer, which in eval reads its weight and does not call "
            "it, so its input would not be whitened; give the name of another linear layer. Nothing was changed"
        )
    linear = linears[chosen]
    if reason := replace.changed(linear):
        raise ValueError(f"{chosen!r} {reason}, or give the name of another linear layer. Nothing was changed")
    options: dict[str, Any] = {"group_size": group_size, "num_iters": num_iters, "running": running, "impl": impl}
    like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
    norm = IterNorm1d(linear.in_features, affine=affine, **like, **options)
    norm.train(linear.training)
    new = DecorrelatedLinear(linear.in_features, linear.out_features, device="meta")
    replace.carry(linear, new)
    new.norm = norm
    return replace.replace_modules(model, {linear: new})
