"""The rule that decides a claim, on made-up numbers."""

import math
import statistics

import pytest

from iternorm.experiments.evidence.rule import (
    Seeds,
    all_of,
    difference,
    is_above,
    is_below,
    is_lower,
    is_lower_by,
    is_no_lower,
    over_parts,
)
from iternorm.experiments.jobs.findings import Finding, Verdict, measured

HOLDS, FAILS, UNDECIDED, NOT_RUN = (
    Finding(verdict) for verdict in (Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED, Verdict.NOT_RUN)
)
FOR, AGAINST, NEITHER = (Finding(Verdict.ONE_SEED, points) for points in (True, False, None))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (Seeds(()), Seeds(()), NOT_RUN),
        (Seeds((3.0,)), Seeds(()), NOT_RUN),
        (Seeds(()), Seeds((3.0,)), NOT_RUN),
        # One seed points somewhere and decides nothing.
        (Seeds((3.0,)), Seeds((3.5,)), FOR),
        (Seeds((3.5,)), Seeds((3.0,)), AGAINST),
        (Seeds((3.5,)), Seeds((3.5,)), NEITHER),
        (Seeds((3.0, 3.0, 3.0)), Seeds((9.0,)), FOR),
        # Nor do two, however far apart.
        (Seeds((3.0, 3.1)), Seeds((9.5, 9.6)), UNDECIDED),
        (Seeds((3.0, 3.1, 3.2)), Seeds((9.5, 9.6)), UNDECIDED),
        # Three do, from two standard errors on: these are good to 0.082, so a difference of 0.16 is too little.
        (Seeds((3.0, 3.1, 3.2)), Seeds((3.16, 3.26, 3.36)), UNDECIDED),
        (Seeds((3.0, 3.1, 3.2)), Seeds((3.17, 3.27, 3.37)), HOLDS),
        (Seeds((3.17, 3.27, 3.37)), Seeds((3.0, 3.1, 3.2)), FAILS),
        (Seeds((3.0, 3.0, 3.0)), Seeds((3.0, 3.0, 3.0)), UNDECIDED),
        # Welch's error is that of both sides, each with its own deviation.
        (Seeds((3.0, 3.0, 3.0)), Seeds((2.8, 3.3, 3.8)), UNDECIDED),
        (Seeds((3.0, 3.0, 3.0)), Seeds((3.2, 3.3, 3.4)), HOLDS),
        # What diverged is worse than what did not.
        (Seeds((), 1), Seeds((3.0,)), AGAINST),
        (Seeds((3.0,)), Seeds((), 1), FOR),
        (Seeds((), 3), Seeds((3.0, 3.1, 3.2)), FAILS),
        (Seeds((3.0, 3.1, 3.2)), Seeds((), 3), HOLDS),
        (Seeds((3.0, 3.1)), Seeds((), 3), UNDECIDED),
        (Seeds((), 1), Seeds((), 1), NEITHER),
        (Seeds((), 3), Seeds((), 3), UNDECIDED),
        (Seeds((), 1), Seeds((), 3), NEITHER),
        (Seeds((), 1), Seeds(()), NOT_RUN),
        # The seeds that ended well do not speak for those that did not.
        (Seeds((3.0, 3.1, 3.2), 1), Seeds((9.0, 9.1, 9.2)), UNDECIDED),
        (Seeds((9.0, 9.1, 9.2)), Seeds((3.0, 3.1, 3.2), 1), UNDECIDED),
        (Seeds((9.0, 9.1, 9.2), 1), Seeds((3.0, 3.1, 3.2)), FAILS),
        # One that is left of three was not the only one.
        (Seeds((3.0,), 2), Seeds((9.0, 9.1, 9.2)), UNDECIDED),
        (Seeds((9.0, 9.1, 9.2)), Seeds((3.0,), 2), UNDECIDED),
        (Seeds((9.0,), 1), Seeds((3.0, 3.1)), UNDECIDED),
        # Nor does it speak for the other two where all that it is compared with diverged, or was run once.
        (Seeds((3.0,), 2), Seeds((), 3), UNDECIDED),
        (Seeds((3.0, 3.1), 1), Seeds((), 3), UNDECIDED),
        (Seeds((), 3), Seeds((3.0,), 2), UNDECIDED),
        (Seeds((3.0,), 2), Seeds((), 1), UNDECIDED),
        (Seeds((3.0,), 2), Seeds((9.0,)), UNDECIDED),
        (Seeds((9.0,)), Seeds((3.0,), 2), UNDECIDED),
        (Seeds((3.0,)), Seeds((9.0,), 2), FOR),
    ],
)
def test_lower(low, high, expected):
    assert is_lower(low, high) == expected


