"""The one training loop: a recipe in, rows out, on one process or several, killed and resumed at any moment.

Device, mixed precision, several processes and tracking are `accelerate`'s. What decides the numbers is the recipe's:
the weights are made from its seed on the CPU, the order and the augmentation of an epoch from its seed and the epoch,
and dropout from these and the first iteration of the row. So a resumed run needs no state of a generator.
"""

import dataclasses
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iternorm.experiments.data.seeds import mixed
from iternorm.experiments.data.sources import Source, open_source
from iternorm.experiments.jobs.registry import Context
from iternorm.experiments.jobs.results import Config, Row
from iternorm.experiments.recipe import Recipe
from iternorm.experiments.training import checkpoint
from iternorm.experiments.training.environment import environment
from iternorm.experiments.training.graph import CapturedStep, EagerStep, is_capturable, new_scores, score
from iternorm.experiments.training.watch import Watch
from iternorm.networks.models import build

if TYPE_CHECKING:
    from accelerate import Accelerator

# A checkpoint is skipped if the last one is younger than this, or younger than so many times the time it took to write:
# on a slow disk the checkpoints of short epochs would otherwise take longer than the epochs. One of the paper's VGG has
# 153 MiB and takes half a second on two cores of an AMD EPYC.
CHECKPOINT_SECONDS, CHECKPOINT_SHARE = 10.0, 50


class Period(NamedTuple):
    """The iterations `start` to `stop` of an epoch, which make one row; the first epoch is 0."""

    epoch: int
    start: int
    stop: int


def periods(recipe: Recipe, iterations_per_epoch: int) -> list[Period]:
    """The rows of a run.

    Example:
        >>> recipe = Recipe("mnist", "mlp", "BN", 2, 0.1, epochs=2, record_every=20, max_iterations=70)
        >>> [tuple(period) for period in periods(recipe, 50)]
        [(0, 0, 20), (0, 20, 40), (0, 40, 50), (1, 0, 20)]
    """
    size = recipe.record_every or iterations_per_epoch
    left = recipe.max_iterations or recipe.epochs * iterations_per_epoch
    found = []
    for epoch in range(recipe.epochs):
        end = min(iterations_per_epoch, left)
        found += [Period(epoch, start, min(start + size, end)) for start in range(0, end, size)]
        left -= end
    return found


def train(
    recipe: Recipe,
    context: Context,
    *,
    folder: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float | None = None,
    capture: bool | None = None,
    network: Callable[[Recipe, Source], nn.Module] | None = None,
    source: Callable[..., Source] | None = None,
) -> list[Row]:
    """Train a network, going on from the last checkpoint in the folder of `context` if there is one.

    Training loss and error are measured on the batches while they are trained on, test loss and error in eval mode. A
    run whose loss is not finite, or whose eigendecomposition fails, ends there with a row that says ``"diverged"``.

    Started by ``torchrun``, each process has its share of each batch, gradients are those of the whole batch, and the
    first process writes the checkpoints and reports progress. All return the same rows.

    Args:
        recipe: What to train.
        context: Where to train, where to keep checkpoints, how to report.
        folder: Of the data; see `iternorm.experiments.data.datasets`.
        checkpoint_seconds: The least age of the last checkpoint for a new one. Unless given, `CHECKPOINT_SECONDS`, or
            more where writing takes more than a fiftieth of the time. The last row always has one.
        capture: Replay forward and backward from a CUDA graph; None is where `graph.is_capturable` says so.
        network: Makes the network of a recipe for a source, whose `num_classes` and `in_shape` it may ask for; the
            names of recipes are then its own. Unless given, `models.build` makes it. It is called on the CPU, after
            torch's generator was seeded.
        source: Opens the data of a recipe, as `sources.open_source` does, which is taken unless this is given: called
            as ``source(recipe, device, rank=..., world_size=...)``.

    Returns:
        Rows of ``epoch`` (from 1), ``iteration`` (steps so far), ``lr``, ``train_loss``, ``train_error`` (%),
        ``test_loss``, ``test_error`` (%; None where not evaluated) and ``seconds`` (of training, evaluation excluded);
        with more than 10 classes ``train_error_top5`` and ``test_error_top5``.

    Raises:
        ValueError: The device is not there, or the batch is larger than the training set.
        CheckpointError: The checkpoint in the folder is of another recipe or network.
    """
    with environment(recipe, context) as accelerator:
        run = _Run(
            recipe, context, accelerator, capture, network or _build, source or partial(open_source, folder=folder)
        )
        return run(checkpoint_seconds)


