"""Numbers over seeds are told with their deviation, and a claim is decided by what was run."""

from dataclasses import replace

import numpy as np
import pytest

from iternorm.experiments.evidence import outcomes
from iternorm.experiments.evidence.outcomes import Seeds, claim_lower, finals
from iternorm.experiments.jobs.findings import Comparison, Finding, Verdict
from iternorm.experiments.jobs.results import Result
from iternorm.report import palette


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


def test_what_diverged_is_told_of_each():
    told = outcomes.told({"BN": Seeds((3.5, 3.7), 1), "DBN": Seeds((4.5, 4.7), 1)})
    assert told == "BN 3.60 ± 0.14 (2 seeds), 1 diverged, DBN 4.60 ± 0.14 (2 seeds), 1 diverged"
    assert outcomes.told({"BN": Seeds((), 1), "DBN": Seeds((), 1)}) == "BN diverged, DBN diverged"


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


def test_a_claim_tells_the_numbers_their_difference_and_its_error():
    claim = claim_lower("a is lower than b", ("a", "b"), (Seeds((3.0, 3.2, 3.1)), Seeds((3.6, 3.8, 3.7))))
    assert claim.verdict is Verdict.HOLDS
    assert claim.evidence == "a 3.10 ± 0.10 (3 seeds), b 3.70 ± 0.10 (3 seeds): lower by 0.60 ± 0.08 (standard error)"
    claim = claim_lower("", ("a", "b"), (Seeds((7.0,)), Seeds((6.0,))), 10_000)
    assert claim.finding == Finding(Verdict.ONE_SEED, False)
    assert claim.evidence == "a 7.00 (one seed), b 6.00 (one seed): higher by 1.00 ± 0.35 (of the test set)"
    claim = claim_lower("", ("a", "b"), (Seeds((7.0,)), Seeds(())))
    assert (claim.verdict, claim.evidence) == (Verdict.NOT_RUN, "a 7.00 (one seed), b not run")


def test_much_worse_is_a_tenth_worse_than_all_but_the_first():
    first, middle = Seeds((90.0, 90.1, 90.2)), Seeds((10.0, 10.1, 10.2))
    worse, slightly = Seeds((12.0, 12.1, 12.2)), Seeds((10.5, 10.6, 10.7))
    assert outcomes.last_is_much_worse([first, middle, worse]).verdict is Verdict.HOLDS
    assert outcomes.last_is_much_worse([first, middle, slightly]).verdict is Verdict.FAILS
    assert outcomes.last_is_much_worse([first, middle, slightly, worse]).verdict is Verdict.HOLDS
    assert outcomes.last_is_much_worse([first, Seeds(()), worse]).verdict is Verdict.NOT_RUN


def test_extremes_are_worse_where_both_are():
    low, middle, high = Seeds((3.0, 3.1, 3.2)), Seeds((5.0, 5.1, 5.2)), Seeds((7.0, 7.1, 7.2))
    assert outcomes.extremes_are_worse([high, low, high]).verdict is Verdict.HOLDS
    assert outcomes.extremes_are_worse([high, middle, low, middle]).verdict is Verdict.UNDECIDED
    assert outcomes.extremes_are_worse([high, middle, low]).verdict is Verdict.FAILS
    assert outcomes.extremes_are_worse([low, middle, high]).verdict is Verdict.FAILS


def test_the_test_set_is_as_large_as_the_result_says():
    assert outcomes.num_test([]) is None
    assert outcomes.num_test([result(1.0, data="cifar10")]) == 10_000
    assert outcomes.num_test([result(1.0, data="cifar10", test_examples=32)]) == 32
    assert outcomes.num_test([result(1.0, data="pictures")]) is None
    folder = replace(result(1.0, data="pictures"), provenance={"data": {"test_images": 3925}})
    assert outcomes.num_test([folder]) == 3925


def test_numbers_are_drawn_and_told_in_words():
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    rows = {
        "both": Comparison("", "3.56 ± 0.12", (3.4, 3.6)),
        "paper": Comparison("", "29.76", ()),
        "diverged": Comparison("", "3.0", (), note="1 of 1 runs diverged"),
        "some": Comparison("", "3.0", (3.1,), note="1 of 2 runs diverged"),
    }
    outcomes.draw_numbers(axes, rows, ["BN", "DBN-16", "DBN-16", "IterNorm T=5"])
    outcomes.label_numbers(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["the paper", "ours, in the norm's colour"]
    texts = [text.get_text() for text in axes.texts]
    assert [" ".join(text.split()) for text in texts] == [
        "paper 3.56 ± 0.12 ours 3.50 ± 0.14 (2 seeds)",
        "paper 29.76 ours not run",
        "paper 3.0 ours 1 of 1 runs diverged",
        "paper 3.0 ours 3.10 (one seed), 1 of 2 runs diverged",
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(rows)
    drawn = [(str(line.get_marker()), np.asarray(line.get_xdata()), line.get_color()) for line in axes.lines]
    marks = sorted(float(x[0]) for marker, x, _ in drawn if marker in "Do" and len(x))
    assert marks == [3.0, 3.0, 3.1, 3.5, 3.56, 29.76]
    # Ours have the colours of their norms, the paper's none.
    ours = [color for marker, x, color in drawn if marker == "o" and len(x)]
    assert ours == [palette.color_of("BN"), palette.color_of("IterNorm T=5")]


def test_runs_of_one_seed_are_no_repeats():
    runs = [result(8.0, job="small"), result(9.0, job="other", seed=1), result(7.0, job="large")]
    assert finals(runs[:2]).values == (8.0, 9.0)
    with pytest.raises(ValueError, match="two runs of one seed, small and large: give the runs of one setting"):
        finals(runs)
