"""A study of somebody's own: from a file, through jobs, resume and report."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from iternorm.experiments.jobs import overview, ray_sweep, registry, sweep
from iternorm.experiments.jobs.registry import Context, Plan
from iternorm.experiments.study import Recipe, Result, TensorSource, plot_errors, train

ROOT = Path(__file__).parents[2]
RECIPE = Recipe("mine", "mine", "GroupNorm", 16, 0.1, 2, seed=1, momentum=0.9)

MINIMAL = """
from iternorm.experiments.study import Recipe

def jobs(plan):
    return [{"job": f"{name}-s{seed}", "norm": name, "seed": seed} for seed in range(plan.seeds or 1) for name in "ab"]

def run(config, context):
    context.step(1, 1)
    return [{"epoch": k, "train_error": 50 / k, "test_error": 60 / k} for k in (1, 2)]
"""


def written(folder, text=MINIMAL, name="mine"):
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def test_jobs_and_run_are_all_it_needs(tmp_path):
    path = written(tmp_path)
    (experiment,) = registry.get_all([str(path)])
    assert (experiment.id, experiment.home, experiment.title) == ("mine", "mine", "mine")
    assert not experiment.is_papers
    assert experiment.field("Command") == f"iternorm run {path}"
    outcomes = list(sweep.run(registry.select([experiment], Plan(seeds=2)), tmp_path / "r"))
    assert [outcome.what for outcome in outcomes] == ["ran"] * 4
    assert all(outcome.skipped for outcome in sweep.run(registry.select([experiment], Plan()), tmp_path / "r"))
    drawn, state = overview.draw(experiment, tmp_path / "r")
    assert drawn.stat().st_size > 5000
    assert len(state.finished) == 4
    assert len(experiment.plot(state.finished).axes[0].lines) == 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine", "def jobs(plan): return []", r"mine\.py is no study: it has no function run"),
        ("mine", "x = 1", r"it has no function jobs and no function run"),
        ("fig6", MINIMAL, r"'fig6' is that of an experiment of the paper: rename the file"),
        ("a b", MINIMAL, r"'a b' is no such name: rename the file"),
        ("all", MINIMAL, r"'all' is the word for all experiments: rename the file"),
    ],
)
def test_files_that_are_no_studies(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        registry.get(str(written(tmp_path, text, name)))


def test_a_missing_file_and_a_forgotten_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^there is no file .*none\.py"):
        registry.get(str(tmp_path / "none.py"))
    with pytest.raises(ValueError, match=r"no experiment is called 'study': .*its file, \./study\.py"):
        registry.get("study")
    written(tmp_path, name="study")
    with pytest.raises(ValueError, match=r"no experiment is called 'study': did you mean \./study\.py\?"):
        registry.get("study")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{'norm': 'BN'}", "a mapping with a name as its 'job' is needed"),
        ("'BN'", "a mapping with a name"),
        ("{'job': 'a', 'norm': print}", "plain values are needed"),
        ("{'job': 'a', 'lr': float('nan')}", "plain values are needed"),
        ("{'job': 'a', 1: 2}", "plain values are needed, under names that are strings"),
        ("{'job': '..'}", "a 'job' of at most 200 letters, digits and _ . = - is needed, without a dot in front"),
        ("{'job': 'a' * 300}", "a 'job' of at most 200 letters"),
        ("{'job': 'a/b'}", "a 'job' of at most 200 letters"),
    ],
)
def test_configurations_that_are_none(tmp_path, config, message):
    experiment = registry.get(str(written(tmp_path, f"def jobs(plan): return [{config}]\ndef run(c, x): pass")))
    with pytest.raises(ValueError, match=rf"jobs\(\) of .*mine\.py gives .*: {message}"):
        registry.select([experiment], Plan())


def test_a_study_without_jobs(tmp_path):
    experiment = registry.get(str(written(tmp_path, "def jobs(plan): return []\ndef run(c, x): pass")))
    with pytest.raises(ValueError, match=r"mine: jobs\(\) gives no configurations"):
        registry.select([experiment], Plan())


@pytest.mark.parametrize(
    ("rows", "label", "points"),
    [
        ([{"test_error": 60}, {"test_error": 30}], "row", [[1, 60], [2, 30]]),
        ([{"epoch": 3, "test_error": 60}, {"epoch": 6, "test_error": 30}], "epoch", [[3, 60], [6, 30]]),
        ([{"epoch": 3, "test_error": 60}, {"test_error": 30}], "row", [[1, 60], [2, 30]]),
    ],
)
def test_rows_without_epochs_are_numbered(rows, label, points):
    axes = plot_errors([Result("mine", {"job": "a"}, rows, 1.0, {})]).axes[0]
    assert axes.get_xlabel() == label
    assert np.asarray(axes.lines[1].get_xydata()).tolist() == points


def test_rows_without_errors_give_a_panel_that_says_so():
    axes = plot_errors([Result("mine", {"job": "a"}, [{"loss": 1.0}, {"test_error": None}], 1.0, {})]).axes[0]
    assert [text.get_text() for text in axes.texts] == ["no row has train_error or test_error"]


@pytest.mark.parametrize("norm", [["GroupNorm", 4], {"groups": 4}, None])
def test_norms_without_a_name_are_drawn_by_their_jobs(norm):
    rows = [{"epoch": 1, "test_error": 60}]
    axes = plot_errors([Result("mine", {"job": job, "norm": norm}, rows, 1.0, {}) for job in "ab"]).axes[0]
    assert [line.get_label() for line in axes.lines[::2]] == ["a", "b"]


def test_a_worker_of_ray_that_lacks_the_file_gets_its_text(tmp_path):
    path = written(tmp_path)
    experiment = registry.get(str(path))
    source = ray_sweep._source(experiment)
    assert source == (str(path), MINIMAL.encode())
    with ray_sweep._experiment("mine", "mine", source) as same:
        assert same.path == path
    path.unlink()
    with ray_sweep._experiment("mine", "mine", source) as copy:
        assert copy.path != path
        assert copy.path.read_text() == MINIMAL
        assert (copy.id, copy.jobs()) == ("mine", experiment.jobs())
    # A worker takes many jobs.
    assert not copy.path.parent.exists()


def images(count, seed=0, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator, dtype=torch.int32)
    pixels = torch.randint(0, 100, (count, 2, 8, 8), generator=generator)
    pixels += 50 * labels.view(-1, 1, 1, 1)
    return pixels.to(dtype), labels


def network(recipe, source):
    assert (source.num_classes, source.in_shape) == (3, (2, 8, 8))
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def open_images(recipe, device, *, rank, world_size):
    return TensorSource(recipe, device, images(64), images(33, 1), rank=rank, world_size=world_size)


def test_own_network_own_data_own_norm(tmp_path):
    pytest.importorskip("accelerate")
    context = Context("cpu", lambda *args, **values: None, tmp_path)
    rows = train(RECIPE, context, network=network, source=open_images)
    assert [row["iteration"] for row in rows] == [4, 8]
    assert rows[-1]["test_error"] * 33 % 100 == pytest.approx(0, abs=1e-6)
    assert context.record == {"precision": "fp32"}
    again = train(
        RECIPE, Context("cpu", lambda *args, **values: None, tmp_path / "b"), network=network, source=open_images
    )
    assert [row["train_loss"] for row in again] == [row["train_loss"] for row in rows]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.int16])
def test_own_images_are_normalized_by_their_own_statistics(dtype):
    source = TensorSource(RECIPE, "cpu", images(64, dtype=dtype), images(33, 1, dtype))
    batches = torch.cat([batch for batch, _ in source.train_batches(0)])
    assert batches.dtype == torch.float32
    assert batches.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(batches.std((0, 2, 3), correction=0), torch.ones(2))
    other = TensorSource(RECIPE, "cpu", images(64), images(33, 1), ([0.0, 0.0], [1.0, 1.0]))
    assert torch.equal(next(iter(other.test_batches()))[0], images(33, 1)[0].float())


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ((torch.zeros(4, 8, 8), torch.zeros(4).long()), None, r"train has images of shape \(4, 8, 8\) and labels"),
        (None, (torch.zeros(4, 2, 8, 8), torch.zeros(3).long()), r"test has images .* labels of shape \(3,\)"),
        (None, (torch.zeros(4, 2, 8, 8), torch.zeros(4)), "test has labels of torch.float32 from 0.0: whole numbers"),
        (None, (torch.zeros(4, 2, 8, 8), torch.full((4,), -1)), "labels of torch.int64 from -1"),
        (None, (torch.zeros(4, 1, 8, 8), torch.zeros(4).long()), r"different shapes, \(2, 8, 8\) and \(1, 8, 8\)"),
    ],
)
def test_tensors_that_do_not_fit(train, test, message):
    with pytest.raises(ValueError, match=message):
        TensorSource(RECIPE, "cpu", train or images(64), test or images(33, 1))


def test_the_command_line_takes_a_file(tmp_path):
    written(tmp_path)
    command = [sys.executable, "-m", "iternorm"]

    def call(*words):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "2 jobs: 2 ran" in call("run", "./mine.py")
    assert re.search(r"Written: .*mine\.png", call("plot", "./mine.py"))
    assert "Written: mine.html" in call("report", "./mine.py", "--out", ".")
    text = (tmp_path / "mine.md").read_text()
    assert text.startswith("# mine\n")
    assert "```sh\niternorm run mine.py\n```" in text
    # Without claims there are no verdicts to explain.
    assert "verdict" not in text


def test_a_command_can_be_pasted_whatever_the_folder_is_called(tmp_path):
    folder = tmp_path / "my studies"
    folder.mkdir()
    path = written(folder)
    assert shlex.split(registry.get(str(path)).field("Command")) == ["iternorm", "run", str(path)]
    with pytest.raises(ValueError, match="make them with `iternorm run ") as raised:
        overview.draw(registry.get(str(path)), tmp_path / "results", smoke=True)
    command = str(raised.value).split("`")[1]
    assert shlex.split(command) == ["iternorm", "run", str(path), "--smoke", "--results", str(tmp_path / "results")]
