"""Verdicts from made-up losses with known answers."""

import math
import statistics

import pytest

from studies.claims.evidence import Evidence, Run
from studies.claims.recall import RecallGrows, Recalls, rank_correlation
from studies.claims.report import Claim, read_claim
from studies.claims.rules import Arithmetic, EqualTime, Growth, Measured, Ratio, Untestable
from studies.protocol.verdict import ARITHMETIC, FAILS, HOLDS, NOT_RUN, NOT_TESTABLE, UNDECIDED


def line(perplexity: float, **more) -> dict:
    scores = {"perplexity": perplexity, "bits_per_byte": math.log2(perplexity) / 4}
    return {"split": "test", "length": 512, "corpus": "books", "bytes": 100, "step": 500} | scores | more


def run(*lines: dict) -> Run:
    return Run({(x["split"], x["length"]): x for x in lines}, 512)


def evidence(files: dict | None = None, **perplexities: list[float]) -> Evidence:
    runs = {name: {i: run(line(x)) for i, x in enumerate(seeds)} for name, seeds in perplexities.items()}
    return Evidence({"study": runs}, files or {})


def ratio(relation: str, **more) -> Ratio:
    return Ratio("study", "a", "b", relation, **more)


@pytest.mark.parametrize(
    ("relation", "a", "word"),
    [
        ("better", [9.7, 9.7, 9.72], HOLDS),
        ("better", [9.9, 9.9, 9.92], FAILS),  # alike is not better
        ("better", [9.7, 9.7, 9.9], UNDECIDED),
        ("better", [9.0], UNDECIDED),  # one seed
        ("better", [9.0, 9.0], UNDECIDED),  # two seeds
        ("no worse", [10.0, 10.1, 10.05], HOLDS),
        ("no worse", [10.1, 9.0, 9.0], UNDECIDED),  # the seeds are far apart
        ("no worse", [9.8, 9.7, 9.9, 10.25, 9.8, 9.7], HOLDS),  # one is worse, but not the mean
        ("no worse", [10.3, 10.32, 10.31], FAILS),
        ("no worse", [10.3, 10.6, 11.0], UNDECIDED),
        ("alike", [10.05, 9.95, 10.0], HOLDS),
        ("alike", [9.5, 10.5, 10.0], UNDECIDED),
        ("alike", [10.5, 10.52, 10.51], FAILS),
    ],
)
def test_a_relation_of_the_mean(relation, a, word):
    assert ratio(relation).judge(evidence(a=a, b=[10] * len(a))).word == word


def test_the_interval_of_a_ratio_is_that_of_the_seeds():
    """Student's t for the mean of the logarithms: 4.3027 standard errors of three values, 12.706 of two."""
    for a, times in (([9.0, 9.5, 9.7], 4.302653), ([9.0, 9.5], 12.706205)):
        logs = [math.log(x / 10) for x in a]
        mean, half = statistics.mean(logs), times * statistics.stdev(logs) / len(a) ** 0.5
        ends = f"95 %: {math.exp(mean - half):.3f} to {math.exp(mean + half):.3f}"
        listed = f"{math.exp(mean):.3f} (0.900–{a[-1] / 10:.3f}, {len(a)} seeds) × that of b"
        assert ratio("better").judge(evidence(a=a, b=[10] * len(a))).figure == f"perplexity of a {listed} ({ends})"


def test_the_printed_rule_has_the_threshold_that_is_applied():
    assert ratio("no worse").text == "perplexity of a at most 1.02 × that of b, by the seeds alone"
    strict = ratio("no worse", margin=1.001)
    assert "at most 1.001 ×" in strict.text
    assert strict.judge(evidence(a=[10.1] * 3, b=[10] * 3)).word == FAILS


def test_another_metric():
    """2 % more perplexity is less than 1 % more bits."""
    rule = ratio("no worse", metric="bits_per_byte", margin=1.01)
    assert rule.text == "bits a byte of a at most 1.01 × that of b, by the seeds alone"
    verdict = rule.judge(evidence(a=[10.15] * 3, b=[10] * 3))
    assert verdict.word == HOLDS and "1.006" in verdict.figure


