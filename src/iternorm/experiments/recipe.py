"""All that decides a training run, as plain values."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, get_args

from iternorm.experiments.jobs.results import Config

Precision = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True)
class Recipe:
    """How one network is trained. Two runs of equal recipes give equal results, up to the device's rounding.

    Attributes:
        data: The data set: ``mnist``, ``cifar10``, ``imagenet``, or ``generated-`` and one of these; or the name of a
            folder of images in the folder of data sets, ``imagenette`` for one.
        model: The network, as `iternorm.networks.models.build` names it.
        norm: The normalization, as `iternorm.networks.norms.make_norm` names it.
        batch_size: Examples of one step, over all processes.
        lr: The learning rate of the first epoch.
        epochs: Passes over the training set.
        seed: Decides the initial weights, the order of the examples, their augmentation and dropout.
        momentum: Of SGD.
        nesterov: Whether the momentum is Nesterov's.
        weight_decay: On every parameter.
        milestones: After so many epochs the learning rate is multiplied by `gamma`, once for each.
        gamma: See `milestones`.
        norm_eps: The eps of the normalization.
        dropout: The share of activations that are dropped, in networks that have dropout.
        augment: Crop and flip the training images at random.
        precision: ``fp32`` is torch's defaults, in which a GPU's convolutions are in TF32; ``tf32`` lets products of
            matrices be so too; ``bf16`` is autocast, and TF32 for what stays in fp32.
        channels_last: The memory format of images and weights on a GPU; a CPU always trains in the contiguous one.
        eval_every: Rows between evaluations on the test set, so epochs where `record_every` is None; the last always
            has one.
        record_every: Iterations between rows inside an epoch; None is one row an epoch.
        max_iterations: End there, in the middle of an epoch.
        train_examples: Only the first so many training examples.
        test_examples: Only the first so many test examples.
        image_size: The height and width of an image, where the data set leaves the choice.
        width: Multiplies the channels of the network; 1 is the paper's.
        kept_on_device: Read a folder of images once and keep it on the device, where the images are cut and coloured.
            Other data sets are always kept there.

    Example:
        >>> recipe = Recipe("mnist", "mlp", "IterNorm T=5", batch_size=60000, lr=2, epochs=200)
        >>> Recipe.from_config(recipe.to_config("a")) == recipe
        True
    """

    data: str
    model: str
    norm: str
    batch_size: int
    lr: float
    epochs: int
    seed: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    milestones: tuple[int, ...] = ()
    gamma: float = 1.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    augment: bool = False
    precision: Precision = "fp32"
    channels_last: bool = False
    eval_every: int = 1
    record_every: int | None = None
    max_iterations: int | None = None
    train_examples: int | None = None
    test_examples: int | None = None
    image_size: int | None = None
    width: float = 1.0
    kept_on_device: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "model", "norm"):
            self._require(isinstance(getattr(self, name), str) and getattr(self, name) != "", name, "a name")
        for name in ("batch_size", "epochs", "eval_every"):
            self._require(_is_count(getattr(self, name)), name, "a whole number from 1")
        for name in ("record_every", "max_iterations", "train_examples", "test_examples", "image_size"):
            value = getattr(self, name)
            self._require(value is None or _is_count(value), name, "None or a whole number from 1")
        self._require(_is_whole(self.seed) and self.seed >= 0, "seed", "a whole number from 0")
        for name in ("nesterov", "augment", "channels_last", "kept_on_device"):
            self._require(isinstance(getattr(self, name), bool), name, "True or False")
        # 1 and 1.0 are the same recipe, so they have to be the same text in a configuration too.
        for name in ("lr", "momentum", "weight_decay", "gamma", "norm_eps", "dropout", "width"):
            value = getattr(self, name)
            self._require(_is_number(value), name, "a finite number")
            object.__setattr__(self, name, float(value))
        for name in ("lr", "gamma", "width"):
            self._require(getattr(self, name) > 0, name, "a positive number")
        for name in ("weight_decay", "norm_eps"):
            self._require(getattr(self, name) >= 0, name, "0 or more")
        for name in ("momentum", "dropout"):
            self._require(0 <= getattr(self, name) < 1, name, "a number from 0 and below 1")
        self._require(not self.nesterov or self.momentum > 0, "nesterov", "a momentum above 0 for it, or False")
        known = get_args(Precision)
        self._require(self.precision in known, "precision", " or ".join(map(repr, known)))
        self._require(
            isinstance(self.milestones, tuple | list) and all(map(_is_count, self.milestones)),
            "milestones",
            "numbers of epochs, each from 1",
        )
        object.__setattr__(self, "milestones", tuple(self.milestones))
        self._require(sorted(set(self.milestones)) == list(self.milestones), "milestones", "rising numbers of epochs")

    def _require(self, holds: bool, name: str, needed: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r} of a recipe: {needed} is needed")

    def learning_rate(self, epoch: int) -> float:
        """The learning rate of an epoch, the first being 0."""
        return self.lr * self.gamma ** sum(milestone <= epoch for milestone in self.milestones)

    def to_config(self, job: str) -> Config:
        """The configuration of a job: its name and the values that are not the default.

        A field that is added later, with a default that is today's behaviour, then moves no result.
        """
        config: dict[str, Any] = {"job": job}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                # What JSON makes of a tuple.
                config[field.name] = list(value) if isinstance(value, tuple) else value
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Recipe":
        """The recipe of a configuration that `to_config` made.

        Raises:
            ValueError: A value is missing, unknown or not possible.
        """
        values = {name: value for name, value in config.items() if name != "job"}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - fields.keys()):
            raise ValueError(f"the configuration has {', '.join(unknown)}, which no recipe knows")
        needed = [name for name, field in fields.items() if field.default is MISSING]
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"the configuration lacks {', '.join(missing)}")
        return cls(**values)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
