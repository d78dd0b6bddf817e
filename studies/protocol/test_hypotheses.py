"""Verdicts on hypotheses: planted lines, curves whose values at any time are known, and intervals by other code."""

import math

import numpy as np
import pytest
from scipy import stats

from flash_lm.report.ratios import MeanRatio, Variance, loss_at, variance_of_text
from studies.protocol.hypotheses import Hypothesis, step_name
from studies.protocol.verdict import BY_INTERVAL, FAILS, HOLDS, NOT_RUN, UNDECIDED, verdict_table

SEEDS = (0, 1, 2)
TOKENS = [100, 300, 200, 400] * 5  # of each block
NO_WORSE = Hypothesis(1, "rows", "flash", "no worse", "attention")
AT_EQUAL_TIME = Hypothesis(2, "rows", "flash", "better", "attention", at_equal_time=True)


def line(run, seed, perplexity, share=1.0, **more):
    about = {"part": "rows", "run": run, "seed": seed, "share": share, "step": round(1000 * share)}
    scored = {"length": 512, "trained_length": 512, "corpus_hash": "x", "split": "test", "tokens_blocks": TOKENS}
    losses = [count * math.log(perplexity) for count in TOKENS]
    return {**about, **scored, "perplexity": perplexity, "nll_blocks": losses, **more}


def failed_line(run, seed):
    return {"part": "rows", "run": run, "seed": seed, "failed": "loss nan", "rate": 0.1}


def pairs(*ratios):
    """Yields lines of the full budget with these ratios, one per seed, and other lines that no rule may read."""
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
        ("no worse", (1.0, 1.01, 0.9), UNDECIDED),  # each is below the bound, but they are far apart
        ("no worse", (1.025, 0.96, 0.97, 0.98, 0.96), HOLDS),  # one is above the bound, but the mean is below it
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
def test_a_verdict_needs_three_seeds_and_an_interval_on_one_side(relation, ratios, verdict):
    result = Hypothesis(1, "rows", "flash", relation, "attention").verdict_line([*pairs(*ratios)], [])
    assert result["verdict"] == verdict
    assert result["ratios"] == pytest.approx({str(seed): ratio for seed, ratio in enumerate(ratios)})


def test_what_was_not_run_or_failed_decides_nothing():
    assert NO_WORSE.verdict_line([], [])["verdict"] == NOT_RUN
    assert NO_WORSE.verdict_line([line("flash", 0, 50.0)], [])["verdict"] == NOT_RUN
    lines = [*pairs(1.0, 1.0, 1.0), failed_line("flash", 3), line("attention", 3, 50.0)]
    result = NO_WORSE.verdict_line(lines, [])
    assert result["verdict"] == UNDECIDED and result["figure"].endswith("; flash failed with seed 3")
    other = [x | {"corpus_hash": "y"} if x["run"] == "flash" else x for x in pairs(1.0, 1.0, 1.0)]
    result = NO_WORSE.verdict_line(other, [])
    assert result["verdict"] == UNDECIDED and result["figure"] == "not scored on the same targets"


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_a_score_that_is_not_finite_decides_nothing(bad):
    lines = [x | {"nll_blocks": [bad] * 20} if x["run"] == "flash" else x for x in pairs(1.0, 1.0, 1.0)]
    result = NO_WORSE.verdict_line(lines, [])
    assert result["verdict"] == UNDECIDED and result["figure"] == "a score is not finite"


def test_a_slice_is_judged_by_itself():
    of_slice = Hypothesis(4, "rows", "flash", "no worse", "attention", slice="recall")
    recall = [
        line(run, s, p, slices="recall", slice="recall") for s in SEEDS for run, p in (("flash", 8), ("attention", 4))
    ]
    lines = [*pairs(1.0, 1.0, 1.0)][:2] + recall
    result = of_slice.verdict_line(lines, [])
    assert result["verdict"] == FAILS and [*result["ratios"].values()] == pytest.approx([2.0] * 3)
    assert [*of_slice.judge(lines, []).lines] == [x for s in SEEDS for x in recall if x["seed"] == s]


