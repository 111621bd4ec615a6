"""An experiment that tests run in processes of their own.

`python tiny_experiment.py run tiny ...` is the command line with this module as its only experiment.
Where TINY_LOG names a file every run of a job adds a line to it. TINY_WAIT names a file that a job waits for. With
TINY_MEET=n a job waits until n jobs have begun. TINY_FORK makes a job fork a child that outlives it. TINY_LATE names a
rank that begins a second after the others.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from iternorm.experiments.jobs.findings import Claim, Comparison, measured

DEADLINE_SECONDS = 60
TESTS = Path(__file__).parent


def jobs(plan):
    seeds = range(plan.seeds or 1)
    names = ("bn", "dbn", "iter-norm", "plain")
    return [{"job": f"{name}-s{seed}", "seed": seed, "smoke": plan.smoke} for name in names for seed in seeds]


def run(config, context):
    kept = context.folder / "checkpoint"
    resumed = kept.exists()
    if "TINY_LATE" in os.environ and os.environ["TINY_LATE"] == os.environ.get("RANK"):
        time.sleep(1)
    kept.write_text("half of it")
    entry = {"job": config["job"], "pid": os.getpid(), "rank": os.environ.get("RANK"), "resumed": resumed}
    entry["data"] = os.environ.get("ITERNORM_DATA")
    log("begin", entry)
    if "TINY_FORK" in os.environ:
        child = os.fork()
        if child == 0:
            time.sleep(DEADLINE_SECONDS)
            os._exit(0)
        Path(os.environ["TINY_FORK"]).write_text(str(child))
    if "TINY_MEET" in os.environ:
        wait_until(lambda: len(log_entries()) >= int(os.environ["TINY_MEET"]))
    if "TINY_WAIT" in os.environ:
        wait_until(Path(os.environ["TINY_WAIT"]).exists)
    if config["job"].startswith(os.environ.get("TINY_FAIL", "none")):
        raise ZeroDivisionError(f"no {config['job']}")
    context.step(1, 1, loss=0.5, error=12.5, rate=1000.0)
    return [{"value": config["seed"], "diverged": True, "loss": None}]


def log(event, entry):
    if "TINY_LOG" in os.environ:
        with open(os.environ["TINY_LOG"], "a") as file:
            file.write(json.dumps({"event": event, **entry}) + "\n")


def log_entries(path=None):
    path = Path(path or os.environ["TINY_LOG"])
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(condition):
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("what a test waits for did not happen")
        time.sleep(0.01)


def plot(results):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([result.rows[0]["value"] for result in results], "o-")
    return figure


def compare(results):
    return [Comparison("BN_*", "7.5 ± 0.1", tuple(float(result.config["seed"]) for result in results))]


def claims(results):
    return [Claim("It | works.", measured(bool(results) or None), "a < b")]


def start(folder, *arguments, launcher=(), **variables):
    """The command line with the tiny experiment, in a process of its own."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TINY_LOG": str(folder / "log")}
    environment |= {name: str(value) for name, value in variables.items()}
    command = [sys.executable, *launcher, str(TESTS / "tiny_experiment.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def main():
    import tiny_experiment

    from iternorm import cli
    from iternorm.experiments.jobs import registry

    tiny_experiment.__doc__ = "Tiny: nothing.\n\nCommand: iternorm run tiny\nCost: none."
    registry.EXPERIMENTS = ("tiny",)
    sys.modules["iternorm.experiments.paper.tiny"] = tiny_experiment
    if "TINY_RAY_CPUS" in os.environ:
        import ray

        ray.init(address="local", num_cpus=int(os.environ["TINY_RAY_CPUS"]), include_dashboard=False)
    cli.app(prog_name="iternorm")


if __name__ == "__main__":
    main()
