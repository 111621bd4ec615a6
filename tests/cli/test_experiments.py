"""The verbs for experiments: ls, run, plot and report. What plot and report write is in test_figures_and_reports.py."""

import os
import shutil
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import tiny_experiment
import torch
from terminal import words

from iternorm.experiments.data import datasets as data
from iternorm.experiments.jobs import console, locks, overview, ray_sweep, registry, results
from iternorm.timing.threads import num_threads


def test_ls_lists_every_experiment(invoke):
    invoke("run", "fig1", "--smoke")
    result = invoke("ls")
    assert result.exit_code == 0, result.output
    for name in registry.EXPERIMENTS:
        assert name in result.stdout
    # A smoke run is no result.
    assert "0 of 1" in result.stdout
    assert "1 of 1" in invoke("ls", "--smoke").stdout


def test_ls_counts_what_runs(invoke, tiny, tmp_path):
    invoke("run", "tiny", "--only", "bn-s0")
    config = tiny.jobs()[3]
    with locks.claim(registry.lock_path(tmp_path / "results", "tiny", config)):
        line = next(line for line in invoke("ls").stdout.splitlines() if line.startswith("tiny"))
    assert words(line) == "tiny Tiny: nothing an hour 2 of 4, 1 running"


def test_run_then_plot(invoke, tmp_path):
    first, second = (invoke("run", "fig2", "--smoke") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert "finished before" not in first.stdout
    assert "2 jobs: 2 ran" in first.stdout
    assert second.stdout.count("(finished before)") == 2
    result = invoke("plot", "fig2", "--smoke")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "results" / "fig2" / "fig2-smoke.png").stat().st_size > 2000
    assert invoke("plot", "fig2", "--smoke", "--out", "x/fig.svg").exit_code == 0
    assert (tmp_path / "x" / "fig.svg").read_text().startswith("<?xml")


def test_an_experiment_without_results_keeps_no_other_from_being_drawn(invoke, tmp_path):
    assert invoke("run", "fig2", "--smoke").exit_code == 0
    result = invoke("plot", "fig1", "fig2", "--smoke")
    assert result.exit_code == 2
    assert "fig2-smoke.png" in result.stdout
    assert "fig1: none of 1 results" in result.stderr


@pytest.mark.parametrize("verb", ["run", "plot"])
def test_without_an_id_the_usage_is_shown(invoke, verb):
    result = invoke(verb)
    assert result.exit_code == 2
    assert "Missing argument 'ID'" in result.stderr


def test_run_takes_several_ids_seeds_and_a_selection(invoke, tiny):
    result = invoke("run", "all", "--smoke", "--seeds", 2, "--only", "smoke", "--only", "*bn-s1")
    assert result.exit_code == 0, result.output
    assert "3 jobs: 3 ran" in result.stdout
    for job in ("fig1/smoke-", "tiny/bn-s1-", "tiny/dbn-s1-"):
        assert job in result.stdout
    result = invoke("plot", "fig1", "tiny", "--smoke")
    assert "results/fig1/fig1-smoke.png\n" in result.stdout
    # What is not there is not drawn, and counted.
    assert "results/tiny/tiny-smoke.png  (2 of 6)" in result.stdout


def test_run_names_a_file_it_sets_aside(invoke, tmp_path):
    invoke("run", "fig1", "--smoke", "--results", "r")
    (path,) = (tmp_path / "r" / "fig1").iterdir()
    path.write_text("{")
    result = invoke("run", "fig1", "--smoke", "--results", "r")
    assert result.exit_code == 0, result.output
    assert "is not complete JSON" in words(result.stderr)
    assert f"renamed to {path.name}.unusable" in words(result.stderr)


def test_run_says_what_somebody_else_works_on(invoke, tiny, tmp_path):
    config = tiny.jobs()[0]
    with locks.claim(registry.lock_path(tmp_path / "results", "tiny", config)):
        result = invoke("run", "tiny")
    assert result.exit_code == 0
    assert f"{results.result_path(tmp_path, 'tiny', config).name}  (running elsewhere)" in result.stdout
    assert "4 jobs: 1 running elsewhere, 3 ran" in result.stdout


def test_a_job_that_fails_is_named_and_the_others_run(invoke, tiny, monkeypatch):
    monkeypatch.setenv("TINY_FAIL", "dbn")
    result = invoke("run", "tiny")
    assert result.exit_code == 2
    assert "4 jobs: 3 ran, 1 failed" in result.stdout
    # Its stack is shown: this is no mistake of the user's.
    assert "ZeroDivisionError: no dbn-s0" in result.stderr
    assert "error: 1 of 4 jobs failed: tiny dbn-s0: no dbn-s0" in words(result.stderr)
    monkeypatch.setenv("ITERNORM_TRACEBACK", "1")
    assert isinstance(invoke("run", "tiny").exception, ZeroDivisionError)


