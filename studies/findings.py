"""Writes the findings and the picture's caption into README.md, with figures from the lines of the results.

The sentences are in findings.md and caption.md of this folder, with names of figures in braces. Words that depend on a
verdict or a figure are chosen here, so that a changed line changes its sentence.
"""

import collections
import pathlib
import statistics
import tomllib

from flash_lm.errors import InputError
from flash_lm.report.marked_blocks import replace_block
from flash_lm.runs.jsonl import Line, read_lines
from flash_lm.sweeps.jobs import read_job_lines
from studies.curves import perplexity_after, ratio_at_equal_time, seed_curves
from studies.protocol.hypotheses import Hypothesis, best_timings, step_name
from studies.protocol.verdict import ALIKE, FAILS, HOLDS, NOT_RUN, UNDECIDED, WORDS

HERE = pathlib.Path(__file__).parent
_QUALITY = "studies/quality/results"
SUMMARY, VERDICTS = f"{_QUALITY}/summary.jsonl", f"{_QUALITY}/verdicts.jsonl"
TIMES, TUNED = f"{_QUALITY}/step_times.jsonl", f"{_QUALITY}/tuning/best.jsonl"
FIRST_SUMMARY = f"{_QUALITY}/as_init/summary.jsonl"
GPU, CHECKS = "benchmarks/gpu/results/step_time/steps.jsonl", "studies/controls/results/checks.jsonl"
CONTROLS = "studies/controls/results/summary.jsonl"
CLAIMS = "studies/claims/results/verdicts.jsonl"
PART = "rows_of_512"
FLASH, FIRST_FLASH, QUAD, SOFTMAX, LINEAR = (
    *("flash_scores", "flash", "flash_quad"),
    *("transformer_plus_plus", "linear_transformer"),
)
NAMES = {SOFTMAX: "Transformer++", LINEAR: "the Linear Transformer", FIRST_FLASH: "FLASH as it was"}
TEXTS = {"books": "books", "wiki": "Wikipedia", "imdb": "reviews"}
SHARES = {0.25: "a quarter", 0.5: "half", 1.0: "all"}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# relation of a hypothesis -> verdict -> words of a sentence
PHRASES = {
    "no worse": {
        HOLDS: "no worse, by the rule of the study",
        FAILS: "worse, by the rule of the study",
        UNDECIDED: "undecided whether it is no worse",
    },
    "better": {
        HOLDS: "better, by the rule of the study",
        FAILS: "not better, by the rule of the study",
        UNDECIDED: "undecided whether it is better",
    },
}
Figures = dict[str, object]


class Results:
    """The lines of results below the root of the repository."""

    def __init__(self, root: pathlib.Path):
        """Keeps the root; files are read by the methods."""
        self.root = root

    def lines(self, path: str, **where: object) -> list[Line]:
        """Returns the lines of a file with these values; None: lines without that key."""
        lines = read_lines(self.root / path)
        return [line for line in lines if all(line.get(key) == value for key, value in where.items())]

    def single_line(self, path: str, **where: object) -> Line:
        """Returns the only line of a file with these values.

        Raises:
            InputError: no such line, or several.
        """
        lines = self.lines(path, **where)
        if len(lines) != 1:
            named = ", ".join(f"{key} {value}" for key, value in where.items())
            raise InputError(f"{self.root / path} has {len(lines)} lines of {named}, not one")
        return lines[0]

    def study_line(self, model: str, *, path: str = SUMMARY, length: int = 512, position: str | None = None) -> Line:
        """Returns the line of a model of sequence length 512 at the full budget, over its seeds.

        Args:
            model: name of the model.
            path: file of lines.
            length: sequence length of the score.
            position: slice of positions; None: all.
        """
        return self.single_line(path, part=PART, run=model, share=1.0, length=length, slice=position)

    def runs(self) -> list[Line]:
        """Returns the lines of the runs of the quality study."""
        return read_job_lines(self.root / _QUALITY)


def describe_verdict(results: Results, hypothesis: Hypothesis) -> str:
    """Returns words for a verdict: perplexity of the first model over that of the second, interval and verdict.

    Raises:
        InputError: no such line, or it lacks ratios or an interval.
    """
    line = results.single_line(VERDICTS, number=hypothesis.number, hypothesis=hypothesis.text)
    if not line.get("ratios"):
        if line["verdict"] == NOT_RUN:
            return "no figure yet (not run)"
        if hypothesis.at_equal_time:
            return "no figure yet (not timed as the rule asks)"
    if None in (line.get(key) for key in ("ratios", "low", "high")):
        raise InputError(
            f"{VERDICTS}: '{hypothesis.text}' lacks ratios, low or high: write the file again with "
            f"python -m studies.quality --out={_QUALITY}"
        )
    ratio = _link(f"{statistics.geometric_mean(line['ratios'].values()):.3f} times", VERDICTS)
    interval = f"95 %: {line['low']:.3f} to {line['high']:.3f}"
    phrase = PHRASES[hypothesis.relation][line["verdict"]]
    return f"{ratio} the perplexity of {NAMES[hypothesis.second]} ({interval}): {phrase}"


