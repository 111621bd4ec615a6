"""Whose turn it is: in what order rivals are timed."""

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(rivals: Sequence[T], rounds: int, warmup: int) -> Iterator[tuple[int, T]]:
    """Every rival once a round, with the number of the round; of those below zero, `warmup` of them, nothing is kept.

    A slow moment of the machine falls on all alike. The order is another one each round, so that nobody always follows
    the same rival, whose caches it would find; and the same in every run.
    """
    shuffled = random.Random(0)
    for index in range(-warmup, rounds):
        for rival in shuffled.sample(rivals, len(rivals)):
            yield index, rival