def test_no_verdict_from_the_validation_split():
    one, other = (run(line(x, split="validation")) for x in (9, 10))
    figures = Evidence({"study": {"a": dict.fromkeys(range(3), one), "b": dict.fromkeys(range(3), other)}}, {})
    verdict = ratio("better").judge(figures)
    assert verdict.word == UNDECIDED and "0.900" in verdict.figure and "validation" in verdict.reasons[0]


def test_no_verdict_from_different_texts():
    one, other = run(line(9)), run(line(10, bytes=101))
    verdict = ratio("better").judge(
        Evidence({"study": {"a": dict.fromkeys(range(3), one), "b": dict.fromkeys(range(3), other)}}, {})
    )
    assert verdict.word == UNDECIDED and verdict.reasons == ("not scored on the same text",)


def test_only_seeds_of_both_count():
    runs = {"a": {0: run(line(10)), 2: run(line(30))}, "b": {1: run(line(5)), 2: run(line(31))}}
    assert "(one seed)" in ratio("better").judge(Evidence({"study": runs}, {})).figure


def test_other_lengths():
    long = lambda x: line(x, length=1024)
    a, b, c = run(line(10), long(12)), run(line(9), long(13)), run(line(9))
    figures = Evidence({"study": {name: dict.fromkeys(range(3), x) for name, x in (("a", a), ("b", b), ("c", c))}}, {})
    assert ratio("better", length=1024).judge(figures).word == HOLDS
    assert ratio("better").judge(figures).word == FAILS
    verdict = Claim("", "", [Ratio("study", "a", "c", "better", length=1024)], []).verdict(figures)
    assert (verdict.word, verdict.figure) == (NOT_RUN, "not scored on rows of 1024")


def test_what_is_missing_is_named():
    verdict = Claim("", "", [ratio("better")], []).verdict(evidence(b=[1, 2]))
    assert (verdict.word, verdict.figure) == (NOT_RUN, "no finished run of a in study")


def equal_time(step_ms: dict[str, float], steps: dict[str, int], perplexities: dict[str, float]) -> tuple:
    runs = {name: {i: run(line(x, step=steps[name])) for i in range(3)} for name, x in perplexities.items()}
    files = {"times.jsonl": [{"run": name, "median_ms": ms} for name, ms in step_ms.items()]}
    verdict = EqualTime("study", "a", "b", "times.jsonl", "no worse").judge(Evidence({"study": runs}, files))
    return verdict.word, verdict.figure, verdict.reasons


def test_equal_time_is_of_schedules_that_end_at_the_same_time():
    """A run of half as many steps that take twice as long; at equal steps nothing is decided."""
    both = {"a": 9.0, "b": 10.0}
    word, figure, _ = equal_time({"a": 200, "b": 100}, {"a": 250, "b": 500}, both)
    assert word == HOLDS and figure.endswith("× that of b (95 %: 0.900 to 0.900) after the same time")
    word, figure, reasons = equal_time({"a": 200, "b": 100}, {"a": 500, "b": 500}, both)
    assert word == UNDECIDED and "at equal steps" in figure and reasons == ("the schedules end after 100 and 50 s",)
    assert equal_time({}, {"a": 500, "b": 500}, both)[2] == ("no steps timed side by side",)
    assert equal_time({"a": 100, "b": 102}, {"a": 500, "b": 500}, {"a": 11.0, "b": 10.0})[0] == FAILS


def test_a_ratio_that_is_only_shown_decides_nothing():
    figures = evidence(a=[9] * 3, b=[10] * 3, c=[5, 20, 9])
    shown = Ratio("study", "a", "c", "alike", judged=False)
    verdict = Claim("", "", [ratio("better"), shown], []).verdict(figures)
    assert verdict.word == HOLDS and "that of c" in verdict.figure and shown.text == ""


def test_growth():
    constant = {"a": 10, "b": 12, "c": 10, "d": 11, "e": 11.9}
    figures = evidence(**{name: [x] * 3 for name, x in constant.items()}, f=[10.5, 11.5, 12.9])
    assert Growth("study", ("a", "b"), ("c", "d")).judge(figures).word == HOLDS
    assert Growth("study", ("c", "d"), ("a", "b")).judge(figures).word == FAILS
    assert Growth("study", ("a", "b"), ("c", "e")).judge(figures).word == FAILS  # by less than the margin
    verdict = Growth("study", ("a", "b"), ("c", "f")).judge(figures)
    assert (
        verdict.word == UNDECIDED and "; the first 1.035 (0.930–1.143, 3 seeds) × the second (95 %: " in verdict.figure
    )


