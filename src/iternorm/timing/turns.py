"""The order in which rivals are timed."""

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(rivals: Sequence[T], rounds: int, warmup: int) -> Iterator[tuple[int, T]]:
    """Yield every rival once per round, with the round's number; the `warmup` rounds below zero are to be discarded.

    A slow moment of the machine then affects all rivals alike. The order is shuffled in each round, so that no rival
    always follows the same one and finds its caches. The shuffles are the same in every run.
    """
    shuffled = random.Random(0)
    for index in range(-warmup, rounds):
        for rival in shuffled.sample(rivals, len(rivals)):
            yield index, rival
