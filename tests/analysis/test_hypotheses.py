"""Verdicts on hypotheses, from planted lines and from curves whose values at any time are known."""

import math

import numpy as np
import pytest

from flash_lm.analysis.hypotheses import FAILS, HOLDS, NOT_RUN, UNDECIDED, Hypothesis, verdict_table
from flash_lm.analysis.ratios import loss_at, over_seeds, ratio_of
from flash_lm.trunk_study import step_name

SEEDS = (0, 1, 2)
TOKENS = [100, 300, 200, 400] * 5  # of each block
NO_WORSE = Hypothesis(1, "rows", "flash", "no worse", "attention")
AT_EQUAL_TIME = Hypothesis(2, "rows", "flash", "better", "attention", at_equal_time=True)


def line(run, seed, perplexity, share=1.0, **more):
    about = {"part": "rows", "run": run, "seed": seed, "share": share, "step": round(1000 * share)}
    scored = {"length": 512, "trained_length": 512, "corpus_hash": "x", "split": "test", "tokens_blocks": TOKENS}
    losses = [count * math.log(perplexity) for count in TOKENS]
    return {**about, **scored, "perplexity": perplexity, "nll_blocks": losses, **more}


def failed(run, seed):
    return {"part": "rows", "run": run, "seed": seed, "failed": "loss nan", "rate": 0.1}


def pairs(*ratios):
    """Whole budgets with these ratios, one for each seed; other lines that no rule may look at."""
    for seed, ratio in enumerate(ratios):
        yield from (line("attention", seed, 50.0), line("flash", seed, 50.0 * ratio))
        yield from (line("flash", seed, 999.0, share=0.5), line("flash", seed, 999.0, length=2048))
        yield line("flash", seed, 999.0, slices="recall", slice="recall")
        yield line("flash", seed, 999.0) | {"part": "long rows"}
        yield line("flash", seed, 999.0, split="validation")


@pytest.mark.parametrize(
    ("relation", "ratios", "verdict"),
    [
        ("no worse", (1.0, 1.001, 0.995), HOLDS),
        ("no worse", (1.1, 1.11, 1.12), FAILS),
        ("no worse", (1.0, 1.0, 1.03), UNDECIDED),
        ("no worse", (1.0, 1.01, 0.9), UNDECIDED),  # agree, but may be as far above the bound as they are apart
        ("no worse", (1.03, 1.2, 1.5), UNDECIDED),
        ("no worse", (1.0, 1.0), UNDECIDED),  # two seeds
        ("better", (0.95, 0.96, 0.965), HOLDS),
        ("better", (0.99, 1.0, 1.0), FAILS),
        ("alike", (0.995, 1.0, 1.005), HOLDS),
        ("alike", (0.93, 0.94, 0.95), FAILS),
        ("alike", (0.97, 1.03, 1.03), UNDECIDED),
        ("alike", (0.97, 1.0, 1.0), UNDECIDED),
    ],
)
def test_a_verdict_needs_three_seeds_that_agree(relation, ratios, verdict):
    found = Hypothesis(1, "rows", "flash", relation, "attention").judge([*pairs(*ratios)], [])
    assert found["verdict"] == verdict
    assert found["ratios"] == pytest.approx({str(seed): ratio for seed, ratio in enumerate(ratios)})


def test_what_was_not_run_or_failed_decides_nothing():
    assert NO_WORSE.judge([], [])["verdict"] == NOT_RUN
    assert NO_WORSE.judge([line("flash", 0, 50.0)], [])["verdict"] == NOT_RUN
    lines = [*pairs(1.0, 1.0, 1.0), failed("flash", 3), line("attention", 3, 50.0)]
    found = NO_WORSE.judge(lines, [])
    assert found["verdict"] == UNDECIDED and "flash failed with seed 3" in found["figure"]
    other = [x | {"corpus_hash": "y"} if x["run"] == "flash" else x for x in pairs(1.0, 1.0, 1.0)]
    found = NO_WORSE.judge(other, [])
    assert found["verdict"] == UNDECIDED and found["figure"] == "not scored on the same targets"


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_a_score_that_is_not_finite_decides_nothing(bad):
    lines = [x | {"nll_blocks": [bad] * 20} if x["run"] == "flash" else x for x in pairs(1.0, 1.0, 1.0)]
    found = NO_WORSE.judge(lines, [])
    assert found["verdict"] == UNDECIDED and found["figure"] == "a score is not finite"


