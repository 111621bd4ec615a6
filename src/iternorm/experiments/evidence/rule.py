"""The rule by which runs that differ in their seeds decide a claim.

A difference of means decides if it is more than two standard errors (Welch's, of both means) and each side has three
seeds. With one seed the sign says which way it points, for a test error only if it is more than two binomial errors of
the test set. A training that diverged is worse than any that did not.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from iternorm.experiments.jobs.findings import Finding, Verdict

# Seeds on each side that a decision needs.
LEAST_SEEDS = 3
# Standard errors that a difference has to exceed.
ERRORS = 2.0


class Seeds(NamedTuple):
    """One number from several seeds of a training: a value for each run that finished, and how many diverged."""

    values: tuple[float, ...]
    num_diverged: int = 0

    def __format__(self, form: str) -> str:
        """Mean and deviation, ``3.56 ± 0.12 (5 seeds)``, in the given number format, ``.2f``."""
        if not self.values:
            return "diverged" if self.num_diverged else "not run"
        mean = f"{self.mean:{form or '.2f'}}"
        text = f"{mean} (one seed)"
        if len(self.values) > 1:
            # As many decimals as the mean has.
            same = form or ".2f" if "e" in mean else f".{len(mean.partition('.')[2])}f"
            text = f"{mean} ± {statistics.stdev(self.values):{same}} ({len(self.values)} seeds)"
        return text + (f", {self.num_diverged} diverged" if self.num_diverged else "")

    def __str__(self) -> str:
        return format(self, "")

    @property
    def mean(self) -> float:
        """Over the seeds that finished."""
        return statistics.fmean(self.values)

    @property
    def squared_error(self) -> float | None:
        """The square of the standard error of the mean; None with one seed, which cannot tell."""
        return statistics.variance(self.values) / len(self.values) if len(self.values) > 1 else None


class Difference(NamedTuple):
    """How far a mean is below another, its standard error where there is one, and the fewest seeds of either side."""

    value: float
    error: float | None
    num_seeds: int


def difference(low: Seeds, high: Seeds, num_test: int | None = None) -> Difference:
    """How far the mean of the first is below that of the second; both have values.

    Args:
        low: A number of one training.
        high: A number of the other.
        num_test: Where the numbers are errors in percent on so many test examples: with one seed, the standard error is
            that of their binomial distributions.
    """
    squares = squared_errors(low, high, num_test)
    error = None if squares is None else math.sqrt(sum(squares))
    return Difference(high.mean - low.mean, error, min(len(low.values), len(high.values)))


def squared_errors(low: Seeds, high: Seeds, num_test: int | None = None) -> tuple[float, float] | None:
    """The squares of the standard errors of two means, as `difference` takes them; None where they are not known."""
    squares = low.squared_error, high.squared_error
    if min(len(low.values), len(high.values)) == 1 and num_test is not None:
        squares = _binomial(low.mean, num_test), _binomial(high.mean, num_test)
    return None if squares[0] is None or squares[1] is None else (squares[0], squares[1])


def _binomial(percent: float, num_test: int) -> float:
    return percent * (100 - percent) / num_test


def decide(found: Difference, *, margin: float = 0.0) -> Finding:
    """Whether a difference is above a margin.

    Example:
        >>> [str(decide(Difference(value, 0.2, 3))) for value in (0.5, 0.3, -0.5)]
        ['holds', 'undecided', 'does not hold']
        >>> str(decide(Difference(0.5, None, 1)))
        'one seed only, points to it'
    """
    distance = found.value - margin
    limit = ERRORS * (found.error or 0.0)
    sign = True if distance > limit else False if distance < -limit else None
    if found.num_seeds == 1:
        return Finding(Verdict.ONE_SEED, sign)
    if found.num_seeds < LEAST_SEEDS or sign is None:
        return Finding(Verdict.UNDECIDED)
    return Finding(Verdict.HOLDS if sign else Verdict.FAILS)


def is_lower(low: Seeds, high: Seeds, *, margin: float = 0.0, num_test: int | None = None) -> Finding:
    """Whether the first mean is below the second, by more than a margin.

    Args:
        low: What is said to be lower.
        high: What it is compared with.
        margin: By how much it has to be lower. A negative one asks whether it is not much higher.
        num_test: See `difference`.
    """
    runs = [len(each.values) + each.num_diverged for each in (low, high)]
    if not all(runs):
        return Finding(Verdict.NOT_RUN)
    if not low.values and not high.values:
        return Finding(Verdict.ONE_SEED if min(runs) == 1 else Verdict.UNDECIDED)
    if low.values and high.values:
        found = difference(low, high, num_test)
    else:
        found = Difference(math.inf if low.values else -math.inf, None, min(runs))
    finding = decide(found, margin=margin)
    # The seeds that finished cannot speak for a training in which others diverged, nor is the last one the only.
    sign = {Verdict.HOLDS: True, Verdict.FAILS: False}.get(finding.verdict, finding.points)
    spoiled = {True: low.num_diverged, False: high.num_diverged, None: 0}[sign]
    left_alone = finding.verdict is Verdict.ONE_SEED and min(runs) > 1
    return Finding(Verdict.UNDECIDED) if spoiled or left_alone else finding


def is_lower_by(low: Seeds, high: Seeds, amount: float, *, num_test: int | None = None) -> Finding:
    """Whether the first mean is below the second by as much as an amount, up to the errors; see `reaches`."""
    lower = is_lower(low, high, num_test=num_test)
    if not low.values or not high.values:
        return lower
    return reaches(lower, difference(low, high, num_test), amount, spoiled=high.num_diverged > 0)


def reaches(lower: Finding, found: Difference, amount: float, *, spoiled: bool) -> Finding:
    """What the finding that something is lower becomes where it has to be so by an amount.

    It stays if the amount is at most two standard errors above the difference, and fails if it is more.

    Args:
        lower: Whether it is lower at all.
        found: By how much.
        amount: By how much it is said to be.
        spoiled: Whether seeds of the higher side diverged: with them the difference would be larger.
    """
    if found.error is None:
        return Finding(lower.verdict)
    if found.value + ERRORS * found.error >= amount:
        return lower
    if spoiled:
        return Finding(Verdict.UNDECIDED)
    if found.num_seeds >= LEAST_SEEDS:
        return Finding(Verdict.FAILS)
    return Finding(lower.verdict, False if lower.verdict is Verdict.ONE_SEED else None)


def is_below(seeds: Seeds, limit: float, *, num_test: int | None = None) -> Finding:
    """Whether a mean is below a fixed number. What diverged is above any."""
    return _beyond(seeds, limit, num_test, above=False)


def is_above(seeds: Seeds, limit: float, *, num_test: int | None = None) -> Finding:
    """Whether a mean is above a fixed number. What diverged is above any."""
    return _beyond(seeds, limit, num_test, above=True)


def _beyond(seeds: Seeds, limit: float, num_test: int | None, *, above: bool) -> Finding:
    sign = 1 if above else -1
    if not seeds.values:
        runs = seeds.num_diverged
        return decide(Difference(sign * math.inf, None, runs)) if runs else Finding(Verdict.NOT_RUN)
    square = seeds.squared_error
    if square is None and num_test is not None:
        square = _binomial(seeds.mean, num_test)
    error = None if square is None else math.sqrt(square)
    finding = decide(Difference(sign * (seeds.mean - limit), error, len(seeds.values)))
    spoiled = seeds.num_diverged and finding.verdict in (
        Verdict.ONE_SEED,
        Verdict.FAILS if above else Verdict.HOLDS,
    )
    return Finding(Verdict.UNDECIDED) if spoiled else finding


def is_no_lower(low: Seeds, high: Seeds, *, visible: float, num_test: int | None = None) -> Finding:
    """Whether the first mean is not significantly below the second.

    To hold, or to point to it, there must be no significant difference where one of the size `visible` would have been
    seen.
    """
    lower = is_lower(low, high, num_test=num_test)
    opposite = {Verdict.HOLDS: Verdict.FAILS, Verdict.FAILS: Verdict.HOLDS}
    sees = False
    if low.values and high.values:
        error = difference(low, high, num_test).error
        sees = error is not None and ERRORS * error <= visible
    if lower.verdict is Verdict.ONE_SEED:
        points = {True: False, False: True, None: True if sees else None}
        return Finding(Verdict.ONE_SEED, points[lower.points])
    enough = min(len(low.values), len(high.values)) >= LEAST_SEEDS and not low.num_diverged + high.num_diverged
    if lower.verdict is Verdict.UNDECIDED and sees and enough:
        return Finding(Verdict.HOLDS)
    return Finding(opposite.get(lower.verdict, lower.verdict))


def all_of(findings: Iterable[Finding]) -> Finding:
    """The finding for a claim that needs all of its parts."""
    found = list(findings)
    for verdict in (Verdict.FAILS, Verdict.NOT_RUN, Verdict.UNDECIDED):
        if any(each.verdict is verdict for each in found):
            return Finding(verdict)
    single = [each.points for each in found if each.verdict is Verdict.ONE_SEED]
    if single:
        return Finding(Verdict.ONE_SEED, False if False in single else None if None in single else True)
    return Finding(Verdict.HOLDS if found else Verdict.NOT_RUN)


def over_parts(findings: Mapping[str, Finding], parts: str) -> tuple[Finding, str]:
    """The finding for a claim about several parts of which some were run, and the coverage.

    It does not hold where one part says so. It holds where those that are decided do, none is undecided and no single
    seed points against it; the coverage counts what the verdict stands on.

    Args:
        findings: By part.
        parts: What the parts are called, ``configurations``.

    Example:
        >>> held, missing = Finding(Verdict.HOLDS), Finding(Verdict.NOT_RUN)
        >>> finding, coverage = over_parts({"a": held, "b": missing}, "configurations")
        >>> str(finding), coverage
        ('holds', '1 of 2 configurations')
    """
    found = list(findings.values())

    def among(*verdicts: Verdict) -> list[Finding]:
        return [each for each in found if each.verdict in verdicts]

    if standing := among(Verdict.FAILS):
        finding = standing[0]
    elif among(Verdict.HOLDS):
        standing = among(Verdict.HOLDS)
        against = [each for each in among(Verdict.ONE_SEED) if each.points is False] + among(Verdict.UNDECIDED)
        if against:
            standing = among(Verdict.HOLDS, Verdict.UNDECIDED, Verdict.ONE_SEED)
        finding = Finding(Verdict.UNDECIDED) if against else standing[0]
    else:
        standing = among(Verdict.UNDECIDED) or among(Verdict.ONE_SEED)
        finding = all_of(standing)
    if not standing or len(standing) == len(found):
        return finding, ""
    return finding, f"{len(standing)} of {len(found)} {parts}"
