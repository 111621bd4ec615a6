"""Curves of training runs, drawn."""

import pytest
from matplotlib.figure import Figure

from iternorm.experiments.evidence import curves
from iternorm.experiments.jobs.results import Result


def run(train, test, **last):
    rows = [{"train_error": a, "test_error": b} for a, b in zip(train, test, strict=True)]
    rows[-1] |= last
    return Result("x", {"job": "a"}, rows, 1.0, {})


def test_the_axis_of_errors_reaches_over_nine_tenths_of_each_curve():
    good, bad = run([90] + [5] * 19, [90] + [8] * 19), run([90] + [4] * 19, [90] + [40] * 3 + [7] * 16)
    axes = Figure().subplots()
    # Of the good run alone the ends; a run that is bad for a while is not cut off because others are good.
    curves.limit_errors(axes, [good])
    assert axes.get_ylim() == (0, pytest.approx(1.15 * 8))
    curves.limit_errors(axes, [good, good, good, bad])
    assert axes.get_ylim() == (0, pytest.approx(1.15 * 40))


def test_the_axis_of_errors_where_runs_diverged():
    good, lost = run([90] + [5] * 19, [90] + [8] * 19), run([90, 90], [90, 90], diverged=True)
    axes = Figure().subplots()
    curves.limit_errors(axes, [lost, good])
    assert axes.get_ylim() == (0, pytest.approx(1.15 * 8))
    # With nothing else to show they are shown.
    curves.limit_errors(axes, [lost])
    assert axes.get_ylim() == (0, pytest.approx(1.15 * 90))
    curves.limit_errors(axes, [run([float("nan")] * 20, [float("inf")] * 20), good])
    assert axes.get_ylim() == (0, pytest.approx(1.15 * 8))


def test_the_axis_of_errors_of_runs_without_errors():
    axes = Figure().subplots()
    before = axes.get_ylim()
    curves.limit_errors(axes, [run([None], [None]), run([0.0], [0.0])])
    assert axes.get_ylim() == before
    # All of it, where nine tenths are nought.
    curves.limit_errors(axes, [run([50] + [0] * 19, [0] * 20)])
    assert axes.get_ylim() == (0, 50)


def test_a_curve_of_one_row_is_a_mark():
    one_row, two_rows = (
        Result("x", {"job": "a"}, [{"epoch": k, "train_error": 1.0, "test_error": 2.0} for k in range(count)], 1.0, {})
        for count in (1, 2)
    )
    axes = Figure().subplots()
    curves.draw(axes, {"one": [one_row], "two": [two_rows]}, "epoch")
    assert [line.get_marker() for line in axes.lines] == ["o", "o", "None", "None"]
    # Training filled, test hollow, as solid and dashed are.
    filled, hollow = axes.lines[:2]
    assert filled.get_markerfacecolor() != hollow.get_markerfacecolor() == "white"
