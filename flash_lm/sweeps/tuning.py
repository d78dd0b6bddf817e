"""Tunes a key, such as the learning rate, for each of several models by successive halving.

Values are powers of two times that of the config. The first round trains five of them on a quarter of the tokens, the
next the best three on half of the tokens, and the last the best two on all; `train.decay_steps` is that of the last
round, and is shorter in the others in proportion. In each round the best value is trained beside both of its
neighbours, so a grid that ends at its best value grows.
"""

import math
import pathlib
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from flash_lm.config.changes import Changes, Runs, apply_changes
from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import Line, read_jsonl, write_jsonl
from flash_lm.sweeps.grid import check_runs, get_value, raise_stopped, run_study

_FACTOR = 2.0
_PARTS = (4, 2, 1)  # of the budget, by round
_FIRST = 2  # values on each side of that of the config, at first
_FARTHEST = 8  # factors from the value of the config to the ends of the grid, however it grows
_FEWEST = 10  # steps of a run


def tune(
    config: ConfigDict,
    models: Runs,
    key: str,
    budget: int,
    workdir: pathlib.Path,
    should_stop: Callable[[], bool],
    vmap: int = 1,
) -> list[Line]:
    """Tunes a key for each model; finished runs are not made again.

    Args:
        config: the config that all runs start from.
        models: how the models differ, by name.
        key: a key with a positive number, such as train.learning_rate.
        budget: tokens of a run of the last round.
        workdir: folder of the runs; tuning.jsonl has a line for each of them.
        should_stop: called after every step; when it returns true, tuning stops where it is.
        vmap: most values of `train.learning_rate` to train as one program.

    Returns:
        A line for each run: model, round (from 1), tokens, key, value, and loss on the validation split, nats a
        target, or why it failed.

    Raises:
        InputError: bad config, key, budget or data.
        Stopped: it was asked to stop.
    """
    check_runs(config, models)
    for changes in models.values():
        _check(apply_changes(config, changes), key, budget)
    # Each round keeps the best values of the one before.
    lines: list[Line] = []
    for model, changes in models.items():
        middle = get_value(apply_changes(config, changes), key)
        exponents = [*range(-_FIRST, _FIRST + 1)]  # exponents of the factor
        for number, part in enumerate(_PARTS, start=1):
            losses: dict[int, float] = {}
            # The grid grows until both neighbours of the best value are trained.
            while exponents:
                values = [_value(middle, exponent) for exponent in exponents]
                shorter = {**changes, **_shorter(apply_changes(config, changes), budget, part)}
                results = _train_values(config, shorter, model, key, values, workdir, should_stop, vmap)
                losses |= {
                    exponent: line.get("loss", math.inf) for exponent, line in zip(exponents, results, strict=True)
                }
                lines += [{"model": model, "round": number, **line} for line in results]
                write_jsonl(workdir / "tuning.jsonl", lines)
                best = min(losses, key=lambda exponent: (losses[exponent], abs(exponent)))
                exponents = [x for x in (best - 1, best + 1) if x not in losses and abs(x) <= _FARTHEST]
            kept = math.ceil((2 * _FIRST + 1) / 2**number)
            exponents = sorted(sorted(losses, key=lambda exponent: losses[exponent])[:kept])
    return lines


def best_values(lines: list[Line]) -> list[Line]:
    """Selects the best run of the last round of each model.

    Args:
        lines: from `tune`.

    Returns:
        Its line, with `bracketed`: whether smaller and greater values are worse; and `grown`: whether the grid
        had to grow, since a value at its end was the best so far.
    """
    best_lines = []
    for model in dict.fromkeys(line["model"] for line in lines):
        lines_of_model = [line for line in lines if line["model"] == model]
        # The best value of the last round, and whether the grid has values on both of its sides.
        last = {line["value"]: line for line in lines_of_model if line["round"] == len(_PARTS)}
        first = [line["value"] for line in lines_of_model][: 2 * _FIRST + 1]
        best = min(last, key=lambda value: last[value].get("loss", math.inf))
        grown = any(not min(first) <= line["value"] <= max(first) for line in lines_of_model)
        bracketed = "loss" in last[best] and min(last) < best < max(last)
        best_lines.append({**last[best], "bracketed": bracketed, "grown": grown})
    return best_lines


def _train_values(
    config: ConfigDict,
    changes: Changes,
    model: str,
    key: str,
    values: list[float],
    workdir: pathlib.Path,
    should_stop: Callable[[], bool],
    vmap: int,
) -> list[Line]:
    """Trains a model at several values, and returns a line for each."""
    # Tokens are part of a run's name, so that rounds do not share folders.
    tokens = changes["train.tokens"]
    names = [f"{model},{key}={value:g},tokens={tokens}" for value in values]
    runs = {name: {**changes, key: value} for name, value in zip(names, values, strict=True)}
    check_runs(config, runs)
    failures = run_study(config, runs, workdir, "validation", should_stop, vmap=vmap)
    raise_stopped(should_stop)
    lines = []
    for name, value in zip(names, values, strict=True):
        line = {"tokens": tokens, "key": key, "value": value, "run": name}
        lines.append(line | ({"failed": failures[name]} if name in failures else _score(workdir / name)))
    return lines


def _shorter(config: Any, budget: int, part: int) -> Changes:
    """The schedule of a part of the budget: decay_steps shrinks with it."""
    decay = config.train.decay_steps
    shorter = {"train.decay_steps": max(1, decay // part)} if decay else {}
    return {"train.steps": None, "train.tokens": budget // part, **shorter}


def _score(folder: pathlib.Path) -> dict[str, Any]:
    *_, line = (line for line in read_jsonl(folder / "results.jsonl") if line["split"] == "validation")
    return {name: line.get(name) for name in ("loss", "step", "seed", "config_hash", "trained_git")}


def _check(config: Any, key: str, budget: int) -> None:
    """Checks a model's key and the tokens of its first round."""
    try:
        value = get_value(config, key)
    except (KeyError, TypeError):
        raise InputError(f"--tune={key}: there is no such key; flash-lm keys lists the keys") from None
    if not isinstance(value, float) or value <= 0:
        raise InputError(f"--tune={key} starts from the config's value, and {value} is not a number above 0.0")
    least = _FEWEST * max(_PARTS) * parse(config).data.tokens_per_batch
    if budget < least:
        raise InputError(
            f"--budget={budget} is too small: a run of the first round has a quarter of it, and needs {_FEWEST} steps, "
            f"so give at least {least}"
        )


def _value(middle: float, exponent: int) -> float:
    return float(f"{middle * _FACTOR**exponent:.3g}")