def test_the_error_of_a_difference_is_the_standard_error_of_the_means():
    low, high = (3.0, 3.2, 3.1), (3.6, 3.8)
    found = difference(Seeds(low), Seeds(high))
    assert found.value == pytest.approx(0.6)
    assert found.error == pytest.approx(math.sqrt(statistics.variance(low) / 3 + statistics.variance(high) / 2))
    assert found.num_seeds == 2


def test_single_test_errors_count_with_the_binomial_error_of_the_test_set():
    # 7 % of 10,000 images is good to 0.26 points, a difference to 0.36.
    found = difference(Seeds((6.9,)), Seeds((7.3,)), 10_000)
    assert found.error == pytest.approx(100 * math.sqrt((0.069 * 0.931 + 0.073 * 0.927) / 10_000))
    assert is_lower(Seeds((6.9,)), Seeds((7.3,)), num_test=10_000) == NEITHER
    assert is_lower(Seeds((6.9,)), Seeds((7.7,)), num_test=10_000) == FOR
    assert is_lower(Seeds((7.7,)), Seeds((6.9,)), num_test=10_000) == AGAINST
    assert is_lower(Seeds((6.9,)), Seeds((7.3,)), num_test=10**6) == FOR
    # Several seeds show their own error.
    assert is_lower(Seeds((6.9, 6.9, 6.9)), Seeds((7.3, 7.3, 7.3)), num_test=10_000) == HOLDS


def test_a_margin_has_to_be_passed_too():
    low, high = Seeds((3.0, 3.1, 3.2)), Seeds((3.5, 3.6, 3.7))
    assert is_lower(low, high, margin=0.3) == HOLDS
    assert is_lower(low, high, margin=0.4) == UNDECIDED
    assert is_lower(low, high, margin=0.7) == FAILS
    # Not much higher: by less than 0.7, and not shown to be by less than 0.6.
    assert is_lower(high, low, margin=-0.7) == HOLDS
    assert is_lower(high, low, margin=-0.6) == UNDECIDED
    assert is_lower(high, low, margin=-0.3) == FAILS


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        # Lower by 0.5, good to 0.08: by 0.6 is within two errors, by 0.7 is not.
        (Seeds((3.0, 3.1, 3.2)), Seeds((3.5, 3.6, 3.7)), (HOLDS, HOLDS, FAILS)),
        # Not shown to be lower at all; nor by how much, where the errors are large.
        (Seeds((3.0, 3.1, 3.2)), Seeds((3.05, 3.15, 3.25)), (UNDECIDED, FAILS, FAILS)),
        (Seeds((2.0, 3.1, 4.2)), Seeds((3.5, 3.6, 3.7)), (UNDECIDED, UNDECIDED, UNDECIDED)),
        (Seeds((3.5, 3.6, 3.7)), Seeds((3.0, 3.1, 3.2)), (FAILS, FAILS, FAILS)),
        # Fewer than three seeds decide nothing, and one knows no error of its own.
        (Seeds((3.0, 3.1)), Seeds((3.5, 3.6)), (UNDECIDED, UNDECIDED, UNDECIDED)),
        (Seeds((3.0,)), Seeds((3.5,)), (NEITHER, NEITHER, NEITHER)),
        # Seeds that diverged would make the difference larger on one side, and smaller on the other.
        (Seeds((3.0, 3.1, 3.2)), Seeds((3.5, 3.6, 3.7), 1), (HOLDS, HOLDS, UNDECIDED)),
        (Seeds((3.0, 3.1, 3.2), 1), Seeds((3.5, 3.6, 3.7)), (UNDECIDED, UNDECIDED, FAILS)),
        (Seeds((3.0, 3.1, 3.2)), Seeds((), 3), (HOLDS, HOLDS, HOLDS)),
        (Seeds((), 3), Seeds((3.0, 3.1, 3.2)), (FAILS, FAILS, FAILS)),
        (Seeds((3.0, 3.1, 3.2)), Seeds(()), (NOT_RUN, NOT_RUN, NOT_RUN)),
    ],
)
def test_lower_by_an_amount_up_to_the_errors(low, high, expected):
    assert tuple(is_lower_by(low, high, amount) for amount in (0.1, 0.6, 0.7)) == expected


