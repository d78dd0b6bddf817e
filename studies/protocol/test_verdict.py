"""The rule of a verdict: bounds by relation, margin and metric, and what seeds decide together."""

import math

import pytest

from flash_lm.report.ratios import MeanRatio
from studies.protocol.verdict import (
    DIFFERENCE,
    FAILS,
    HOLDS,
    NOT_RUN,
    RATIO,
    UNDECIDED,
    Rule,
    Verdict,
    judge_interval,
    judge_seeds,
)


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        (Rule("better", 1.25, RATIO), (0.5, 0.8), (0.81, 1.0)),
        (Rule("no worse", 1.25, RATIO), (0.5, 1.25), (1.26,)),
        (Rule("alike", 1.25, RATIO), (0.8, 1.0, 1.25), (0.79, 1.26)),
        (Rule("better", 0.1, DIFFERENCE), (0.1, 0.5), (0.09, -0.5)),
        (Rule("no worse", 0.1, DIFFERENCE), (-0.1, 0.5), (-0.11,)),
        (Rule("alike", 0.1, DIFFERENCE), (-0.1, 0.0, 0.1), (-0.11, 0.11)),
    ],
)
def test_a_value_is_within_the_bounds_or_not(rule, inside, outside):
    assert all(rule.holds(value) for value in inside)
    assert not any(rule.holds(value) for value in outside)


def test_a_value_nearer_to_a_bound_than_its_error_tells_nothing():
    rule = Rule("no worse", 2.0, DIFFERENCE)
    assert [rule.holds(value, 0.5) for value in (-2.6, -2.5, -2.0, -1.5, -1.4)] == [False, None, None, None, True]


@pytest.mark.parametrize(
    ("held", "lost", "word"),
    [
        ([], False, NOT_RUN),
        ([True, True], False, UNDECIDED),
        ([True, True, True], False, HOLDS),
        ([False, False, False], False, FAILS),
        ([True, True, False], False, UNDECIDED),
        ([True, True, None], False, UNDECIDED),
        ([None, None, None], False, UNDECIDED),
        ([True, True, True], True, UNDECIDED),
        ([], True, UNDECIDED),
    ],
)
def test_seeds_must_be_enough_and_agree(held, lost, word):
    assert judge_seeds(held, lost) == word
    assert judge_seeds([True, True], seeds=2) == HOLDS


def test_an_interval_must_lie_on_one_side_of_each_bound():
    ratio = MeanRatio([math.log(x) for x in (0.9, 0.9001, 0.8999)], {})
    limits = [(0.0, 1.0), (0.0, 0.8), (0.0, 0.9), (0.95, 1.05)]
    assert [judge_interval(ratio, x) for x in limits] == [HOLDS, FAILS, UNDECIDED, FAILS]
    assert judge_interval(MeanRatio(ratio.logs[:2], {}), (0.0, 1.0)) == UNDECIDED  # two seeds


def test_a_line_says_what_it_is_about_first():
    verdict = Verdict(HOLDS, "0.9", numbers={"ratio": 0.9})
    line = verdict.line(number=1, hypothesis="a")
    assert list(line.items()) == [
        ("number", 1),
        ("hypothesis", "a"),
        ("verdict", HOLDS),
        ("figure", "0.9"),
        ("ratio", 0.9),
    ]