@pytest.mark.parametrize("name", "abcd")
def test_growth_is_undecided_if_one_of_four_was_scored_on_the_validation_split_alone(name):
    runs = {key: {i: run(line(x)) for i in range(3)} for key, x in zip("abcd", (10, 12, 10, 11), strict=True)}
    runs[name] = {i: run(line(10.5, split="validation")) for i in range(3)}
    verdict = Growth("study", ("a", "b"), ("c", "d")).judge(Evidence({"study": runs}, {}))
    assert verdict.word == UNDECIDED and verdict.reasons


def test_growth_takes_all_four_of_a_seed():
    """Seed 0 of c has not been run, and d of seed 1 is no partner of c of seed 2."""
    one = lambda x: run(line(x))
    runs = {"a": {i: one(10) for i in range(4)}, "b": {i: one(12) for i in range(4)}}
    runs |= {"c": {1: one(10), 2: one(20), 3: one(10)}, "d": {0: one(30), 1: one(11), 2: one(22), 3: one(11)}}
    verdict = Growth("study", ("a", "b"), ("c", "d")).judge(Evidence({"study": runs}, {}))
    assert verdict.word == HOLDS and "d / c 1.100 (1.100–1.100, 3 seeds)" in verdict.figure


FIRST, SECOND = {"way": "linear"}, {"way": "softmax"}


def judge_measured(values: list[tuple[float, float]], **bounds) -> tuple:
    lines = [[{"rate": a / 2} | FIRST, {"rate": a} | FIRST, {"rate": b} | SECOND] for a, b in values]
    names = [f"{i}.jsonl" for i in range(len(values))]
    rule = Measured(names, "rate", "images a second", FIRST, SECOND, **bounds)
    verdict = rule.judge(Evidence({}, dict(zip(names, lines, strict=True))))
    return verdict.word, verdict.figure, rule.text


def test_a_claimed_factor_is_all_of_it_and_in_two_runs():
    assert judge_measured([(237, 1)], least=317) == (
        UNDECIDED,
        "images a second 237 of 317 (one run)",
        "images a second at least 317",
    )
    assert judge_measured([(237, 1), (250, 1)], least=317)[:2] == (
        FAILS,
        "images a second 237 of 317, 250 of 317 (2 runs)",
    )
    assert judge_measured([(320, 1), (318, 1)], least=317)[0] == HOLDS
    assert judge_measured([(320, 1), (300, 1)], least=317)[0] == UNDECIDED
    assert judge_measured([(1.1, 1), (1.2, 1)], most=1.15)[0] == UNDECIDED
    assert judge_measured([(9, 1)], judged=False) == (None, "images a second 9.00 (one run)", "")


def test_measured_figures_name_what_is_missing():
    rule = Measured(["x.jsonl"], "ms", "ms", {"n": 2})
    assert Claim("", "", [rule], []).verdict(Evidence({}, {})).figure == "x.jsonl has no ms of n 2"


def test_a_claim_of_parts():
    right, wrong = ratio("better"), Ratio("study", "b", "a", "better")
    open_, shown = Ratio("study", "a", "c", "better"), Measured(["x"], "ms", "ms", {}, judged=False)
    figures = evidence({"x": [{"ms": 3.0}]}, a=[10] * 3, b=[11] * 3, c=[9, 11, 10])
    word = lambda *rules: Claim("", "", rules, []).verdict(figures).word
    assert word(right, right) == word(right, shown) == HOLDS
    assert word(right, open_) == UNDECIDED
    assert word(right, open_, wrong) == FAILS


def test_what_was_withdrawn_has_no_verdict():
    claim = Claim("", "", [ratio("better")], [], withdrawn="a bias that never moved", note="N = count")
    verdict = claim.verdict(evidence(a=[9] * 3, b=[10] * 3))
    assert verdict.word == UNDECIDED and verdict.reasons == ("withdrawn: a bias that never moved",)
    assert verdict.figure.endswith("× that of b (95 %: 0.900 to 0.900); N = count")