def run(config: Config, context: Context) -> list[Row]:
    """What an experiment that trains does for a job: a row for each epoch, or each so many iterations."""
    return train(Recipe.from_config(config), context)


class _Run:
    """One run of `train`: everything it needs, made; calling it trains."""

    def __init__(
        self,
        recipe: Recipe,
        context: Context,
        accelerator: "Accelerator",
        capture: bool | None,
        network: Callable[[Recipe, Source], nn.Module],
        source: Callable[..., Source],
    ):
        self.recipe = recipe
        self.context = context
        self.accelerator = accelerator
        device, processes = accelerator.device, accelerator.num_processes
        # On a CPU without AVX-512, oneDNN's backward of a strided 1x1 convolution of fewer than 8 channels writes out
        # of bounds in channels_last (torch 2.13), and narrow networks have such shortcuts. The format is for the speed
        # of GPUs, so it is left to them.
        laid_out = dataclasses.replace(recipe, channels_last=recipe.channels_last and device.type != "cpu")
        self.source = source(laid_out, device, rank=accelerator.process_index, world_size=processes)
        context.record["precision"] = recipe.precision
        if record := getattr(self.source, "record", None):
            context.record["data"] = record
        self.periods = periods(recipe, self.source.iterations_per_epoch)
        # On the CPU, so that every device starts from the same weights.
        torch.manual_seed(recipe.seed)
        model = network(recipe, self.source)
        _give_shapes(model, self.source)
        if laid_out.channels_last:
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.model = model.to(device)
        self.wrapped: nn.Module = accelerator.prepare_model(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.scores = new_scores(device)
        captured = is_capturable(self.model, device, processes) if capture is None else capture
        kind = CapturedStep if captured else EagerStep
        share = recipe.batch_size / processes
        self.step = kind(self.wrapped, self.optimizer, share, accelerator.backward, self.scores)
        last = self.periods[-1]
        total = last.epoch * self.source.iterations_per_epoch + last.stop
        report = context.step if accelerator.is_main_process else _silent
        self.watch = Watch(self.scores, share, processes, total, report)

    def __call__(self, checkpoint_seconds: float | None) -> list[Row]:
        rows = self._resume()
        self._start_tracking(rows)
        last_saved = time.monotonic()
        least_age = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
        batches = None
        for number in range(len(rows), len(self.periods)):
            if rows and rows[-1].get("diverged"):
                break
            period = self.periods[number]
            if batches is None or period.start == 0:
                batches = islice(self.source.train_batches(period.epoch), period.start, None)
            row = self._train(period, batches)
            is_last = number + 1 == len(self.periods) or "diverged" in row
            if "diverged" not in row and (is_last or (number + 1) % self.recipe.eval_every == 0):
                row |= self._evaluate()
            rows.append(row)
            self.accelerator.log(
                {name.replace("_", "/", 1): value for name, value in row.items() if isinstance(value, float)},
                step=row["iteration"],
            )
            begun = time.monotonic()
            if self.accelerator.is_main_process and (is_last or begun - last_saved >= least_age):
                self._save(rows, is_last=is_last)
                last_saved = time.monotonic()
                if checkpoint_seconds is None:
                    least_age = max(CHECKPOINT_SECONDS, CHECKPOINT_SHARE * (last_saved - begun))
        # No process goes on, or leaves the group, while the first one still writes the last checkpoint.
        self.accelerator.wait_for_everyone()
        self.watch.end()
        return rows

    def _save(self, rows: list[Row], *, is_last: bool) -> None:
        try:
            checkpoint.save(self.context.folder, self.recipe, rows, self.model, self.optimizer)
        except OSError as error:
            # The rows are complete, and take so little room that they may be saved all the same.
            if not is_last:
                raise
            warnings.warn(f"{error}; the run is finished without it", stacklevel=2)

    def _resume(self) -> list[Row]:
        """The rows of the last checkpoint, whose weights are put into the network."""
        # The first process alone may rename a checkpoint that cannot be used, before the others look.
        with self.accelerator.main_process_first():
            found = checkpoint.load(self.context.folder, self.recipe)
        if found is None:
            return []
        found.restore(self.model, self.optimizer)
        return found.rows

    def _start_tracking(self, rows: list[Row]) -> None:
        if self.context.tensorboard is None:
            return
        # Events of a run that was killed after its last checkpoint are superseded.
        options = {"purge_step": rows[-1]["iteration"] + 1} if rows else {}
        self.accelerator.init_trackers("", init_kwargs={"tensorboard": options})
        if not rows:
            self.accelerator.log({"recipe": json.dumps(dataclasses.asdict(self.recipe))}, step=0)

    def _train(self, period: Period, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """Train one period, and return its row."""
        recipe, first = self.recipe, period.epoch * self.source.iterations_per_epoch + period.start
        torch.manual_seed(mixed("train", recipe.seed, period.epoch, period.start, self.accelerator.process_index))
        lr = recipe.learning_rate(period.epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        self.scores.zero_()
        taken, failure = 0, None
        begun = time.perf_counter()
        self.watch.begin(first)
        try:
            for images, labels in islice(batches, period.stop - period.start):
                self.step(images, labels)
                taken += 1
                # Several processes must end together: they see at the end of the row whether it diverged.
                if not self.watch(taken) and self.accelerator.num_processes == 1:
                    break
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            # The others of several processes would wait for this one.
            if self.accelerator.num_processes > 1:
                raise
            failure = str(error)
        examples = taken * recipe.batch_size
        values = self._means(self.scores, examples, "train")
        seconds = time.perf_counter() - begun
        row = {
            "epoch": period.epoch + 1,
            "iteration": first + taken,
            "lr": lr,
            **values,
            "test_loss": None,
            "test_error": None,
            "seconds": seconds,
        }
        if failure is not None:
            row |= {"train_loss": None, "diverged": True, "reason": failure}
        elif row["train_loss"] is None:
            row["diverged"] = True
        else:
            known = {"loss": values["train_loss"], "error": values["train_error"], "rate": examples / seconds}
            self.watch.report(row["iteration"], **known)
        return row

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float | None]:
        """Loss and error on the test set, in eval mode."""
        # The network without its wrappers: processes may have different numbers of batches.
        model = self.model.eval()
        if self.accelerator.num_processes > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, src=0)
        scores = new_scores(self.accelerator.device)
        for images, labels in self.source.test_batches():
            scores += score(model(images), labels)[1]
        return self._means(scores, self.source.num_test, "test")

    def _means(self, scores: Tensor, examples: int, split: str) -> dict[str, float | None]:
        """Loss and errors from the sums of all processes. A value that is not finite is None: JSON has no other."""
        loss, wrong, wrong_of_five = torch.as_tensor(self.accelerator.reduce(scores, "sum")).tolist()
        if not examples:
            return {f"{split}_loss": None, f"{split}_error": None}
        found = {
            f"{split}_loss": loss / examples if math.isfinite(loss) else None,
            f"{split}_error": 100 * wrong / examples,
        }
        if self.source.num_classes > 10:
            found[f"{split}_error_top5"] = 100 * wrong_of_five / examples
        return found


def _give_shapes(model: nn.Module, source: Source) -> None:
    """Make the weights of lazy layers here, like all others: a checkpoint, for one, does not fit layers without."""
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        with torch.no_grad():
            model.eval()(torch.zeros(2, *source.in_shape))


def _build(recipe: Recipe, source: Source) -> nn.Module:
    return build(
        recipe.model,
        recipe.norm,
        source.num_classes,
        source.in_shape,
        eps=recipe.norm_eps,
        dropout=recipe.dropout,
        width=recipe.width,
    )


def _silent(done: int, total: int, **values: float) -> None:
    """Progress of a process that is not the first."""