@pytest.mark.parametrize(("guess", "verdict"), [(None, FAILS), (4.1 * math.e, FAILS), (3.9 * math.e, UNDECIDED)])
def test_what_neither_model_knows_decides_nothing(guess, verdict):
    """The better one has a perplexity of 4: a uniform guess has to be worse by e."""
    known = Hypothesis(4, "rows", "flash", "no worse", "attention", guess=guess)
    lines = [line(run, seed, p) for seed in SEEDS for run, p in (("flash", 8), ("attention", 4))]
    result = known.verdict_line(lines, [])
    assert result["verdict"] == verdict and ("neither is below 4" in result["figure"]) == (verdict == UNDECIDED)


@pytest.mark.parametrize(("seeds", "known"), [(1, {"ratio", "ratios"}), (2, {"low", "high", "shares"}), (3, {"power"})])
def test_few_seeds_have_fewer_numbers(seeds, known):
    result = NO_WORSE.verdict_line([*pairs(*(0.9, 0.95, 1.0)[:seeds])], [])
    assert known <= result.keys() and ("low" in result) == (seeds > 1) and ("power" in result) == (seeds > 2)
    assert ("95 %: " in result["figure"]) == (seeds > 1) and ("power at 3, 5, 7 seeds: " in result["figure"]) == (
        seeds > 2
    )


def interval(logs_S, shared=()):
    """Ends of the 95 % interval of the mean ratio, and the shares of its variance, from the equations.

    It is that of the sum, by Welch and Satterthwaite, or of one of its parts, if that is wider.

    Args:
        logs_S: of each seed.
        shared: variances that the seeds share, with their degrees of freedom.
    """
    number = len(logs_S)
    mean = sum(logs_S) / number
    parts = [(sum((x - mean) ** 2 for x in logs_S) / (number - 1) / number, number - 1), *shared]
    total = sum(variance for variance, _ in parts)
    total_freedom = total**2 / sum(variance**2 / freedom for variance, freedom in parts)
    half = max(stats.t.ppf(0.975, freedom) * variance**0.5 for variance, freedom in [(total, total_freedom), *parts])
    return math.exp(mean - half), math.exp(mean + half), [variance / total for variance, _ in parts]


def text_variance(differences_SxN, tokens_N):
    """Returns the variance of the mean difference per token: residuals of five stretches from the ratio of the sums."""
    mean_N = np.mean(differences_SxN, axis=0)
    stretches = np.split(np.arange(len(tokens_N)), 5)
    ratio = mean_N.sum() / tokens_N.sum()
    residuals = [mean_N[i].sum() - ratio * tokens_N[i].sum() for i in stretches]
    return 5 / 4 * sum(x**2 for x in residuals) / tokens_N.sum() ** 2, 4


def draw_differences(between, within, seeds=3, mean=-0.05):
    """Differences of two models' losses in fifty blocks: seeds differ, and the same blocks are easy for all of them."""
    draw = np.random.default_rng(5)
    tokens_N, of_block_N = draw.integers(500, 1500, 50), draw.normal(0, within, 50)
    a_token_SxN = mean + draw.normal(0, between, (seeds, 1)) + of_block_N + draw.normal(0, within / 9, (seeds, 50))
    return a_token_SxN * tokens_N, tokens_N


def planted_lines(differences_SxN, tokens_N, **more):
    blocks = {"tokens_blocks": tokens_N.tolist()}
    for seed, difference_N in enumerate(differences_SxN):
        for run, nll in (("flash", 4.0 * tokens_N + difference_N), ("attention", 4.0 * tokens_N)):
            yield line(run, seed, 1.0, **blocks, nll_blocks=nll.tolist(), **more)


@pytest.mark.parametrize(("between", "within"), [(0.02, 0.01), (0.002, 0.1), (0.02, 0.05)])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_interval_has_the_seeds_and_the_text(between, within, seeds):
    differences_SxN, tokens_N = draw_differences(between, within, seeds)
    result = NO_WORSE.verdict_line([*planted_lines(differences_SxN, tokens_N)], [])
    logs_S = differences_SxN.sum(1) / tokens_N.sum()
    low, high, shares = interval(logs_S, [text_variance(differences_SxN, tokens_N)])
    assert [result["low"], result["high"]] == pytest.approx([low, high], rel=1e-9)
    assert [result["shares"][x] for x in ("seeds", "text")] == pytest.approx(shares)
    assert result["ratio"] == pytest.approx(math.exp(logs_S.mean()))
    assert f"(95 %: {low:.3f} to {high:.3f}; of the variance {100 * shares[0]:.0f} % seeds, " in result["figure"]


