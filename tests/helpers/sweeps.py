"""Sweeps of one experiment, and what they left."""

from typing import Any

from iternorm.experiments.jobs import overview, registry, sweep
from iternorm.experiments.jobs.registry import Plan


def swept(experiment, root, plan=None, **options) -> Any:
    return sweep.run(registry.select([experiment], plan or Plan()), root, **options)


def counted(experiment, root):
    state = overview.survey(experiment, root)
    return len(state.finished), state.total
