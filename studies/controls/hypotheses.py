"""Hypotheses of the controls, with the numbers and rules of studies/controls/README.md."""

import math
import statistics
from collections.abc import Sequence

from flash_lm.runs.jsonl import Line, group_lines
from studies.controls import anchor, recall
from studies.controls.design import CHUNKS, DOUBLE, FAR, LAST_HALF, ROWS, SMALL
from studies.protocol.hypotheses import Hypothesis
from studies.protocol.verdict import DIFFERENCE, Rule, Verdict, judge_seeds

RECALLED = 0.5  # share of the pairs; a model above it has learned to recall
_SOFTMAX, _FLASH, _QUAD = "transformer_plus_plus", "flash_scores", "flash_quad_toeplitz_scores"
_LINEAR = "linear_transformer_rotary"
_rows = lambda number, first, relation, second, **more: Hypothesis(number, ROWS.name, first, relation, second, **more)


def _chunk_hypotheses(number: int, part: str, at: str | None = None) -> list[Hypothesis]:
    """Returns the hypotheses on local attention, global attention and both; `at`: a slice of positions."""
    local, over_all = f"{_FLASH}/local", f"{_FLASH}/global"
    return [
        Hypothesis(number, part, local, "better", over_all, slice=at),
        Hypothesis(number, part, _FLASH, "better", local, slice=at),
        Hypothesis(number, part, _FLASH, "alike", local, slice=at),
    ]


HYPOTHESES = [
    _rows(11, _FLASH, "no worse", _SOFTMAX),
    _rows(11, _FLASH, "better", _SOFTMAX, at_equal_time=True),
    _rows(12, _FLASH, "no worse", f"{_SOFTMAX}/convolution"),
    _rows(12, f"{_FLASH}/no_bias", "no worse", _SOFTMAX),
    _rows(12, f"{_FLASH}/untied", "no worse", f"{_SOFTMAX}/untied"),
    _rows(12, f"{_SOFTMAX}/convolution", "better", _SOFTMAX),
    _rows(12, _FLASH, "better", f"{_FLASH}/no_bias"),
    _rows(13, _QUAD, "no worse", _SOFTMAX),
    _rows(13, _QUAD, "no worse", _SOFTMAX, at_equal_time=True),
    _rows(13, _QUAD, "better", "flash_quad_toeplitz"),
    _rows(14, "transformer_plus", "better", _LINEAR),
    _rows(14, "transformer_plus", "better", "transformer"),
    *_chunk_hypotheses(15, CHUNKS.name),
    *(hypothesis for part in FAR for hypothesis in _chunk_hypotheses(16, part, LAST_HALF)),
    Hypothesis(17, SMALL.name, _FLASH, "no worse", _SOFTMAX),
    Hypothesis(17, DOUBLE.name, _FLASH, "no worse", _SOFTMAX),
]


def recall_verdicts(lines: Sequence[Line]) -> list[Line]:
    """Judges if each model recalls more than half of the pairs with every seed, at the rate with the best median."""
    verdicts = []
    for model in recall.MODELS:
        name = recall.family_name(model)
        model_lines = recall.lines_at_best_rate(lines, name)
        accuracies = [line.get("accuracy", 0.0) for line in model_lines]
        percents = ", ".join(f"{100 * x:.1f} %" for x in accuracies)
        word = judge_seeds([accuracy > RECALLED for accuracy in accuracies])
        verdict = Verdict(word, f"{percents}, rate {model_lines[0]['rate']:g}" if model_lines else "")
        text = f"{recall.PART}: {name} recalls more than {100 * RECALLED:g} % with every seed"
        verdicts.append(verdict.line(number=18, hypothesis=text))
    return verdicts


def anchor_verdict(lines: Sequence[Line]) -> Line:
    """Judges if the Transformer reaches the published loss, in the mean over its seeds."""
    near, published = anchor.NEAR_NATS, anchor.PUBLISHED_NATS
    losses = {
        run: statistics.fmean(line.get("loss", math.inf) for line in run_lines)
        for (run,), run_lines in group_lines([line for line in lines if line["part"] == anchor.PART], "run").items()
    }
    seeds = sum((line["part"], line["run"]) == (anchor.PART, "transformer") for line in lines)
    held = Rule("alike", near, DIFFERENCE).holds(losses.get("transformer", math.inf) - published)
    verdict = Verdict(judge_seeds([held] * seeds), ", ".join(f"{run} {loss:.3f}" for run, loss in losses.items()))
    text = f"{anchor.PART}: transformer within {near:g} of the published {published:g} nats a character"
    return verdict.line(number=19, hypothesis=text)