@pytest.mark.parametrize("correlation", (0.0, 0.6))
def test_the_interval_of_a_text_holds_the_truth_as_often_as_it_says(correlation):
    """Fifty blocks whose neighbours are correlated, like those of documents."""
    draw, held = np.random.default_rng(3), []
    for _ in range(2000):
        tokens, noise = draw.integers(500, 1500, 50), draw.normal(0, 0.1, 70)
        for i in range(1, 70):
            noise[i] += correlation * noise[i - 1]
        differences = tokens * (0.01 + noise[20:])
        variance, freedom = variance_of_text(differences, tokens)
        off = abs(differences.sum() / tokens.sum() - 0.01)
        held.append(off <= stats.t.ppf(0.975, freedom) * math.sqrt(variance))
    assert 0.92 < np.mean(held) < 0.965


@pytest.mark.parametrize(("text", "expected"), [(0.0, 0.95), (5e-6, 0.955), (1e-3, 0.95)])
def test_the_interval_of_three_seeds_holds_the_truth_as_often_as_it_says(text, expected):
    draw, held = np.random.default_rng(2), []
    for _ in range(4000):
        logs = draw.normal(math.log(1.03), 0.01, 3) + draw.normal(0, math.sqrt(text))
        low, high = MeanRatio(logs, {"text": Variance(text * draw.chisquare(4) / 4, 4)}).interval
        held.append(low <= 1.03 <= high)
    assert np.mean(held) == pytest.approx(expected, abs=0.01)


def simulate_power(mean, deviation, text, limits, seeds, draws=20_000):
    """How often the rule decides, when all is drawn anew."""
    draw = np.random.default_rng(7)
    logs_DxS = draw.normal(mean, deviation, (draws, seeds)) + draw.normal(0, math.sqrt(text), (draws, 1))
    of_seeds, of_text = logs_DxS.var(1, ddof=1) / seeds, text * draw.chisquare(4, draws) / 4
    total = of_seeds + of_text
    total_freedom = total**2 / (of_seeds**2 / (seeds - 1) + of_text**2 / 4)
    parts = (total, total_freedom), (of_seeds, seeds - 1), (of_text, 4)
    half = np.max([stats.t.ppf(0.975, freedom) * np.sqrt(variance) for variance, freedom in parts], axis=0)
    low, high = np.exp(logs_DxS.mean(1) - half), np.exp(logs_DxS.mean(1) + half)
    return np.mean((limits[0] <= low) & (high <= limits[1]) | (high < limits[0]) | (low > limits[1]))


@pytest.mark.parametrize("limits", [(0.0, 1.02), (0.0, 1 / 1.02), (1 / 1.02, 1.02), (1.02, math.inf)])
@pytest.mark.parametrize(("mean", "deviation", "text"), [(-0.051, 0.031, 0.0), (0.0, 0.01, 4e-5), (0.07, 0.03, 2e-4)])
def test_power_against_a_simulation(limits, mean, deviation, text):
    """Three seeds with this mean and deviation; with more of them the error of the text stays."""
    seen = MeanRatio(mean + deviation * np.array([-1.0, 0.0, 1.0]), {"text": Variance(text, 4)})
    for seeds in (3, 5, 7):
        expected = simulate_power(mean, deviation, text, limits, seeds)
        assert seen.power(*limits, seeds) == pytest.approx(expected, abs=0.015)


def test_power_of_seeds_alone_is_a_noncentral_t():
    seen = MeanRatio(-0.051 + 0.031 * np.array([-1.0, 0.0, 1.0]), {})
    for seeds in (3, 5, 7):
        noncentral_t = stats.nct(seeds - 1, (math.log(1.02) + 0.051) / (0.031 / seeds**0.5))
        end = stats.t.ppf(0.975, seeds - 1)
        assert seen.power(0.0, 1.02, seeds) == pytest.approx(noncentral_t.sf(end) + noncentral_t.cdf(-end), abs=0.003)


@pytest.mark.parametrize(("within", "verdict"), [(0.002, HOLDS), (0.2, UNDECIDED)])
def test_what_the_text_cannot_tell_decides_nothing(within, verdict):
    """All seeds are below the bound; but other text could put them above it."""
    differences_SxN, tokens_N = draw_differences(0.0, within)
    differences_SxN += (math.log(0.98) - differences_SxN.sum(1, keepdims=True) / tokens_N.sum()) * tokens_N
    result = NO_WORSE.verdict_line([*planted_lines(differences_SxN, tokens_N)], [])
    assert [*result["ratios"].values()] == pytest.approx([0.98] * 3)
    assert result["verdict"] == verdict


