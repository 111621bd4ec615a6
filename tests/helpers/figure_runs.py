"""Finished runs of a figure with given values, and the verdicts on its claims as signs."""

from iternorm.experiments.jobs.findings import Verdict
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.jobs.results import Result

ONE = Plan(seeds=1)


def result(config, losses=(1.0,), train=(50.0,), test=(50.0,), diverged=False):
    """A finished run with the given values, one a row; the last of each is repeated."""
    count = max(len(losses), len(train), len(test))
    columns = [[*values, *[values[-1]] * (count - len(values))] for values in (losses, train, test)]
    rows = [
        {"epoch": k + 1, "iteration": k + 1, "train_loss": loss, "train_error": error, "test_error": tested}
        for k, (loss, error, tested) in enumerate(zip(*columns, strict=True))
    ]
    if diverged:
        rows[-1] |= {"diverged": True, "train_loss": None, "test_error": None}
    return Result("x", config, rows, 1.0, {})


def results(module, values, plan=None):
    """Results of jobs of a module; `values(config)` gives what `result` takes, or None for a run that is missing."""
    found = [(config, values(config)) for config in module.jobs(plan or Plan())]
    return [result(config, **options) for config, options in found if options is not None]


SIGNS = {**dict(zip(Verdict, "+x?1-", strict=True)), True: ">", False: "<", None: "="}


def verdicts(module, found):
    """A sign for each claim: holds, fails, undecided, not run; and for one seed the way it points."""
    findings = [claim.finding for claim in module.claims(found)]
    return "".join(SIGNS[each.points if each.verdict is Verdict.ONE_SEED else each.verdict] for each in findings)
