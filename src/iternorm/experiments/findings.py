"""What an experiment makes of its results: the paper's numbers beside ours, and its claims, checked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """One number of the paper beside ours.

    Attributes:
        what: What was measured, such as ``BN, batch 256``.
        paper: The paper's number as it prints it, ``3.56 ± 0.12``; empty where the paper shows a curve only.
        ours: One value a seed; empty where it was not run.
        unit: Of both.
        note: A departure that concerns this number.
    """

    what: str
    paper: str
    ours: tuple[float, ...]
    unit: str = "%"
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, checked.

    Attributes:
        text: What the paper says.
        holds: Whether our results agree; None where it was not run, or cannot be decided from what was run.
        evidence: The numbers that decide it.
    """

    text: str
    holds: bool | None
    evidence: str
