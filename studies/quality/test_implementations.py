"""Public implementations compared with ours, from planted lines."""

import pytest

from studies.quality.implementations import (
    AGREES,
    DIFFERS,
    FAILED,
    OTHER_TARGETS,
    UNFINISHED,
    compare_implementations,
    implementations_table,
    peer_rates,
)

OURS = {"part": "peers", "run": "flash", "split": "test", "length": 512, "trained_length": 512, "perplexity": 100.0}
TARGETS = {"seed": 0, "corpus_hash": "x", "tokens_blocks": [10, 20]}
OURS |= {"rate": 0.2, **TARGETS}


def peer_lines(rate, validation, test):
    at = {"part": "peers", "run": f"theirs at {rate:g}", "peer": "theirs", "beside": "flash", "rate": rate}
    at |= {"length": 512, "trained_length": 512, **TARGETS}
    return [at | {"split": split, "perplexity": x} for split, x in (("validation", validation), ("test", test))]


@pytest.mark.parametrize(("test", "result"), [(101.9, AGREES), (98.1, AGREES), (102.1, DIFFERS), (97.9, DIFFERS)])
def test_the_best_on_the_validation_split_is_compared_on_the_test_split(test, result):
    """Another rate is better on the test split, but the test split does not choose."""
    theirs = [*peer_lines(0.1, 90.0, test), *peer_lines(0.2, 91.0, 100.0), *peer_lines(0.4, 95.0, 99.0)]
    others = [OURS | {"slice": "recall", "perplexity": 9.0}, OURS | {"part": "rows", "perplexity": 8.0}]
    (comparison,) = compare_implementations([*others, OURS, *theirs])
    assert comparison["result"] == result and comparison["rate"] == 0.1
    assert comparison["ratio"] == pytest.approx(test / 100) and comparison["perplexity"] == test
    assert f"{test:.2f}" in implementations_table([comparison])


def test_without_all_rates_or_ours_there_is_no_result():
    theirs = [*peer_lines(0.1, 90.0, 100.0), *peer_lines(0.2, 91.0, 100.0)]
    lost = {"part": "peers", "run": "theirs at 0.4", "peer": "theirs", "beside": "flash", "rate": 0.4, "failed": "nan"}
    assert [x["result"] for x in compare_implementations([OURS, *theirs])] == [UNFINISHED]
    (comparison,) = compare_implementations([OURS, *theirs, lost])
    assert (comparison["result"], comparison["failed"]) == (AGREES, 1)  # one rate diverged
    assert [x["result"] for x in compare_implementations([*theirs, lost])] == [UNFINISHED]
    all_lost = [lost | {"run": f"theirs at {rate}"} for rate in (0.1, 0.2, 0.4)]
    assert [x["result"] for x in compare_implementations([OURS, *all_lost])] == [FAILED]
    ours_lost = {"part": "peers", "run": "flash", "failed": "nan", "rate": 0.2}
    assert [x["result"] for x in compare_implementations([ours_lost, *theirs, lost])] == [FAILED]
    assert compare_implementations([OURS]) == []


def test_a_changed_peer_has_our_rate_alone():
    changed = [line | {"peer": "theirs/changed"} for line in peer_lines(0.2, 90.0, 105.0)]
    theirs = [*peer_lines(0.1, 80.0, 95.0), *peer_lines(0.2, 91.0, 100.0)]
    comparison = compare_implementations([OURS, *theirs, *changed])
    assert [(x["peer"], x["result"]) for x in comparison] == [("theirs", UNFINISHED), ("theirs/changed", DIFFERS)]
    assert [peer_rates(x["peer"], 0.006) for x in comparison] == [(0.006, 0.003, 0.012), (0.006,)]


@pytest.mark.parametrize("other", [{"seed": 1}, {"corpus_hash": "y"}, {"tokens_blocks": [20, 10]}])
def test_only_scores_of_the_same_targets_are_compared(other):
    theirs = [line for rate in (0.1, 0.2, 0.4) for line in peer_lines(rate, 90.0, 100.0)]
    (comparison,) = compare_implementations([OURS | other, *theirs])
    assert comparison["result"] == OTHER_TARGETS and "ratio" not in comparison
    (comparison,) = compare_implementations([OURS | other, OURS, *theirs])
    assert comparison["result"] == AGREES and comparison["ratio"] == 1.0


def test_runs_at_rates_of_another_search_do_not_count():
    """Ours was tuned again: runs at half and twice the older rate do not count, however good."""
    old = [*peer_lines(0.3, 70.0, 70.0), *peer_lines(0.6, 71.0, 70.0)]
    theirs = [*peer_lines(0.1, 90.0, 100.0), *peer_lines(0.2, 91.0, 100.0)]
    assert [x["result"] for x in compare_implementations([OURS, *old, *theirs])] == [UNFINISHED]
    (comparison,) = compare_implementations([OURS, *old, *theirs, *peer_lines(0.4, 95.0, 99.0)])
    assert (comparison["result"], comparison["rate"]) == (AGREES, 0.1)
