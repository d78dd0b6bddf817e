"""Verdicts from losses that are made up, with the answer known."""

import math

import pytest

from flash_lm.analysis.claims import (
    ALIKE,
    CONTRADICTED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    Claim,
    Evidence,
    Run,
    Verdict,
    alike,
    all_of,
    better,
    better_at_equal_time,
    loses_more,
    measured,
)


def run(perplexity: float, step_ms: float = 100, others: dict | None = None) -> Run:
    """Whose loss falls by a straight line from 5 to its own in 100 steps, in pieces."""
    loss = math.log(perplexity)
    curve = [{"step": step, "loss": 5 + (loss - 5) * step / 100} for step in (10, 40, 100)]
    scores = {length: {"loss": math.log(x), "train_step_ms": step_ms} for length, x in (others or {}).items()}
    return Run({512: {"loss": loss, "train_step_ms": step_ms}} | scores, 512, curve)


def evidence(**perplexities: list[float]) -> Evidence:
    return Evidence({name: {i: run(x) for i, x in enumerate(seeds)} for name, seeds in perplexities.items()}, {})


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ([10, 20], [11, 22], REPRODUCED),
        ([10, 22], [11, 20], UNDECIDED),
        ([11, 22], [10, 20], CONTRADICTED),
        ([10], [11], UNDECIDED),
        ([], [10], NOT_RUN),
    ],
)
def test_better_with_every_seed(a, b, word):
    verdict = Claim("a is better", "", better("a", "b"), "").verdict(evidence(a=a, b=b))
    assert verdict.word == word
    if word == REPRODUCED:
        assert verdict.figure == "perplexity of a 0.909 times that of b (0.909–0.909, 2 seeds)"


def test_no_worse():
    assert better("a", "b", most=ALIKE)(evidence(a=[10.1, 10], b=[10, 10])).word == REPRODUCED
    assert better("a", "b", most=ALIKE)(evidence(a=[10.3, 10.4], b=[10, 10])).word == CONTRADICTED


@pytest.mark.parametrize(
    ("a", "word"), [([10.1, 9.9], REPRODUCED), ([10.1, 10.5], UNDECIDED), ([9.5, 10.5], CONTRADICTED)]
)
def test_alike(a, word):
    assert alike("a", "b")(evidence(a=a, b=[10, 10])).word == word


def test_only_seeds_of_both_count():
    one, other = {0: run(10), 2: run(30)}, {1: run(5), 2: run(31)}
    assert "(1 seed)" in better("a", "b")(Evidence({"a": one, "b": other}, {})).figure


def test_other_lengths():
    a, b, c = run(10, others={1024: 12}), run(9, others={1024: 13}), run(9)
    runs = {name: {0: one, 1: one} for name, one in (("a", a), ("b", b), ("c", c))}
    assert better("a", "b", length=1024)(Evidence(runs, {})).word == REPRODUCED
    assert better("a", "b")(Evidence(runs, {})).word == CONTRADICTED
    missing = Claim("", "", better("a", "c", length=1024), "").verdict(Evidence(runs, {}))
    assert missing == Verdict(NOT_RUN, "not scored on rows of 1024")


def test_equal_time():
    """After 10 s b has made all of its steps, and a, twice as slow, half of them."""
    slow, fast = run(10, step_ms=200), run(20, step_ms=100)
    assert slow.seconds == 20 and fast.loss_at(10) == pytest.approx(math.log(20))
    assert slow.loss_at(10) == pytest.approx(5 + (math.log(10) - 5) / 2)
    runs = Evidence({"a": {0: slow, 1: slow}, "b": {0: fast, 1: fast}}, {})
    assert better("a", "b")(runs).word == REPRODUCED
    assert better_at_equal_time("a", "b")(runs).word == CONTRADICTED


def test_loses_more():
    figures = evidence(a=[10, 10], b=[12, 12], c=[10, 10], d=[11, 11])
    assert loses_more(("a", "b"), than=("c", "d"))(figures).word == REPRODUCED
    assert loses_more(("c", "d"), than=("a", "b"))(figures).word == CONTRADICTED


def test_loses_more_takes_all_four_of_a_seed():
    """Seed 0 of c has not been run, and d of seed 1 is no partner of c of seed 2."""
    runs = {"a": {i: run(10) for i in range(3)}, "b": {i: run(12) for i in range(3)}}
    runs |= {"c": {1: run(10), 2: run(20)}, "d": {0: run(30), 1: run(11), 2: run(22)}}
    verdict = loses_more(("a", "b"), than=("c", "d"))(Evidence(runs, {}))
    assert verdict.word == REPRODUCED and "1.100 times that of c (1.100–1.100, 2 seeds)" in verdict.figure


def test_a_claim_of_parts():
    right, wrong, open_ = better("a", "b"), better("b", "a"), better("a", "c")
    figures = evidence(a=[10, 10], b=[11, 11], c=[9, 11])
    assert all_of(right, right)(figures).word == REPRODUCED
    assert all_of(right, open_)(figures).word == UNDECIDED
    assert all_of(right, open_, wrong)(figures).word == CONTRADICTED


def test_measured_figures_name_what_is_missing():
    claim = Claim("", "", measured(lambda e: (e.line("x.jsonl", n=2)["ms"] > 1, "2 ms")), "")
    assert claim.verdict(Evidence({}, {"x.jsonl": [{"n": 2, "ms": 0}, {"n": 2, "ms": 2}]})).word == REPRODUCED
    assert claim.verdict(Evidence({}, {})) == Verdict(NOT_RUN, "x.jsonl has no line with n 2")