def test_a_slice_is_judged_by_itself():
    of_slice = Hypothesis(4, "rows", "flash", "no worse", "attention", slice="recall")
    recall = [
        line(run, s, p, slices="recall", slice="recall") for s in SEEDS for run, p in (("flash", 8), ("attention", 4))
    ]
    lines = [*pairs(1.0, 1.0, 1.0)][:2] + recall
    found = of_slice.judge(lines, [])
    assert found["verdict"] == FAILS and [*found["ratios"].values()] == pytest.approx([2.0] * 3)
    assert of_slice.read_of(lines) == [x for s in SEEDS for x in recall if x["seed"] == s]


@pytest.mark.parametrize(("guess", "verdict"), [(None, FAILS), (4.1 * math.e, FAILS), (3.9 * math.e, UNDECIDED)])
def test_what_neither_model_knows_decides_nothing(guess, verdict):
    """The better one has a perplexity of 4: a uniform guess has to be worse by e."""
    known = Hypothesis(4, "rows", "flash", "no worse", "attention", guess=guess)
    lines = [line(run, seed, p) for seed in SEEDS for run, p in (("flash", 8), ("attention", 4))]
    found = known.judge(lines, [])
    assert found["verdict"] == verdict and ("neither is below 4" in found["figure"]) == (verdict == UNDECIDED)


def varied(spread):
    """Two models, one 1 % worse over all, whose difference varies over fifty blocks of the text."""
    draw = np.random.default_rng(0)
    tokens, differences = draw.integers(500, 1500, 50), draw.normal(0, spread, 50)
    differences += math.log(1.01) - np.average(differences, weights=tokens)
    mine = tokens * 4.0
    return mine, mine - tokens * differences, tokens


@pytest.mark.parametrize("correlation", (0.0, 0.6))
def test_the_interval_of_a_text_holds_the_truth_as_often_as_it_says(correlation):
    """Of fifty blocks whose neighbours are correlated, as those of documents are."""
    draw, held = np.random.default_rng(3), []
    for _ in range(2000):
        tokens, noise = draw.integers(500, 1500, 50), draw.normal(0, 0.1, 70)
        for i in range(1, 70):
            noise[i] += correlation * noise[i - 1]
        found = ratio_of(tokens * (0.01 + noise[20:]), np.zeros(50), tokens)
        held.append(abs(math.log(found.value) - 0.01) <= found.error)
    assert 0.92 < np.mean(held) < 0.965


def test_the_interval_of_a_few_seeds_holds_the_truth_as_often_as_it_says():
    draws = np.exp(np.random.default_rng(2).normal(math.log(1.03), 0.01, (4000, 3)))
    held = [abs(math.log(x.value / 1.03)) <= x.error for x in map(over_seeds, draws)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.01)


def judged(mine, other, tokens, seeds=(0,)):
    blocks = lambda x: {"nll_blocks": x.tolist(), "tokens_blocks": tokens.tolist()}
    lines = [line(run, seed, 1.0, **blocks(x)) for seed in seeds for run, x in (("flash", mine), ("attention", other))]
    return NO_WORSE.judge(lines, [])


@pytest.mark.parametrize(("spread", "verdict"), [(0.002, HOLDS), (0.1, UNDECIDED)])
def test_what_the_text_cannot_tell_decides_nothing(spread, verdict):
    """All seeds are below the bound; but other text could put them above it."""
    found = judged(*varied(spread), seeds=SEEDS)
    assert [*found["ratios"].values()] == pytest.approx([1.01] * 3)
    assert found["verdict"] == verdict


def power_law(time):
    return 80 * time**-0.3


@pytest.mark.parametrize("time", (1.0, 1.7, 2.0, 3.1, 4.0))
def test_a_law_of_three_points_is_read_exactly(time):
    """A power law, a straight line on logarithmic axes; and losses that fall ever more slowly."""
    slowing = lambda time: 5 - 0.4 * math.log(time) + 0.05 * math.log(time) ** 2
    curve = [(x, np.array([math.log(power_law(x)), slowing(x)])) for x in (1.0, 2.0, 4.0)]
    assert loss_at(curve, time) == pytest.approx([math.log(power_law(time)), slowing(time)])