def test_why_a_job_failed_is_said_at_once(invoke, tiny, monkeypatch):
    def run(config, context):
        if config["job"] == tiny.jobs()[0]["job"]:
            raise FileNotFoundError("no folder there")
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_experiment, "run", run)
    result = invoke("run", "tiny")
    assert result.exit_code == 130
    assert f"tiny {tiny.jobs()[0]['job']} failed: no folder there" in words(result.stderr)


def test_a_data_folder_that_is_missing_is_said_once_or_twice(invoke, tiny, monkeypatch):
    def run(config, context):
        raise FileNotFoundError("no folder there")

    monkeypatch.setattr(tiny_experiment, "run", run)
    result = invoke("run", "tiny")
    assert result.exit_code == 2
    assert "4 jobs: 2 failed, 2 not tried" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_package_that_a_job_misses_is_named_with_its_extra(invoke, tiny, monkeypatch):
    def run(config, context):
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")

    monkeypatch.setattr(tiny_experiment, "run", run)
    result = invoke("run", "tiny")
    assert result.exit_code == 2
    assert "error: this needs accelerate: pip install 'iternorm[experiments]'" in words(result.stderr)


def test_a_warning_of_a_job_is_one_line(invoke, tiny, monkeypatch):
    def run(config, context):
        warnings.warn("the checkpoint is damaged", stacklevel=2)
        return [{"value": 1}]

    monkeypatch.setattr(tiny_experiment, "run", run)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = invoke("run", "tiny", "--only", "dbn")
    assert result.exit_code == 0, result.output
    assert result.stderr == "warning: the checkpoint is damaged\n"


def test_an_interrupt_says_how_to_go_on(invoke, tiny, monkeypatch):
    def run(config, context):
        (context.folder / "checkpoint").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_experiment, "run", run)
    result = invoke("run", "tiny")
    assert result.exit_code == 130
    assert "the same command goes on from the last checkpoint" in words(result.stderr)
    assert overview.survey(tiny, Path("results")).running == 0


def test_data_and_options_reach_the_job(invoke, tiny, monkeypatch, tmp_path):
    seen = []

    def run(config, context):
        seen.append((os.environ["ITERNORM_DATA"], context.tensorboard, context.compile))
        return [{}]

    monkeypatch.setattr(tiny_experiment, "run", run)
    monkeypatch.setenv("ITERNORM_DATA", "before")
    (tmp_path / "d").mkdir()
    arguments = ("--only", "dbn", "--data", "d", "--tensorboard", "--compile", "--results", "r")
    assert invoke("run", "tiny", *arguments).exit_code == 0
    name = results.result_path(tmp_path, "tiny", tiny.jobs()[1]).stem
    assert seen == [(str(tmp_path / "d"), Path("r/.tensorboard/tiny") / name, True)]
    assert os.environ["ITERNORM_DATA"] == "before"


@pytest.mark.parametrize("smoke", [True, False])
def test_the_small_size_runs_on_one_thread(invoke, tiny, monkeypatch, smoke):
    seen = []

    def run(config, context):
        seen.append(torch.get_num_threads())
        return [{"value": 1}]

    monkeypatch.setattr(tiny_experiment, "run", run)
    with num_threads(2):
        assert invoke("run", "tiny", "--only", "dbn", *(["--smoke"] if smoke else [])).exit_code == 0
        assert torch.get_num_threads() == 2
    assert seen == [1 if smoke else 2]


def test_the_data_folder_decides_which_jobs_the_small_size_has(invoke, tiny, monkeypatch, tmp_path):
    def jobs(plan):
        return [{"job": "a", "data": data.real_or_generated("mnist")}]

    monkeypatch.setattr(tiny_experiment, "jobs", jobs)
    monkeypatch.setattr(tiny_experiment, "run", lambda config, context: [{"value": 1}])
    (tmp_path / "d" / "mnist").mkdir(parents=True)
    for name in data.MNIST_MD5:
        (tmp_path / "d" / "mnist" / name).touch()
    assert invoke("run", "tiny", "--smoke", "--data", "d").exit_code == 0
    real = results.result_path(tmp_path / "results", "tiny", {"job": "a", "data": "mnist"})
    assert [path.name for path in (tmp_path / "results" / "tiny").iterdir()] == [real.name]

    def listed(*arguments):
        return next(line for line in invoke("ls", "--smoke", *arguments).stdout.splitlines() if line.startswith("tiny"))

    assert "1 of 1" in listed("--data", "d")
    assert "0 of 1" in listed()
    assert invoke("plot", "tiny", "--smoke", "--data", "d").exit_code == 0
    assert "none of 1 results" in invoke("plot", "tiny", "--smoke").stderr


