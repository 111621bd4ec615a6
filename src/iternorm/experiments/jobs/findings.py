"""What an experiment makes of its results: the paper's numbers beside ours, and its claims, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from iternorm.experiments.jobs.results import Result


class Verdict(Enum):
    """What results say of a claim; `iternorm.experiments.evidence.rule` decides it for runs that differ in seeds."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    ONE_SEED = "one seed only"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Finding:
    """A verdict, and for one seed which way it points.

    Attributes:
        verdict: One of five.
        points: With one seed, whether it speaks for the claim; None where it speaks neither for nor against.
    """

    verdict: Verdict
    points: bool | None = None

    def __str__(self) -> str:
        if self.verdict is not Verdict.ONE_SEED:
            return self.verdict.value
        ways = {True: "points to it", False: "points against it", None: "points neither way"}
        return f"{self.verdict.value}, {ways[self.points]}"


def measured(holds: bool | None) -> Finding:
    """The finding of a measurement that does not depend on a seed; None if it was not made.

    Example:
        >>> str(measured(True)), str(measured(False)), str(measured(None))
        ('holds', 'does not hold', 'not run')
    """
    return Finding({True: Verdict.HOLDS, False: Verdict.FAILS, None: Verdict.NOT_RUN}[holds])


@dataclass(frozen=True)
class Comparison:
    """One number of the paper beside ours.

    Attributes:
        what: What was measured, such as ``BN, batch 256``.
        paper: The paper's number as it prints it, ``3.56 ± 0.12``; empty where the paper shows a curve only.
        ours: One value a seed; empty where it was not run, or where every run diverged.
        unit: Of both.
        note: A departure that concerns this number.
        count: How many repeats our single value is the mean or the median of; None if it is of one.
        num_diverged: How many runs diverged, and so have no value.
    """

    what: str
    paper: str
    ours: tuple[float, ...]
    unit: str = "%"
    note: str = ""
    count: int | None = None
    num_diverged: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether neither the paper nor we have anything to say."""
        return not (self.paper or self.ours or self.num_diverged)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, checked.

    Attributes:
        text: What the paper says.
        finding: What our results say of it.
        evidence: The numbers that decide it.
        coverage: How much of what the claim is about was run, ``1 of 4 configurations``; empty where it is all.
    """

    text: str
    finding: Finding
    evidence: str
    coverage: str = ""

    @property
    def verdict(self) -> Verdict:
        """One of five."""
        return self.finding.verdict


@dataclass(frozen=True)
class Contrast:
    """A network that was trained with BN and with IterNorm, or was to be: a row of "does it pay?".

    Attributes:
        name: Of the network and the data, in a few words; several contrasts may share it.
        network: The network, and how IterNorm stands in it.
        data: The data set.
        bn: The results with BN, one a seed; empty where there are none.
        iternorm: Those with IterNorm.
    """

    name: str
    network: str
    data: str
    bn: Sequence[Result]
    iternorm: Sequence[Result]