def test_arithmetic_is_counted_separately():
    verdict = Arithmetic("c·s / e", [256, 128], [1536]).judge(evidence())
    assert (verdict.word, verdict.figure) == (ARITHMETIC, "256·128 / 1536 = 21.3")
    assert Untestable("no cluster").judge(evidence()).word == NOT_TESTABLE


def test_a_row_of_the_table():
    row = {"text": "t", "source": "s", "rules": [{"rule": "ratio", "study": "x", "first": "a", "second": "b"}]}
    row["rules"][0]["relation"] = "alike"
    claim = read_claim(row | {"change": "more seeds"}, ["make it"])
    assert claim.rules == [Ratio("x", "a", "b", "alike")]
    assert (claim.withdrawn, claim.note, claim.change) == ("", "", "more seeds")


def trunk_line(name: str, seed: int, perplexity: float, **more) -> dict:
    """A line of a study of trunks, whose test split has 25 blocks alike."""
    at = {"part": "rows", "run": name, "seed": seed, "share": 1.0, "trained_length": 512, "corpus_hash": "x"}
    blocks = {"tokens_blocks": [100] * 25, "nll_blocks": [100 * math.log(perplexity)] * 25}
    return line(perplexity, parameters=1_300_000, batch_tokens=4096, **blocks, **at) | more


def test_a_hypothesis_of_a_study_of_trunks():
    base = {"rule": "trunks", "files": ("runs", "times"), "part": "rows", "first": "a", "second": "b"}
    make_rule = lambda **more: read_claim({"text": "", "source": "", "rules": [base | more]}, []).rules[0]
    rule = make_rule(relation="no worse")
    assert rule.text == "rows: a at most 1.02 × b, at equal tokens"
    lines = [trunk_line(name, i, x) for i in range(3) for name, x in (("a", 10.1), ("b", 10.0), ("c", 8.0))]
    verdict = rule.judge(Evidence({}, {"runs": lines}))
    assert verdict.word == HOLDS
    assert verdict.figure.startswith("1.010 (1.010–1.010, 3 seeds) × b (95 %: 1.010 to 1.010; of the variance ")
    assert verdict.figure.endswith("; power at 3, 5, 7 seeds: 1.00, 1.00, 1.00")
    assert verdict.size == "1.3M parameters, 500 steps, 2.05M tokens of training"
    judge_word = lambda rule, lines, times=(): rule.judge(Evidence({}, {"runs": lines, "times": times})).word
    assert judge_word(rule, lines[:6]) == UNDECIDED  # two seeds
    assert judge_word(make_rule(relation="better"), lines) == FAILS
    faster = make_rule(relation="better", at_equal_time=True)
    budgets = [x | {"share": share, "step": round(500 * share)} for x in lines for share in (0.5, 1.0)]
    times = [{"run": f"rows {name}", "rounds_ms": [ms] * 10} for name, ms in (("a", 10.0), ("b", 20.0))]
    assert judge_word(faster, budgets) == UNDECIDED  # no step was timed
    # After the same time b is at half of its budget, here as good as at its end.
    assert judge_word(faster, budgets, times) == FAILS
    worse = [x | {"nll_blocks": [300.0] * 25} if (x["run"], x["share"]) == ("b", 0.5) else x for x in budgets]
    assert judge_word(faster, worse, times) == HOLDS
    claim = Claim("", "", [rule], [])
    assert claim.verdict(Evidence({}, {})).figure == "no seed of both a and b in rows of runs"
    assert claim.verdict(Evidence({}, {})).word == NOT_RUN


def test_the_size_of_what_was_compared():
    sized = [line(9.0, parameters=40, batch_tokens=8), line(9.0, parameters=2_345_678, step=2)]
    runs = {name: {0: run(x)} for name, x in zip("ab", sized, strict=True)}
    verdict = Claim("", "", [ratio("better")], []).verdict(Evidence({"study": runs}, {}))
    assert verdict.size == "40 to 2.35M parameters, 2 to 500 steps, 4,000 tokens of training"
    assert ratio("better").judge(evidence(a=[1], b=[1])).size == "500 steps"
    assert Untestable("no cluster").judge(evidence()).size == ""


def recalls(
    model: str, accuracies: list[float], state: int = 1, rate: float = 0.1, validation: float = 0.5
) -> list[dict]:
    """Lines of a study of recall, a seed each."""
    about = {"model": model, "width": 8, "rate": rate, "state_bytes": state, "validation_accuracy": validation}
    return [about | {"seed": i, "accuracy": x, "by_part": {"near": x / 2}} for i, x in enumerate(accuracies)]


