"""Which examples an epoch has, in which order, and which of them are a process's."""

import torch
from torch import Tensor

from iternorm.experiments.recipe import Recipe


def check_share(recipe: Recipe, rank: int, world_size: int) -> None:
    """Refuse a batch that processes cannot share evenly.

    Raises:
        ValueError: They cannot, or there is no such process.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, but a number from 0 and below world_size={world_size} is needed")
    if recipe.batch_size % world_size:
        raise ValueError(
            f"batch_size={recipe.batch_size} of a recipe cannot be shared by {world_size} processes: "
            f"a multiple of {world_size} is needed"
        )


def num_examples(asked: int | None, there: int, argument: str, name: str) -> int:
    """How many examples to take of those that are there.

    Raises:
        ValueError: There are fewer than were asked for.
    """
    if asked is not None and asked > there:
        raise ValueError(f"{argument}={asked} of a recipe: {name} has {there}")
    return there if asked is None else asked


def iterations_per_epoch(recipe: Recipe, num_train: int) -> int:
    """Whole batches in the training set.

    Raises:
        ValueError: There is none.
    """
    if recipe.batch_size > num_train:
        raise ValueError(f"batch_size={recipe.batch_size} of a recipe: there are {num_train} training examples")
    return num_train // recipe.batch_size


def epoch_order(recipe: Recipe, num_train: int, generator: torch.Generator) -> Tensor:
    """Examples of an epoch in their order, whole batches only. A batch of all examples is not shuffled."""
    if recipe.batch_size == num_train:
        return torch.arange(num_train)
    return torch.randperm(num_train, generator=generator)[: num_train // recipe.batch_size * recipe.batch_size]


def shares(values: Tensor, recipe: Recipe, rank: int, world_size: int) -> Tensor:
    """A process's part of values ``[..., N]`` in the order of an epoch, ``[..., batches, share]``."""
    share = recipe.batch_size // world_size
    return values.unflatten(-1, (-1, world_size, share))[..., rank, :]


def share_of(count: int, rank: int, world_size: int) -> slice:
    """Which of `count` examples are a process's, as evenly as can be."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)