def steps_on_gpu(results: Results) -> tuple[Line, Line]:
    """Returns the step times of FLASH, and of Transformer++ with the fastest softmax, at length 512 on the H200."""
    forms = "flash", f"{SOFTMAX}+quadratic.implementation=cudnn"
    ours, fused = (results.single_line(GPU, family=form, length=512) for form in forms)
    return ours, fused


def ratios_on_gpu(results: Results) -> dict[int, float]:
    """Returns perplexity of FLASH over Transformer++ by seed at equal time, if step times had the H200's ratio."""
    ours, fused = steps_on_gpu(results)
    lines, slower = results.runs(), ours["median_ms"] / fused["median_ms"]
    one, other = (seed_curves(lines, PART, model) for model in (FLASH, SOFTMAX))
    return {seed: ratio_at_equal_time(one[seed], other[seed], slower) for seed in sorted(one.keys() & other)}


def _design_figures(results: Results) -> Figures:
    """Returns figures that all models of the study share."""
    line = results.study_line(FLASH)
    models = results.lines(SUMMARY, part=PART, length=512, slice=None)
    budgets, seeds = ({x[key] for x in models if x["seeds"]} for key in ("share", "seeds"))
    timed = results.lines(TIMES)
    machine = best_timings(timed)[step_name(PART, FLASH)]["device"].partition(",")[0]
    return {
        "size": _size(line["parameters"]),
        "tokens": _tokens(line),
        "texts": _join_words([TEXTS[name] for name in line["corpus"].split("-")]),
        "steps": line["step"],
        "batch": line["batch_tokens"],
        "length": line["trained_length"],
        "seeds": " to ".join(dict.fromkeys(NUMBERS[count] for count in (min(seeds), max(seeds)))),
        "budgets": _join_words([SHARES[share] for share in sorted(budgets)]),
        "machine": machine,
    }


def _flash_figures(results: Results) -> Figures:
    """Returns figures of FLASH against Transformer++."""
    ours, fused = steps_on_gpu(results)
    return {
        "flash_tokens": describe_verdict(results, Hypothesis(1, PART, FLASH, "no worse", SOFTMAX)),
        "flash_time": describe_verdict(results, Hypothesis(2, PART, FLASH, "better", SOFTMAX, at_equal_time=True)),
        **_control_figures(results),
        "gpu_slower": _link(f"{ours['median_ms'] / fused['median_ms']:.2f}", GPU),
        "gpu_size": _size(fused["params"]),
        "gpu_ratio": f"{statistics.geometric_mean(ratios_on_gpu(results).values()):.3f}",
    }


def _control_figures(results: Results) -> Figures:
    """Returns perplexities of Transformer++ tuned at the full budget, and of the models of the study."""
    full = {"part": PART, "length": 512, "share": 1.0, "slice": None}
    tuned = results.single_line(CONTROLS, run=SOFTMAX, **full)
    of_study = lambda run: _link(f"{results.single_line(SUMMARY, run=run, **full)['perplexity']:.1f}", SUMMARY)
    return {
        "control_rate": f"{tuned['rate']:g}",
        "control_softmax": _link(f"{tuned['perplexity']:.1f}", CONTROLS),
        "control_seeds": NUMBERS[tuned["seeds"]],
        "study_softmax": of_study(SOFTMAX),
        "study_flash": of_study(FLASH),
    }


def _check_figures(results: Results) -> Figures:
    """Returns validation losses after 320 steps, one seed, which bear on the lead of FLASH."""
    check = lambda what: _nats(results.single_line(CHECKS, check="loss", what=what)["loss"], CHECKS)
    best = lambda model: _nats(results.single_line(TUNED, model=model)["loss"], TUNED)
    return {
        "without_bias": check("FLASH without its relative position bias"),
        "with_convolution": check("Transformer++ with a short convolution"),
        "check_softmax": best(SOFTMAX),
        "check_flash": best(FLASH),
    }


def _nats(loss: float, path: str) -> str:
    return _link(f"{loss:.2f}", path)


def _long_sequence_figures(results: Results) -> Figures:
    """Returns figures of sequences four times as long as in training, and of the gain from far tokens."""
    lengths = {"64–127": 512, "256–511": 512, "1024–2047": 2048}
    perplexity_at = {at: results.study_line(FLASH, length=n, position=at)["perplexity"] for at, n in lengths.items()}
    last = results.lines(SUMMARY, part=PART, share=1.0, length=512, slice="256–511")
    gains = [1 - x["perplexity"] / results.study_line(x["run"], position="64–127")["perplexity"] for x in last]
    return {
        "flash_moves": _change_with_length(results, FLASH),
        "softmax_moves": _change_with_length(results, SOFTMAX),
        "quad_moves": _change_with_length(results, QUAD),
        "flash_gains": "gains less than 2 %"
        if perplexity_at["64–127"] < ALIKE * min(perplexity_at.values())
        else "gains",
        **{f"at_{at.partition('–')[0]}": _perplexity(x) for at, x in perplexity_at.items()},
        "most_gain": f"{100 * max(gains):.1f}",
    }