def test_a_single_test_error_points_against_an_amount_out_of_its_reach():
    # 7 % of 10,000 images is good to 0.26 points, a difference to 0.36.
    low, high = Seeds((6.5,)), Seeds((7.5,))
    assert [is_lower_by(low, high, amount, num_test=10_000) for amount in (0.5, 1.6, 1.8)] == [FOR, FOR, AGAINST]


def test_no_significant_difference_needs_one_that_could_be_seen():
    equal, lower = Seeds((3.0, 3.1, 3.2)), Seeds((2.5, 2.6, 2.7))
    assert is_no_lower(equal, Seeds((3.05, 3.15, 3.25)), visible=0.4) == HOLDS
    assert is_no_lower(equal, Seeds((2.0, 3.1, 4.2)), visible=0.4) == UNDECIDED
    assert is_no_lower(lower, equal, visible=0.4) == FAILS
    assert is_no_lower(equal, lower, visible=0.4) == HOLDS
    # 29 % of 50,000 images is good to 0.2 points, a difference to 0.29: twice that is seen, 0.4 is not.
    assert is_no_lower(Seeds((29.3,)), Seeds((29.4,)), visible=0.6, num_test=50_000) == FOR
    assert is_no_lower(Seeds((29.3,)), Seeds((29.4,)), visible=0.4, num_test=50_000) == NEITHER
    assert is_no_lower(Seeds((29.4,)), Seeds((28.3,)), visible=0.4, num_test=50_000) == FOR
    assert is_no_lower(Seeds((28.3,)), Seeds((29.4,)), visible=0.4, num_test=50_000) == AGAINST
    assert is_no_lower(Seeds((3.0, 3.0)), Seeds((3.0, 3.0)), visible=0.4) == UNDECIDED
    assert is_no_lower(Seeds((3.0, 3.0)), Seeds((3.0, 3.0, 3.0)), visible=0.4) == UNDECIDED
    assert is_no_lower(equal, Seeds((3.05, 3.15, 3.25), 1), visible=0.4) == UNDECIDED
    assert is_no_lower(equal._replace(num_diverged=1), Seeds((3.05, 3.15, 3.25)), visible=0.4) == UNDECIDED
    diverged = equal._replace(num_diverged=1)
    assert is_no_lower(diverged, diverged, visible=0.4) == UNDECIDED
    assert is_no_lower(Seeds(()), equal, visible=0.4) == NOT_RUN
    assert is_no_lower(Seeds((), 3), equal, visible=0.4) == HOLDS


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], NOT_RUN),
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, FAILS, NOT_RUN], FAILS),
        ([HOLDS, NOT_RUN, UNDECIDED], NOT_RUN),
        ([HOLDS, UNDECIDED, FOR], UNDECIDED),
        ([HOLDS, FOR], FOR),
        ([FOR, NEITHER], NEITHER),
        ([FOR, NEITHER, AGAINST], AGAINST),
    ],
)
def test_a_claim_needs_all_of_its_parts(parts, expected):
    assert all_of(parts) == expected