@pytest.mark.parametrize("time", (0.9, 4.1))
def test_a_curve_is_never_read_beyond_its_ends(time):
    with pytest.raises(ValueError, match="is not within the 1 to 4 of the curve"):
        loss_at([(1.0, np.log(80.0)), (4.0, np.log(60.0))], time)


def curves(flash_ms, attention_ms=600.0, iqr_ms=0.0):
    """Both have the same power law in steps, so at equal time the quicker one is better by (its speed)^0.3."""
    lines = [
        line(run, seed, power_law(1000 * share), share)
        for run in ("flash", "attention")
        for seed in SEEDS
        for share in (1.0, 0.25, 0.5)
    ]
    times = {"flash": flash_ms, "attention": attention_ms}
    return lines, [{"run": step_name("rows", run), "microbatch_ms": ms, "iqr_ms": iqr_ms} for run, ms in times.items()]


@pytest.mark.parametrize(("flash_ms", "verdict"), [(300.0, HOLDS), (400.0, HOLDS), (600.0, FAILS), (1000.0, FAILS)])
def test_at_equal_time_the_slower_curve_is_read_where_the_quicker_one_ends(flash_ms, verdict):
    found = AT_EQUAL_TIME.judge(*curves(flash_ms))
    assert found["verdict"] == verdict
    assert [*found["ratios"].values()] == pytest.approx([(flash_ms / 600) ** 0.3] * 3)


@pytest.mark.parametrize(("iqr_ms", "verdict"), [(0.0, HOLDS), (40.0, HOLDS), (200.0, UNDECIDED)])
def test_at_equal_time_the_spread_of_times_counts(iqr_ms, verdict):
    """400 ms against 600 ms are better by 1.13, and worst is 500 ms against 500 ms."""
    found = AT_EQUAL_TIME.judge(*curves(400.0, iqr_ms=iqr_ms))
    assert found["verdict"] == verdict
    ends = [(400 - k * iqr_ms / 2) / (600 + k * iqr_ms / 2) for k in (1, -1)]
    farthest = max(abs(0.3 * math.log(ratio / (400 / 600))) for ratio in ends)
    assert [*found["errors"].values()] == pytest.approx([farthest] * 3)


def test_the_timing_with_the_most_rounds_counts():
    lines, times = curves(400.0)
    noisy = [x | {"microbatch_ms": 600.0, "rounds": 1} for x in times]
    found = AT_EQUAL_TIME.judge(lines, [*noisy, *(x | {"rounds": 10} for x in times), *noisy])
    assert found["verdict"] == HOLDS


@pytest.mark.parametrize("other", [{"device": "other"}, {"config_hash": "other"}])
def test_steps_that_were_timed_apart_are_not_compared(other):
    """The newer timing has no step of the second model, the older one has fewer rounds."""
    lines, times = curves(400.0)
    old = [x | {"rounds": 3} for x in times]
    new = [x | other | {"rounds": 10, "microbatch_ms": 100.0} for x in times[:1]]
    found = AT_EQUAL_TIME.judge(lines, [*old, *new])
    assert found["verdict"] == UNDECIDED and "the step of attention was not timed" in found["figure"]
    assert AT_EQUAL_TIME.judge(lines, [*old, *({**x, "rounds": 1} for x in new)])["verdict"] == HOLDS


def test_at_equal_time_without_a_time_or_an_overlap():
    lines, times = curves(100.0)  # flash ends before the first budget of attention
    found = AT_EQUAL_TIME.judge(lines, times)
    assert found["verdict"] == UNDECIDED and "1.67 is not within the 2.5 to 10 of the curve" in found["figure"]
    found = AT_EQUAL_TIME.judge(lines, times[:1])
    assert found["verdict"] == UNDECIDED and found["figure"] == "the step of attention was not timed"


def test_the_table_names_rule_and_figure():
    lines = [*pairs(1.0, 1.01, 1.02)]
    table = verdict_table([NO_WORSE.judge(lines, []), AT_EQUAL_TIME.judge(lines, [])])
    assert "a verdict needs 3 seeds that agree" in table
    assert "| rows: flash at most 1.02 × attention, at equal tokens" in table
    assert "1.010 (1.000–1.020, 3 seeds) × attention" in table
    assert "at most 0.9804 × attention, at equal time" in table