RECALLED = [
    *recalls("a", [0.2, 0.3], state=10),
    *recalls("b", [0.5, 0.2], state=20),
    *recalls("c", [0.9, 0.9], state=20),
    # Rates that were not chosen.
    *(line for model in "abc" for line in recalls(model, [0.9], state=10, rate=0.2, validation=0.4)),
    *({"model": model, "width": 8, "rate": 0.3, "seed": 0, "failed": "not finite"} for model in "abc"),
]


def test_recall_that_grows_with_the_state():
    all_runs = Evidence({}, {"runs": RECALLED})
    verdict = RecallGrows(["runs"], 8, ["a", "b", "c"], 0.8).judge(all_runs)
    # Ranks of the states: 0, 1.5, 1.5; of the accuracies: 0, 1, 2 with seed 0, and 1, 0, 2 with seed 1.
    assert verdict.word == UNDECIDED and verdict.figure == "rank correlation at width 8 0.87, 0.00"
    assert RecallGrows(["runs"], 8, ["a", "c"], 0.8).judge(all_runs).word == HOLDS
    assert Claim("x", "y", [RecallGrows(["runs"], 8, ["a", "d"], 0.8)], []).verdict(all_runs).word == NOT_RUN


@pytest.mark.parametrize("missing", [{"seed": 1}, {"rate": 0.2}, {"rate": 0.3}])
def test_a_study_of_recall_that_goes_on_has_no_verdict(missing):
    """A rate that was not tried yet may be the best one."""
    lines = [line for line in RECALLED if not {"model": "c", **missing}.items() <= line.items()]
    claim = Claim("x", "y", [RecallGrows(["runs"], 8, ["a", "c"], 0.8)], [])
    assert claim.verdict(Evidence({}, {"runs": RECALLED})).word == HOLDS
    verdict = claim.verdict(Evidence({}, {"runs": lines}))
    assert verdict.word == NOT_RUN and "runs lacks rates or seeds of c at width 8" in str(verdict)


def test_rates_beyond_those_of_a_rule_need_not_be_those_of_all_models():
    """A study may try further ones where the best is at the edge."""
    lines = [*RECALLED, *recalls("a", [0.1], state=10, rate=0.01, validation=0.3)]
    rule = {"files": ["runs"], "width": 8, "models": ["a", "c"], "least": 0.8}
    all_runs = Evidence({}, {"runs": lines})
    assert Claim("x", "y", [RecallGrows(**rule)], []).verdict(all_runs).word == NOT_RUN
    assert RecallGrows(**rule, rates=[0.1, 0.2, 0.3]).judge(all_runs).word == HOLDS
    assert Claim("x", "y", [RecallGrows(**rule, rates=[0.1, 0.4])], []).verdict(all_runs).word == NOT_RUN


def test_rank_correlation_against_a_formula():
    """Without equal values: 1 − 6 Σ d² / (n (n² − 1))."""
    one, other = [3.0, 1.0, 4.0, 1.5, 5.0], [2.0, 7.0, 1.0, 8.0, 2.5]
    ranks = [[sorted(x).index(v) for v in x] for x in (one, other)]
    expected = 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (5 * 24)
    assert rank_correlation(one, other) == pytest.approx(expected)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0


@pytest.mark.parametrize(
    ("rule", "word", "figure"),
    [
        ({"first": "c", "least": 0.9}, HOLDS, "accuracy of c at width 8 90.0 %, 90.0 %"),
        ({"first": "b", "least": 0.3}, UNDECIDED, "accuracy of b at width 8 50.0 %, 20.0 %"),
        ({"first": "b", "least": 0.3, "part": "near"}, FAILS, "accuracy of b in near at width 8 25.0 %, 10.0 %"),
        (
            {"first": "a", "second": "c", "least": -0.7},
            HOLDS,
            "accuracy of a minus that of c at width 8 -70.0 points, -60.0 points",
        ),
    ],
)
def test_recall_of_a_model(rule, word, figure):
    verdict = Recalls(["runs"], 8, **rule).judge(Evidence({}, {"runs": RECALLED}))
    assert (verdict.word, verdict.figure) == (word, figure)