@pytest.mark.parametrize(
    ("parts", "expected", "coverage"),
    [
        ([], NOT_RUN, ""),
        ([NOT_RUN] * 4, NOT_RUN, ""),
        ([HOLDS] * 4, HOLDS, ""),
        ([HOLDS, NOT_RUN, NOT_RUN, NOT_RUN], HOLDS, "1 of 4 configurations"),
        ([HOLDS, FOR, NEITHER, NOT_RUN], HOLDS, "1 of 4 configurations"),
        ([HOLDS, FAILS, NOT_RUN, FOR], FAILS, "1 of 4 configurations"),
        ([HOLDS, UNDECIDED, NOT_RUN, FOR], UNDECIDED, "3 of 4 configurations"),
        ([HOLDS, AGAINST, NOT_RUN, NOT_RUN], UNDECIDED, "2 of 4 configurations"),
        ([FOR, NOT_RUN, NOT_RUN, NOT_RUN], FOR, "1 of 4 configurations"),
        ([FOR, AGAINST, NEITHER, NOT_RUN], AGAINST, "3 of 4 configurations"),
        ([FOR, UNDECIDED, NOT_RUN, NOT_RUN], UNDECIDED, "1 of 4 configurations"),
    ],
)
def test_a_claim_on_several_parts_says_how_many_it_stands_on(parts, expected, coverage):
    found = over_parts({str(k): part for k, part in enumerate(parts)}, "configurations")
    assert found == (expected, coverage)


def test_what_is_left_of_several_seeds_is_no_single_one():
    assert is_above(Seeds((90.0,), 2), 85.0) == UNDECIDED
    assert is_below(Seeds((5.0,), 2), 10.0) == UNDECIDED
    assert is_above(Seeds((90.0,)), 85.0) == FOR
    assert is_below(Seeds((5.0, 5.1, 5.2)), 10.0) == HOLDS


@pytest.mark.parametrize(
    ("seeds", "below", "above"),
    [
        (Seeds(()), NOT_RUN, NOT_RUN),
        (Seeds((5.0, 5.1, 5.2)), HOLDS, FAILS),
        (Seeds((15.0, 15.1, 15.2)), FAILS, HOLDS),
        (Seeds((9.0, 10.0, 11.0)), UNDECIDED, UNDECIDED),
        # What diverged is above any number, and spoils what the others say of being below it.
        (Seeds((), 1), AGAINST, FOR),
        (Seeds((), 3), FAILS, HOLDS),
        (Seeds((5.0, 5.1, 5.2), 1), UNDECIDED, UNDECIDED),
        (Seeds((15.0, 15.1, 15.2), 1), FAILS, HOLDS),
    ],
)
def test_below_and_above_a_fixed_number(seeds, below, above):
    assert (is_below(seeds, 10.0), is_above(seeds, 10.0)) == (below, above)


def test_a_single_test_error_beyond_a_number_counts_with_its_binomial_error():
    # 90 % of 10,000 images is good to 0.3 points.
    assert is_above(Seeds((90.5,)), 90.0, num_test=10_000) == NEITHER
    assert is_above(Seeds((90.7,)), 90.0, num_test=10_000) == FOR
    assert is_below(Seeds((9.5,)), 10.0, num_test=10_000) == NEITHER
    assert is_below(Seeds((9.3,)), 10.0, num_test=10_000) == FOR
    assert is_below(Seeds((9.5,)), 10.0) == FOR


def test_a_deviation_has_the_decimals_of_its_mean():
    assert format(Seeds((0.178, 0.186, 0.194)), "#.3g") == "0.186 ± 0.008 (3 seeds)"
    assert format(Seeds((0.00125, 0.0013, 0.00135)), "#.3g") == "0.00130 ± 0.00005 (3 seeds)"
    assert format(Seeds((7.3, 7.42, 7.54)), "") == "7.42 ± 0.12 (3 seeds)"
    assert format(Seeds((1e-7, 2e-7, 3e-7)), "#.3g") == "2.00e-07 ± 1.00e-07 (3 seeds)"


def test_findings_in_words():
    assert list(map(str, (HOLDS, FAILS, UNDECIDED, NOT_RUN))) == ["holds", "does not hold", "undecided", "not run"]
    assert [str(each) for each in (FOR, AGAINST, NEITHER)] == [
        f"one seed only, {way}" for way in ("points to it", "points against it", "points neither way")
    ]
    assert measured(True) == HOLDS
    assert measured(False) == FAILS
    assert measured(None) == NOT_RUN
