"""What Figure 6 and Figure 7 share: the VGG on CIFAR-10."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from iternorm.experiments.data import datasets as data
from iternorm.experiments.evidence import curves
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Config, Result
from iternorm.experiments.recipe import Precision, Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOME = "vgg"

PRECISION: Precision = "tf32"
CHANNELS_LAST = True
# The paper averages three runs.
SEEDS = 3
EPOCHS, MILESTONES, GAMMA, MOMENTUM = 160, (60, 120), 0.2, 0.9
# BN's is the Lua code's. DBN's Lua scripts have 1e-5.
EPS = {"BN": 1e-3, "DBN-16": 1e-3}


class Setting(NamedTuple):
    """A configuration of Figure 6: its title, the batch size, the first learning rate."""

    title: str
    batch_size: int
    lr: float


SETTINGS = {
    "basic": Setting("basic configuration", 256, 0.1),
    "large": Setting("batch size of 1024", 1024, 0.4),
    "small": Setting("batch size of 16", 16, 0.0125),
    "10x": Setting("10x larger learning rate", 256, 1.0),
}
_SMOKE_BATCH_SIZES = {"basic": 16, "large": 32, "small": 4, "10x": 16}


def configuration(setting: str, norm: str, seed: int, plan: Plan) -> Config:
    """One run of a setting."""
    _, batch_size, lr = SETTINGS[setting]
    epochs, milestones, name = EPOCHS, MILESTONES, "cifar10"
    options: dict = {}
    if plan.smoke:
        epochs, milestones, batch_size = 2, (1,), _SMOKE_BATCH_SIZES[setting]
        options = {"train_examples": 64, "test_examples": 32, "width": 1 / 32}
        name = data.real_or_generated(name)
    recipe = Recipe(
        name,
        "vgg",
        norm,
        batch_size,
        lr,
        epochs,
        seed=seed,
        momentum=MOMENTUM,
        milestones=milestones,
        gamma=GAMMA,
        norm_eps=EPS.get(norm, 1e-5),
        augment=True,
        precision=PRECISION,
        channels_last=CHANNELS_LAST,
        **options,
    )
    return recipe.to_config(f"{setting}-{norm.replace(' ', '-')}-s{seed}")


def seeds(plan: Plan) -> range:
    """Three seeds, one in the small size."""
    return range(plan.seeds or (1 if plan.smoke else SEEDS))


def setting_of(result: Result) -> str:
    """The setting of a run, which its job is named after."""
    return result.config["job"].partition("-")[0]


def mean_training_error(result: Result) -> float:
    """Training error averaged over the epochs: the less, the faster the network converged."""
    return curves.mean_over_run(result, "train_error")


def final_test_error(result: Result) -> float:
    """Test error after the last epoch."""
    return curves.final(result, "test_error")


def test_errors(runs: Sequence[Result] | None) -> tuple[float, ...]:
    """Final test error of each seed."""
    return curves.seeds(runs, final_test_error)


def draw(axes: "Axes", runs: Mapping[str, Sequence[Result]], title: str, expected: Sequence[str]) -> None:
    """Training (solid) and test (dashed) error over epochs, and which of the expected runs are missing."""
    axes.set_title(title, fontsize=10)
    if runs:
        curves.draw(axes, runs, "epoch")
        curves.limit_errors(axes, [run for found in runs.values() for run in found])
        axes.set_ylabel(curves.BOTH_ERRORS)
        axes.legend(fontsize=8)
    curves.note_missing(axes, [name for name in expected if name not in runs])
