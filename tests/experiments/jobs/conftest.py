from types import ModuleType
from typing import Any

import pytest

from iternorm.experiments.jobs.registry import Experiment


@pytest.fixture
def counting():
    """An experiment of two jobs that notes each run."""
    module: Any = ModuleType("counting", "Counts.\n\nCost: nothing.")
    module.ran = []

    def run(config, context):
        module.ran.append(config["job"])
        context.step(1, 1)
        return [{"value": 2 * config["number"]}, {"value": None}]

    module.jobs = lambda plan: [{"job": f"n{n}", "number": n, "pair": (n, n)} for n in (1, 2)]
    module.run = run
    return Experiment("counting", module)
