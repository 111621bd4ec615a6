"""The order in which candidates are timed."""

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(candidates: Sequence[T], rounds: int, warmup: int) -> Iterator[tuple[int, T]]:
    """Yield every candidate once per round, with the round's number; discard the `warmup` rounds below zero.

    A slow moment of the machine then affects all candidates alike. The order is shuffled in each round, so that no
    candidate always follows the same one and finds its caches. The shuffles are the same in every run.
    """
    shuffled = random.Random(0)
    for index in range(-warmup, rounds):
        for candidate in shuffled.sample(candidates, len(candidates)):
            yield index, candidate