@pytest.mark.parametrize("verb", [("ls",), ("plot", "tiny"), ("report", "tiny")])
def test_a_results_file_that_cannot_be_used_is_named(invoke, tiny, verb):
    invoke("run", "tiny")
    path = results.result_path(Path("results"), "tiny", tiny.jobs()[0])
    path.write_bytes(b"\xff\xfe")
    result = invoke(*verb)
    assert result.exit_code == 0, result.output
    assert f"warning: {path} is not UTF-8 text" in words(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (["fig1", "--ray"], None),
        (["--ray", "fig1"], None),
        (["fig1", "--ray", "--smoke"], None),
        (["fig1", "--ray", "auto"], "auto"),
        (["--ray", "ray://host:10001", "fig1"], "ray://host:10001"),
        (["fig1", "--ray=10.0.0.1:6379", "--gpus-per-job", "0.25"], "10.0.0.1:6379"),
    ],
)
def test_ray_stands_with_and_without_an_address(invoke, monkeypatch, arguments, address):
    asked = []

    def run(jobs, root, options, *, address, gpus_per_job, progress):
        asked.append((len(jobs), address, gpus_per_job))
        return iter(())

    # Whether Ray is installed or not.
    present = ModuleType("ray")
    present.__spec__ = ModuleSpec("ray", None)
    monkeypatch.setitem(sys.modules, "ray", present)
    monkeypatch.setattr(ray_sweep, "run", run)
    result = invoke("run", *arguments)
    assert result.exit_code == 0, result.output
    assert asked == [(1, address, 0.25 if "0.25" in arguments else 1.0)]


def test_ray_that_is_missing_is_named_with_its_extra(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = invoke("run", "fig1", "--ray")
    assert result.exit_code == 2
    assert result.stderr == "error: this needs ray: pip install 'iternorm[ray]'\n"


@pytest.mark.parametrize("place", ["r", "r/.work", "r/tiny"])
def test_a_folder_of_results_that_cannot_be_written_is_said_before_the_work(invoke, tiny, monkeypatch, tmp_path, place):
    monkeypatch.setattr(tiny_experiment, "run", lambda *_: pytest.fail("work before the folder was looked at"))
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).touch()
    # Typer sees a file at the folder itself; below it, or where it is no plain file, it does not.
    results = "/dev/null" if place == "r" else "r"
    result = invoke("run", "tiny", "--results", results)
    assert result.exit_code == 2
    said = words(result.stderr)
    assert said.startswith(f"error: {results}/")
    assert f"{'/dev/null' if place == 'r' else place} is not a folder: make room, change permissions" in said
    assert said.count("cannot be written") == 1


def test_finished_jobs_need_no_folder_that_can_be_written(invoke, tiny, tmp_path):
    assert invoke("run", "tiny").exit_code == 0
    shutil.rmtree(tmp_path / "results" / ".work")
    (tmp_path / "results" / ".work").touch()
    assert "4 jobs: 4 finished before" in invoke("run", "tiny").stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "fig44"], "did you mean fig4"),
        (["run", "fig4", "fig55"], "did you mean fig5"),
        (
            ["run", "fig3", "--smoke", "--data", "nowhere"],
            "--data nowhere does not exist: name the folder of data sets",
        ),
        (["ls", "--data", "nowhere"], "--data nowhere does not exist"),
        (["plot", "zebra"], "all are: fig1"),
        (["plot", "fig1"], "fig1: none of 1 results is in results: make them with `iternorm run fig1`"),
        (["plot", "fig1", "--smoke", "--results", "a b"], "them with `iternorm run fig1 --smoke --results 'a b'`"),
        (["plot", "fig1", "fig2", "--out", "x.png"], "one file, for one experiment"),
        (["plot", "fig1", "--out", "figure"], "--out figure does not say the kind of figure: end its name with .png"),
        (["plot", "fig1", "--out", "a.txt"], "--out a.txt does not say the kind of figure: end its name with .png"),
        (["report", "--results", "reslts"], "--results reslts is no folder: `iternorm run` makes it"),
        (["run", "fig4", "--only", "zz"], "--only 'zz' selects no job: the names are d2, d4"),
        (["run", "fig4", "--seeds", "0"], "seeds=0 runs nothing"),
        (["run", "fig4", "--gpus-per-job", "0.25"], "--gpus-per-job 0.25 is for --ray: add it, or start several such"),
        (["run", "fig4", "--device", "tpu"], "device='tpu' is not known here"),
    ],
)
def test_what_is_wrong_is_one_line_and_changes_nothing(invoke, tmp_path, arguments, text):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words(result.stderr).startswith("error: ")
    assert text in words(result.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_run_on_cuda_without_a_device(invoke):
    result = invoke("run", "fig1", "--device", "cuda")
    assert result.exit_code == 2
    assert result.stderr == "error: device='cuda' needs a CUDA device and torch sees none: use device='cpu'\n"


def test_run_tells_its_progress_where_there_is_no_terminal(invoke, tiny, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    result = invoke("run", "tiny", "--only", "dbn-s0")
    assert result.exit_code == 0
    assert words(result.stderr).startswith("tiny dbn-s0: 1 of ")
