"""Perplexity against training time at 25 million parameters on one GPU, by annealed branches of one trunk per model.

    python -m studies.gpu.curve --data=$DATA/books --out=benchmarks/gpu/results/curve

README.md has the prediction and the rule. Trunks, decays and scores are those of studies/quality. Lines are written
after each budget. What has no time left is named; the same command goes on from there.
"""

import argparse
import math
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from flash_lm.cli.compile_cache import keep_compiled
from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.config.changes import apply_changes
from flash_lm.errors import NonfiniteError, Stopped
from flash_lm.models.facts import FORWARD_AND_BACKWARD, facts
from flash_lm.report.figure import can_draw
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.report.ratios import NoFigureError
from flash_lm.runs.jsonl import Line, read_jsonl
from flash_lm.timing.cell_lines import CellLines
from flash_lm.timing.machine import machine, machines
from flash_lm.training.chips import peak_flops
from flash_lm.training.interrupt import stop_on_signal
from studies.curves import ratio_at_equal_time, seed_curves
from studies.quality import config as study
from studies.quality.run import STABLE, Part, Trunk, list_trunks, score_decays

PART = "curve"
BASE, COMPARED = "transformer_plus_plus", "flash"
SHARES = (0.5, 1.0)  # each costs a start and a scoring, which take as long as the training
# Rates are the best known of the small models of studies/controls, divided by four as the width is four times theirs.
MODELS: dict[str, dict[str, Any]] = {
    BASE: {"model.family": "transformer_plus_plus", "train.learning_rate": 0.001},
    COMPARED: {"model.family": "flash", "train.learning_rate": 0.002},
    # Only if time is left.
    "flash/local": {
        "model.family": "flash",
        "train.learning_rate": 0.002,
        "model.chunks.global_attention": False,
    },
}
COLUMNS: Columns = {
    "model": ("run", "{}"),
    "parameters": ("parameters", "{:,}"),
    "steps": ("step", "{:,}"),
    "tokens": ("trained_tokens", "{:,}"),
    "training, s": ("train_s", "{:.1f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "share of the peak": ("peak_fraction", "{}"),
    "on": ("machine", "{}"),
}


class Size(NamedTuple):
    """The size of the models and of the budget: config keys, and the steps of the full budget."""

    changes: dict[str, Any]
    steps: int


FULL = Size(
    {
        "model.num_layers": 7,
        "model.model_dim": 512,
        "model.num_heads": 8,
        "model.max_length": 2048,
        "model.dtype": "bfloat16",
        "model.remat": "none",
        "data.length": 2048,
        "data.tokens_per_batch": 65536,
        "train.warmup_steps": 40,
        "train.loss_chunk": 8192,
    },
    steps=400,
)
# A hundredth of the parameters, and some of the tokens of a step.
REHEARSAL = Size(
    FULL.changes
    | {
        "model.num_layers": 2,
        "model.model_dim": 64,
        "model.num_heads": 2,
        "model.max_length": 128,
        "model.dtype": "float32",
        "data.length": 128,
        "data.tokens_per_batch": 1024,
        "data.vocab_size": 512,
        "model.chunks.size": 32,
        "train.warmup_steps": 2,
    },
    steps=20,
)


def make_trunks(models: Sequence[str], data: pathlib.Path | None, size: Size) -> list[Trunk]:
    """Returns the trunks of models on the texts of a folder, or on Python's sources, which every machine has."""
    text = {"data.corpus": "hf", "data.path": str(data)} if data else {"data.corpus": "stdlib"}
    defaults = {"model.divides": None, "model.residual_init": None}  # today's, not those of the study's first runs
    quiet = {"train.eval_every": 0, "train.log_every": 10}
    config = apply_changes(study.get_config(), size.changes | text | defaults | quiet)
    part = Part(PART, {name: MODELS[name] for name in models}, {}, (0,), size.steps, shares=SHARES)
    return list_trunks(config, [part])


def make_curve(trunk: Trunk, folder: pathlib.Path, should_stop: Callable[[], bool], keep: Callable[[Line], None]):
    """Trains a trunk and its decays, and keeps a line per score as each budget ends.

    Raises:
        NonfiniteError: the loss became non-finite.
        Stopped: `should_stop` returned true.
    """
    data, about = trunk.config.data, None
    for lines in score_decays(trunk, trunk.config.train.learning_rate, folder, should_stop):
        about = about or _speed(trunk, folder)
        for line in lines:
            seconds = line["step"] * about["step_ms"] / 1000
            keep(line | about | {"train_s": seconds, "trained_tokens": line["step"] * data.tokens_per_batch})


def _speed(trunk: Trunk, folder: pathlib.Path) -> Line:
    """Returns the median time of a step of the trunk, without those that compile, and its rates."""
    trained = [x for x in read_jsonl(folder / STABLE / "metrics.jsonl") if x["split"] == "train" and "step_ms" in x]
    step_ms = statistics.median(line["step_ms"] for line in trained[1:] or trained)
    data = trunk.config.data
    model: Any = apply_changes(trunk.config, {"model.vocab_size": data.vocab_size}).model
    length, tokens = data.length, data.tokens_per_batch
    of_token = FORWARD_AND_BACKWARD * facts(model.family, model, (), (length,)).flops[length]
    rate = of_token * tokens / (step_ms / 1000)
    peak = peak_flops(jax.devices()[0].device_kind, model.dtype)
    return {
        "step_ms": step_ms,
        "tokens_per_s": tokens / (step_ms / 1000),
        "peak_fraction": round(rate / peak, 4) if peak else "unknown",
    }


def comparison(lines: Sequence[Line]) -> str:
    """Returns FLASH's perplexity over that of Transformer++ after equal tokens and after equal time, in words."""
    one, other = (seed_curves(lines, PART, name).get(0, []) for name in (COMPARED, BASE))
    if not (one and other):
        return "nothing is compared: a model has no budget yet"
    step_ms = {line["run"]: line["step_ms"] for line in lines if "step_ms" in line}
    of_other = dict(other)
    sentences = [f"after {x:,.0f} steps {math.exp(loss - of_other[x]):.3f}" for x, loss in one if x in of_other]
    try:
        slower = step_ms[COMPARED] / step_ms[BASE]
        sentences.append(f"at equal time {ratio_at_equal_time(one, other, slower):.3f} (a step takes {slower:.2f}×)")
    except NoFigureError as error:
        sentences.append(f"not at equal time: {error}")
    return f"perplexity of {COMPARED} / {BASE}, one seed, rates not tuned: {'; '.join(sentences)}"


def report(lines: list[Line], out: pathlib.Path) -> None:
    """Writes table.md and curves.png, and prints the table."""
    scores = [line | {"machine": machines([line])} for line in lines if line.get("split") == "test"]
    text = f"{markdown_table(scores, COLUMNS)}\n\n{comparison(lines)}\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    if scores and can_draw():
        axes = ("train_s", "seconds of training", "perplexity", "perplexity of the test split")
        plot_panels([[Panel(scores, *axes)]], out / "curves.png", curve="run")


def main(argv: list[str]) -> None:
    """Trains the models in turn and writes a line of curve.jsonl in OUT after each budget, and table.md."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--data", type=pathlib.Path, help="folder of texts; default: Python's own sources")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/gpu/curve"), help="runs in progress")
    parser.add_argument("--seconds", type=positive, help="after which it saves and ends")
    parser.add_argument("--rehearse", action="store_true", help="a hundredth of the size")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    size, end = REHEARSAL if arguments.rehearse else FULL, time.monotonic() + (arguments.seconds or math.inf)
    keep_compiled()  # a trunk and its decays have one program
    about = machine()
    results = CellLines(arguments.out / "curve.jsonl", "run", "share", "split")
    trunks = make_trunks(arguments.models, arguments.data, size)
    with stop_on_signal() as stopped:
        should_stop = lambda: stopped() or time.monotonic() > end
        for number, trunk in enumerate(trunks):
            folder = arguments.workdir / trunk.name
            try:
                make_curve(trunk, folder, should_stop, lambda line: results.put(line | about))
            except NonfiniteError as error:
                results.put(trunk.about | {"share": 1.0, "split": "test", "failed": str(error)} | about)
            except Stopped:
                left = ", ".join(x.model for x in trunks[number:])
                print(f"no time is left for {left}: the same command goes on from there", flush=True)
                break
            shutil.rmtree(folder, ignore_errors=True)
            report(results.lines, arguments.out)


if __name__ == "__main__":
    run(main)
