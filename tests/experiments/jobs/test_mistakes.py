"""Mistakes in a study's file: each is one sentence, which names the place."""

import re
import subprocess
import sys

import pytest
from sweeps import swept

from iternorm.experiments.evidence import reproduction
from iternorm.experiments.jobs import overview, registry
from iternorm.experiments.jobs.mistakes import StudyError
from iternorm.experiments.jobs.registry import Plan

WORKS = """
def jobs(plan):
    return [{"job": "a", "norm": "BN"}]

def run(config, context):
    return [{"epoch": 1, "train_error": 50, "test_error": 60}]
"""


def written(folder, text):
    path = folder / "mine.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\ndef jobs(plan:\n", r"line 2: SyntaxError: '\(' was never closed"),
        ("\nimport nowhere_at_all\n", "line 2: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def half(x):\n    return x / 0\n\nhalf(1)\n", "line 2, in half: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        ("raise StopIteration\n", "line 1: StopIteration"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, text, sentence):
    path = written(tmp_path, text)
    with pytest.raises(StudyError, match=f"^{re.escape(str(path))}, {sentence}$"):
        registry.get(str(path))


def test_a_mistake_in_a_neighbour_is_named_with_the_line_that_leads_there(tmp_path):
    (tmp_path / "broken_neighbour.py").write_text("x = (\n")
    path = written(tmp_path, "import re\nimport broken_neighbour\n")
    with pytest.raises(StudyError, match=r"mine\.py, line 2: SyntaxError: .*\(broken_neighbour\.py, line 1\)"):
        registry.get(str(path))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("def jobs(): return []", r", in jobs: TypeError: jobs\(\) takes 0 positional arguments but 1 was given"),
        ("def jobs(plan): pass", r", in jobs: TypeError: jobs\(\) returns None: a list is needed"),
        ("def jobs(plan):\n    return [{}[each] for each in 'x']", ", line 9, in jobs: KeyError: 'x'"),
        ("def jobs(plan):\n    yield {}['x']", ", line 9, in jobs: KeyError: 'x'"),
        ("def jobs(plan): exit()", ", line 8, in jobs: SystemExit"),
    ],
)
def test_jobs_that_fail(tmp_path, function, sentence):
    path = written(tmp_path, f"{WORKS}\n{function}\n")
    with pytest.raises(StudyError, match=f"^{re.escape(str(path))}{sentence}"):
        registry.select([registry.get(str(path))], Plan())


@pytest.mark.parametrize(
    "function",
    [
        "def jobs(plan): return [{'job': f's{(4, 8)[number]}'} for number in range(plan.seeds or 2)]",
        "def jobs(plan): return [{'job': {'cpu': 'a'}[plan.device]}]",
    ],
)
def test_seeds_and_devices_that_a_study_has_not_are_not_looked_for(tmp_path, function):
    experiment = registry.get(str(written(tmp_path, f"{WORKS}\n{function}\n")))
    outcomes = list(swept(experiment, tmp_path / "r"))
    state = overview.survey(experiment, tmp_path / "r")
    assert len(state.finished) == state.total == len(outcomes)
    with pytest.raises(StudyError, match="in jobs"):
        registry.select([experiment], Plan(seeds=3, device="cuda"))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("def run(config, context):\n    raise ValueError('no')", ", line 9, in run: ValueError: no"),
        ("def run(config, context):\n    yield {}['x']", ", line 9, in run: KeyError: 'x'"),
        ("def run(config, context): exit(3)", ", line 8, in run: SystemExit: 3"),
        ("def run(config): pass", r", in run: TypeError: run\(\) takes 1 positional argument but 2 were given"),
    ],
)
def test_a_run_that_fails_is_an_outcome_that_names_the_place(tmp_path, function, sentence):
    path = written(tmp_path, f"{WORKS}\n{function}\n")
    (outcome,) = swept(registry.get(str(path)), tmp_path / "r")
    assert outcome.what == "failed"
    assert re.search(f"^{re.escape(str(path))}{sentence}", str(outcome.error))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("def claims(results): return 1 / 0", "line 8, in claims: ZeroDivisionError"),
        (
            "def claims(results): return ['better']",
            r"in claims: TypeError: claims\(\) gives 'better': a Claim is needed",
        ),
        ("def compare(results): return {}['x']", "line 8, in compare: KeyError: 'x'"),
        ("def contrasts(results): pass", r"in contrasts: TypeError: contrasts\(\) returns None"),
    ],
)
def test_a_report_that_fails(tmp_path, function, sentence):
    experiment = registry.get(str(written(tmp_path, f"{WORKS}\n{function}\n")))
    with pytest.raises(StudyError, match=rf"mine\.py, {sentence}"):
        reproduction.write(tmp_path / "r", tmp_path, [experiment])


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("def plot(results): return results[7]", "line 8, in plot: IndexError"),
        ("def plot(results): pass", r"in plot: TypeError: plot\(\) returns None: a matplotlib figure is needed"),
    ],
)
def test_a_plot_that_fails_does_not_cost_the_report(tmp_path, function, sentence):
    pytest.importorskip("matplotlib")
    experiment = registry.get(str(written(tmp_path, f"{WORKS}\n{function}\n")))
    list(swept(experiment, tmp_path / "r"))
    markdown, page = reproduction.write(tmp_path / "r", tmp_path, [experiment])
    assert re.search(rf"\*\*The figure could not be drawn:\*\* .*mine\.py, {sentence}", markdown.read_text())
    assert "| machine |" in markdown.read_text()
    assert "The figure could not be drawn" in page.read_text()
    with pytest.raises(StudyError, match=sentence):
        overview.draw(experiment, tmp_path / "r")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1 / 0", "mine.py, line 1: ZeroDivisionError: division by zero (ITERNORM_TRACEBACK=1 shows all)"),
        ("import sklearn.nothing", "this needs sklearn.nothing: pip install 'iternorm[demo]'"),
        (
            f"{WORKS}\ndef run(config, context): int('x')",
            "1 of 1 jobs failed: mine a: mine.py, line 8, in run: ValueError: invalid literal for int() with base 10: "
            "'x' (ITERNORM_TRACEBACK=1 shows all)",
        ),
    ],
)
def test_the_command_line_prints_the_sentence_and_how_to_see_all(tmp_path, text, line):
    pytest.importorskip("sklearn")
    written(tmp_path, text)
    command = [sys.executable, "-m", "iternorm", "run", "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {line}"
    assert "Traceback" not in done.stderr
