"""Numbers over seeds are told with their deviation, and a claim is decided by what was run."""

import math
import statistics

import pytest

from iternorm.experiments import outcomes
from iternorm.experiments.findings import Comparison
from iternorm.experiments.outcomes import Seeds, claim_lower
from iternorm.experiments.results import Result


def result(*errors, seed=0, **config):
    rows = [{"epoch": k + 1, "train_error": error, "test_error": error} for k, error in enumerate(errors)]
    if errors[-1] is None:
        rows[-1]["diverged"] = True
    return Result("wrn", {"job": "a", "model": "m", "norm": "n", "seed": seed, **config}, rows, 0.0, {})


def test_seeds_are_told_as_mean_and_deviation():
    assert str(Seeds(())) == "not run"
    assert str(Seeds((), 2)) == "diverged"
    assert str(Seeds((3.5,))) == "3.50 (one seed)"
    assert str(Seeds((3.5, 3.7, 3.9))) == "3.70 ± 0.20 (3 seeds)"
    assert str(Seeds((3.5, 3.7), 1)) == "3.60 ± 0.14 (2 seeds), 1 diverged"


def test_final_errors_are_those_of_the_last_row_of_each_seed():
    results = [result(50.0, 4.0, seed=1), result(50.0, 3.0), result(50.0, None, seed=2), result(1.0, norm="other")]
    found = outcomes.select(results, "m", "n")
    assert found == results[:3]
    assert outcomes.finals(found) == Seeds((3.0, 4.0), 1)
    assert outcomes.select(results, "other", "n") == []
    compared = outcomes.compare("what", "3.5 ± 0.1", found)
    assert (compared.what, compared.paper, compared.ours, compared.unit) == ("what", "3.5 ± 0.1", (3.0, 4.0), "%")
    assert "1 of 3" in compared.note
    # A column that the rows do not have was not measured.
    assert outcomes.finals(found, "test_error_top5") == Seeds((), 1)


@pytest.mark.parametrize(
    ("low", "high", "holds"),
    [
        (Seeds(()), Seeds(()), None),
        (Seeds((3.0,)), Seeds(()), None),
        (Seeds(()), Seeds((3.0,)), None),
        (Seeds((3.0,)), Seeds((3.5,)), True),
        (Seeds((3.5,)), Seeds((3.0,)), False),
        (Seeds((3.5,)), Seeds((3.5,)), False),
        # Where several seeds tell the error, a difference within it decides nothing.
        (Seeds((3.0, 4.0)), Seeds((3.2, 4.2)), None),
        (Seeds((3.2, 4.2)), Seeds((3.0, 4.0)), None),
        (Seeds((3.0, 3.1)), Seeds((3.5, 3.6)), True),
        (Seeds((3.5, 3.6)), Seeds((3.0, 3.1)), False),
        # What diverged is worse than what did not.
        (Seeds((), 1), Seeds((3.0,)), False),
        (Seeds((3.0,)), Seeds((), 1), True),
        (Seeds((), 1), Seeds((), 1), None),
        (Seeds((), 1), Seeds(()), None),
    ],
)
def test_a_claim_holds_fails_or_is_open(low, high, holds):
    claim = claim_lower("a is lower than b", ("a", "b"), (low, high))
    assert claim.holds is holds
    assert claim.evidence.startswith(f"a {low}, b {high}")


def test_the_error_of_a_difference_is_the_standard_error_of_the_means():
    low, high = (3.0, 3.2, 3.1), (3.6, 3.8)
    error = math.sqrt(statistics.variance(low) / 3 + statistics.variance(high) / 2)
    claim = claim_lower("", ("a", "b"), (Seeds(low), Seeds(high)))
    assert claim.evidence.endswith(f"lower by 0.60 ± {error:.2f}")


def test_numbers_are_drawn_and_told_in_words():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    rows = {
        "both": Comparison("", "3.56 ± 0.12", (3.4, 3.6)),
        "paper": Comparison("", "29.76", ()),
        "diverged": Comparison("", "3.0", (), note="1 of 1 runs diverged"),
        "some": Comparison("", "3.0", (3.1,), note="1 of 2 runs diverged"),
    }
    outcomes.draw_numbers(axes, rows)
    outcomes.label_numbers(axes)
    texts = [text.get_text() for text in axes.texts]
    assert [" ".join(text.split()) for text in texts] == [
        "paper 3.56 ± 0.12 ours 3.50 ± 0.14 (2 seeds)",
        "paper 29.76 ours not run",
        "paper 3.0 ours 1 of 1 runs diverged",
        "paper 3.0 ours 3.10 (one seed), 1 of 2 runs diverged",
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(rows)
    marks = sorted(line.get_xdata()[0] for line in axes.lines if line.get_marker() in "Do" and len(line.get_xdata()))
    assert marks == [3.0, 3.0, 3.1, 3.5, 3.56, 29.76]