def test_seeds_that_were_scored_on_other_texts_are_not_averaged():
    lines = [x | {"corpus_hash": f"{x['seed'] > 1}"} for x in pairs(1.0, 1.0, 1.0)]
    assert NO_WORSE.verdict_line(lines, [])["figure"] == "not scored on the same targets"
    few = [x | {"tokens_blocks": TOKENS[:19], "nll_blocks": x["nll_blocks"][:19]} for x in pairs(1.0, 1.0, 1.0)]
    assert NO_WORSE.verdict_line(few, [])["figure"] == "scored in 19 blocks of text, too few to know its error"


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


ROUNDS = 20
STEADY = np.ones(ROUNDS)


def make_times(**rounds_ms):
    return [
        {"run": step_name("rows", run), "microbatch_ms": np.median(ms), "rounds": len(ms), "rounds_ms": [*ms]}
        for run, ms in rounds_ms.items()
    ]


def rounds_variance(logs_R):
    """The mean of the medians of five stretches of four rounds, its variance and degrees of freedom."""
    medians = [np.median(logs_R[i : i + 4]) for i in range(0, ROUNDS, 4)]
    return np.mean(medians), sum((x - np.mean(medians)) ** 2 for x in medians) / 4 / 5, 4


def curves(flash_ms, attention_ms=600.0):
    """Both have the same power law in steps, so at equal time the quicker one is better by (its speed)^0.3."""
    lines = [
        line(run, seed, power_law(1000 * share), share)
        for run in ("flash", "attention")
        for seed in SEEDS
        for share in (1.0, 0.25, 0.5)
    ]
    return lines, make_times(flash=flash_ms * STEADY, attention=attention_ms * STEADY)


@pytest.mark.parametrize(("flash_ms", "verdict"), [(300.0, HOLDS), (400.0, HOLDS), (600.0, FAILS), (1000.0, FAILS)])
def test_at_equal_time_the_slower_curve_is_read_where_the_quicker_one_ends(flash_ms, verdict):
    result = AT_EQUAL_TIME.verdict_line(*curves(flash_ms))
    assert result["verdict"] == verdict
    assert [*result["ratios"].values()] == pytest.approx([(flash_ms / 600) ** 0.3] * 3)


@pytest.mark.parametrize(("spread", "verdict"), [(0.02, HOLDS), (0.5, UNDECIDED)])
def test_at_equal_time_the_spread_of_the_times_counts(spread, verdict):
    """On a power law the logarithm of the ratio is 0.3 times that of the steps' times, and so is its error."""
    lines, _ = curves(400.0)
    noise = np.exp(np.random.default_rng(1).normal(0, spread, (2, ROUNDS)))
    result = AT_EQUAL_TIME.verdict_line(lines, make_times(flash=400 * noise[0], attention=600 * noise[1]))
    mean, variance, freedom = rounds_variance(0.3 * np.log(400 * noise[0] / (600 * noise[1])))
    low, high, _ = interval([mean] * 3, [(variance, freedom)])
    assert [result["low"], result["high"]] == pytest.approx([low, high], rel=1e-6)
    assert result["verdict"] == verdict and result["shares"]["times"] == pytest.approx(1.0)
    assert [*result["ratios"].values()] == pytest.approx([math.exp(mean)] * 3)


def test_a_drift_of_both_times_cancels():
    """A machine that slows down to half its speed: only the ratio of the two steps in a round counts."""
    lines, times = curves(400.0)
    drift = np.linspace(1, 2, ROUNDS)
    drifted = AT_EQUAL_TIME.verdict_line(lines, make_times(flash=400 * drift, attention=600 * drift))
    steady = AT_EQUAL_TIME.verdict_line(lines, times)
    assert drifted["verdict"] == HOLDS
    assert [drifted[x] for x in ("ratio", "low", "high")] == pytest.approx(
        [steady[x] for x in ("ratio", "low", "high")]
    )


def test_a_slow_round_changes_little():
    """One in which a neighbour took the machine away from one of the two."""
    lines, times = curves(400.0)
    slow = 400 * STEADY
    slow[7] *= 5
    result, steady = (
        AT_EQUAL_TIME.verdict_line(lines, x) for x in (make_times(flash=slow, attention=600 * STEADY), times)
    )
    assert [result[x] for x in ("ratio", "low", "high")] == pytest.approx([steady[x] for x in ("ratio", "low", "high")])


