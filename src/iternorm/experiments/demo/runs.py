"""The demonstration: the paper's MLP on handwritten digits with four normalizations.

What it follows: the paper's Section 4.2 and Figure 3 (a): full-batch gradient, a 4-layer MLP with 100 units in each
hidden layer, the best of the learning rates 0.2, 0.5, 1, 2, 5 by training loss. The rate is chosen with the first seed,
and trained again with others.
The paper's claim: all normalizations train much better than none; DBN trains less efficiently than IterNorm and tests
worse.
Command: ``iternorm demo``. Cost: about 40 seconds on one CPU core.
Departures: scikit-learn's digits (1797 real handwritten digits of 8x8 pixels) in place of MNIST, 60 steps, and DBN in
groups of 16 channels. In one group of 100 DBN reaches a condition number of 1.00 and a test error of 64 % (seed 0): the
first layer has 100 units for 64 pixels, so its covariance is singular, and exact whitening amplifies what is not there.
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from iternorm.analysis.conditioning import condition_number, covariance, effective_rank, spectrum
from iternorm.analysis.operations import operation_of
from iternorm.analysis.stochasticity import snd
from iternorm.experiments.data.digits import Digits, load_digits
from iternorm.layers.norms import DecorrelatedBatchNorm1d, IterNorm1d
from iternorm.networks.models import MLP, NormFactory
from iternorm.report.provenance import provenance
from iternorm.timing.threads import num_threads

LEARNING_RATES = (0.2, 0.5, 1.0, 2.0, 5.0)
# Of the batches whose noise is measured: as large as those that networks are trained with.
NOISE_BATCH = 128


@dataclass(frozen=True)
class Method:
    """One normalization of the comparison."""

    name: str
    description: str
    norm: NormFactory | None


METHODS = (
    Method("none", "no normalization (the paper's “plain”)", None),
    Method("BN", "torch.nn.BatchNorm1d: every channel to mean 0 and variance 1", nn.BatchNorm1d),
    Method(
        "DBN",
        "DecorrelatedBatchNorm1d, ZCA, groups of 16 channels: every group whitened exactly, by eigenvalues",
        partial(DecorrelatedBatchNorm1d, group_size=16, solver="zca"),
    ),
    Method(
        "IterNorm",
        "IterNorm1d, T=5, all 100 channels together: whitened by five Newton steps",
        partial(IterNorm1d, group_size=None, num_iters=5),
    ),
)


def check_arguments(epochs: int, seed: int, num_seeds: int) -> None:
    """Raise a ValueError for what `run` cannot do."""
    if epochs < 1:
        raise ValueError(f"epochs={epochs} trains nothing: use 1 or more")
    if seed < 0:
        raise ValueError(f"seed={seed} is negative: use 0 or more")
    if num_seeds < 1:
        raise ValueError(f"seeds={num_seeds} trains nothing: use 1 or more, and 3 or more for an error bar")


def count_steps(epochs: int, num_seeds: int) -> int:
    """How often `run` calls its `progress`."""
    return len(METHODS) * (len(LEARNING_RATES) + num_seeds - 1) * epochs


def run(*, epochs: int = 60, seed: int = 0, num_seeds: int = 5, progress: Callable[[str], None] | None = None) -> dict:
    """Train the network with every normalization and learning rate, and the best rate with several seeds.

    Given the seed the results are the same at every call on one machine, times aside.

    Args:
        epochs: Passes over the training set; each is one step on all of it.
        seed: The first seed. It decides the initial weights, which are the same for every normalization and learning
            rate.
        num_seeds: How many seeds are trained with the learning rate that was best with the first one.
        progress: Called after each step with what is being trained; there are `count_steps(epochs, num_seeds)` of them.

    Returns:
        A dictionary that `json.dumps` takes: `config`, `provenance`, `seconds`, and in `methods`, for each, the
        learning rate with the least training loss, the final loss of every learning rate, and in `runs` the training
        of each seed (see `train`).
    """
    check_arguments(epochs, seed, num_seeds)
    digits = load_digits()
    # A network this small gains nothing from more threads, and their number would change the last digits.
    with num_threads(1):
        return _run(digits, epochs, range(seed, seed + num_seeds), progress or (lambda description: None))


def _run(digits: Digits, epochs: int, seeds: range, progress: Callable[[str], None]) -> dict:
    start = time.perf_counter()
    methods = []
    for method in METHODS:
        runs = []
        for learning_rate in LEARNING_RATES:
            notify = partial(progress, f"{method.name}, learning rate {learning_rate:g}")
            runs.append(train(method, learning_rate, digits, epochs=epochs, seed=seeds[0], progress=notify))
        best = min(runs, key=lambda run: math.inf if run["train_loss"][-1] is None else run["train_loss"][-1])
        others = []
        for seed in seeds[1:]:
            notify = partial(progress, f"{method.name}, seed {seed}")
            others.append(train(method, best["learning_rate"], digits, epochs=epochs, seed=seed, progress=notify))
        methods.append(
            {
                "name": method.name,
                "description": method.description,
                "learning_rate": best["learning_rate"],
                "loss_of_learning_rate": {f"{run['learning_rate']:g}": run["train_loss"][-1] for run in runs},
                "runs": [best, *others],
            }
        )
    return {
        "config": {
            "data": "scikit-learn digits",
            "num_train": len(digits.train_images),
            "num_test": len(digits.test_images),
            "epochs": epochs,
            "seeds": list(seeds),
            "learning_rates": list(LEARNING_RATES),
            "noise_batch": NOISE_BATCH,
        },
        "methods": methods,
        "seconds": time.perf_counter() - start,
        "provenance": provenance(),
    }


def train(
    method: Method,
    learning_rate: float,
    digits: Digits,
    *,
    epochs: int,
    seed: int,
    progress: Callable[[], None],
) -> dict:
    """Train one network with plain SGD on the full batch.

    Returns:
        `train_loss` (after 0, 1, ..., `epochs` steps, on the training set, with its own statistics; None where it is
        not finite), `test_error` (in %, after the same steps, with the running statistics), `seconds`, and of the last
        hidden layer the `conditioning` and the `noise` (see `last_layer_conditioning` and `last_layer_noise`).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MLP(digits.train_images.shape[1], 10, method.norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses, errors = [], [_test_error(model, digits)]
    start = time.perf_counter()
    for _ in range(epochs):
        loss = cross_entropy(model.train()(digits.train_images), digits.train_labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(_test_error(model, digits))
        progress()
    with torch.no_grad():
        losses.append(cross_entropy(copy.deepcopy(model).train()(digits.train_images), digits.train_labels).item())
    return {
        "learning_rate": learning_rate,
        "seed": seed,
        "train_loss": [loss if math.isfinite(loss) else None for loss in losses],
        "test_error": errors,
        "seconds": time.perf_counter() - start,
        "conditioning": last_layer_conditioning(model, digits.train_images),
        "noise": last_layer_noise(model, digits.train_images),
    }


@torch.no_grad()
def last_layer_conditioning(model: MLP, images: Tensor) -> dict | None:
    """Condition number, effective rank and spectrum of the last hidden layer, before and after its normalization.

    All of `images` are put through a copy of the network in double precision as one batch in training mode, which is
    what a training step does. `before` is the output of the last hidden linear layer. `after` is what its normalization
    makes of it, without scale and shift, before the ReLU. The covariance is taken over the images. Without a
    normalization the two are the same. None where the network has diverged.
    """
    model = copy.deepcopy(model).double()
    norm = model.norms[-1]
    for parameter, value in (("weight", 1.0), ("bias", 0.0)):
        if (tensor := getattr(norm, parameter, None)) is not None:
            tensor.fill_(value)
    before, after = _around_last_norm(model, images)
    if not (before.isfinite().all() and after.isfinite().all()):
        return None
    result = {}
    for place, activation in (("before", before), ("after", after)):
        matrix = covariance(activation)
        number = condition_number(matrix).item()
        result[place] = {
            "condition_number": number if math.isfinite(number) else None,
            "effective_rank": effective_rank(matrix).item(),
            "eigenvalues": spectrum(matrix).tolist(),
        }
    return result


@torch.no_grad()
def last_layer_noise(model: MLP, images: Tensor) -> float | None:
    """How much batch statistics shake the last norm's output, in % of its length (SND, the paper's Eq. 10).

    Batches of `NOISE_BATCH` are drawn from `images`, as training in small batches would draw them. None without a
    normalization, which looks at no batch, and where the network has diverged.
    """
    operation = operation_of(model.norms[-1])
    before, _ = _around_last_norm(copy.deepcopy(model).double(), images)
    if operation is None or not before.isfinite().all():
        return None
    return 100 * snd(operation, before, NOISE_BATCH, samples=200, draws=30).relative


def _around_last_norm(model: MLP, images: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output of the last norm in training mode, all images in one batch; the model is a copy in fp64."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen.extend((inputs[0], output))

    model.norms[-1].register_forward_hook(keep)
    model.train()(images.double())
    return seen[0], seen[1]


@torch.no_grad()
def _test_error(model: MLP, digits: Digits) -> float:
    predicted = model.eval()(digits.test_images).argmax(1)
    return 100 * (predicted != digits.test_labels).double().mean().item()