def _change_with_length(results: Results, model: str) -> str:
    before, after = (results.study_line(model, length=length)["perplexity"] for length in (512, 2048))
    if after < ALIKE * before:
        return f"stays as good, {_perplexity(after)} after {_perplexity(before)}"
    return f"goes from {_perplexity(before)} to {_perplexity(after)}"


def _attention_figures(results: Results) -> Figures:
    """Returns figures of Transformer++ against the Linear Transformer and FLASH-Quad."""
    softmax, best = (results.single_line(SUMMARY, part="peers", run=name) for name in ("transformer", SOFTMAX))
    curves = seed_curves(results.runs(), PART, LINEAR)
    linear = [perplexity_after(curve, softmax["step"]) for curve in curves.values()]
    alike = all(1 / ALIKE < x / softmax["perplexity"] < ALIKE for x in linear)
    return {
        "softmax_tokens": describe_verdict(results, Hypothesis(3, PART, SOFTMAX, "better", LINEAR)),
        "softmax_part": "and not its softmax" if alike else "and its softmax",
        "short_steps": softmax["step"],
        "short_tokens": _tokens(softmax),
        "short_seeds": f"{NUMBERS[softmax['seeds']]} seed{'s' if softmax['seeds'] > 1 else ''}",
        "transformer": _perplexity(softmax["perplexity"]),
        "linear_by_seed": _join_words([f"{x:.1f}" for x in linear]),
        "short_softmax": _perplexity(best["perplexity"]),
        "quad_time": describe_verdict(results, Hypothesis(10, PART, QUAD, "no worse", SOFTMAX, at_equal_time=True)),
    }


def _detail_figures(results: Results) -> Figures:
    """Returns figures on how a start and a divisor changed verdicts."""
    softmax, flash = (results.study_line(x, path=FIRST_SUMMARY)["perplexity"] for x in (SOFTMAX, FIRST_FLASH))
    return {
        "first_softmax": _perplexity(softmax, FIRST_SUMMARY),
        "first_ratio": _link(f"{flash / softmax:.3f} times", FIRST_SUMMARY),
        "flash_divisor": describe_verdict(results, Hypothesis(8, PART, FLASH, "better", FIRST_FLASH)),
    }


def _claim_figures(results: Results) -> Figures:
    """Returns the number of claims by verdict, and of those undecided by reason."""
    lines = results.lines(CLAIMS)
    counts = collections.Counter(line["verdict"] for line in lines)
    reasons = [line["reasons"] for line in lines if line["verdict"] == UNDECIDED]
    table = tomllib.loads((HERE / "claims" / "claims.toml").read_text(encoding="utf-8"))
    study_line = [row for row in table["claims"] if "trunks" in {part["rule"] for part in row["rules"]}]
    return {
        "claims": len(lines),
        "claims_by_verdict": ", ".join(f"{word} {counts[word]}" for word in WORDS if counts[word]),
        "claims_untested": sum(
            any("validation split alone" in reason for reason in line_reasons) for line_reasons in reasons
        ),
        "claims_withdrawn": sum(
            any(reason.startswith("withdrawn") for reason in line_reasons) for line_reasons in reasons
        ),
        "claims_of_study": NUMBERS[len(study_line)].capitalize(),
    }


def figures(results: Results) -> Figures:
    """Returns the figure for each name in the sentences."""
    parts = (
        _design_figures,
        _flash_figures,
        _check_figures,
        _long_sequence_figures,
        _attention_figures,
        _detail_figures,
        _claim_figures,
    )
    return {name: figure for part in parts for name, figure in part(results).items()}


def render_readme(before: str, results: Results) -> str:
    """Returns README.md with the current sentences."""
    figure_texts = figures(results)
    for name in ("caption", "findings"):
        sentences = (HERE / f"{name}.md").read_text(encoding="utf-8").rstrip()
        before = replace_block(before, name, "python -m studies report", sentences.format(**figure_texts))
    return before


def _link(figure: str, path: str) -> str:
    return f"[{figure}]({path})"


def _perplexity(value: float, path: str = SUMMARY) -> str:
    return _link(f"{value:.1f}", path)


def _size(parameters: int) -> str:
    millions = parameters / 1e6
    return f"{millions:.{0 if millions > 100 else 1}f} million parameters"


def _tokens(line: Line) -> str:
    return f"{line['step'] * line['batch_tokens'] / 1e6:.1f} million tokens"


def _join_words(words: list[str]) -> str:
    *some, last = words
    return f"{', '.join(some)} and {last}"