def test_at_equal_time_the_interval_has_seeds_text_and_times():
    """Losses that fall alike, with differences of seeds and blocks; the slower one is read at 2/3 of its budget."""
    differences_SxN, tokens_N = draw_differences(0.1, 0.03)
    fall = {share: 0.3 * math.log(share) * tokens_N for share in (0.25, 0.5, 1.0)}
    lines = [
        x | {"share": share, "step": round(1200 * share), "nll_blocks": (np.array(x["nll_blocks"]) - less).tolist()}
        for share, less in fall.items()
        for x in planted_lines(differences_SxN, tokens_N)
    ]
    logs_R = np.log(2 / 3) + np.random.default_rng(4).normal(0, 0.05, ROUNDS)
    result = AT_EQUAL_TIME.verdict_line(lines, make_times(flash=600 * np.exp(logs_R), attention=600 * STEADY))
    mean, variance, freedom = rounds_variance(logs_R)
    logs_S = differences_SxN.sum(1) / tokens_N.sum() + 0.3 * mean
    shared = [text_variance(differences_SxN, tokens_N), (0.09 * variance, freedom)]
    low, high, shares = interval(logs_S, shared)
    assert [result["low"], result["high"]] == pytest.approx([low, high], rel=1e-6)
    assert [*result["shares"].values()] == pytest.approx(shares, rel=1e-4) and min(shares) > 0.01


def test_the_timing_with_the_most_rounds_counts():
    lines, times = curves(400.0)
    noisy = [x | {"rounds_ms": [600.0], "rounds": 1} for x in times]
    result = AT_EQUAL_TIME.verdict_line(lines, [*noisy, *times, *noisy])
    assert result["verdict"] == HOLDS


@pytest.mark.parametrize("other", [{"device": "other"}, {"config_hash": "other"}])
def test_steps_that_were_timed_apart_are_not_compared(other):
    """The newer timing has no step of the second model, the older one has fewer rounds."""
    lines, times = curves(400.0)
    old = [x | {"rounds": 3} for x in times]
    new = [x | other | {"rounds_ms": [100.0] * ROUNDS} for x in times[:1]]
    result = AT_EQUAL_TIME.verdict_line(lines, [*old, *new])
    assert result["verdict"] == UNDECIDED and "the step of attention was not timed" in result["figure"]
    assert AT_EQUAL_TIME.verdict_line(lines, [*old, *({**x, "rounds": 1} for x in new)])["verdict"] == HOLDS


def test_at_equal_time_without_a_time_or_an_overlap():
    lines, times = curves(100.0)  # flash ends before the first budget of attention
    result = AT_EQUAL_TIME.verdict_line(lines, times)
    assert result["verdict"] == UNDECIDED and "166.67 is not within the 250 to 1000 of the curve" in result["figure"]
    result = AT_EQUAL_TIME.verdict_line(lines, times[:1])
    assert result["verdict"] == UNDECIDED and result["figure"] == "the step of attention was not timed"


def test_times_without_rounds_decide_nothing():
    lines, times = curves(400.0)
    of_old = [{key: value for key, value in x.items() if key != "rounds_ms"} for x in times]
    result = AT_EQUAL_TIME.verdict_line(lines, of_old)
    assert result["verdict"] == UNDECIDED and "ratio" not in result
    assert result["figure"] == "flash and attention were timed without their rounds: time them again"
    slow = [x | {"rounds_ms": x["rounds_ms"][: 1 if i else None]} for i, x in enumerate(times)]  # one has one turn
    result = AT_EQUAL_TIME.verdict_line(lines, slow)
    assert result["figure"] == "flash and attention were timed together in 1 rounds: time them in 10 or more"


def test_the_table_names_rule_and_figure():
    lines = [*pairs(1.0, 1.01, 1.02)]
    table = verdict_table(BY_INTERVAL, [NO_WORSE.verdict_line(lines, []), AT_EQUAL_TIME.verdict_line(lines, [])])
    assert "A verdict needs 3 seeds and an interval that is all inside the bounds" in table
    assert "| rows: flash at most 1.02 × attention, at equal tokens" in table
    assert (
        "1.010 (1.000–1.020, 3 seeds) × attention (95 %: 0.985 to 1.035; of the variance 100 % seeds, 0 % text)"
        in table
    )
    assert "at most 0.9804 × attention, at equal time" in table
