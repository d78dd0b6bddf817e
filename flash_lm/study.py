"""A study: runs of one config that differ in a few keys, each trained and evaluated once, however often it is begun."""

import itertools
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from flash_lm.analysis.results import append_jsonl, read_jsonl
from flash_lm.command import override
from flash_lm.config import parse
from flash_lm.errors import InputError, RunError
from flash_lm.training.bare_step import completed
from flash_lm.training.evaluation import evaluate
from flash_lm.training.loop import train

Changes = Mapping[str, Any]  # key of the config, such as model.chunk_size -> value
Runs = Mapping[str, Changes]  # by name


def changed(config: ConfigDict, changes: Changes) -> Any:
    """A copy of the config with these values: a ConfigDict, whose keys no type checker knows."""
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(dict(changes))
    return copy


def grid_runs(config: ConfigDict, grid: list[str]) -> tuple[Runs, list[str]]:
    """The product of a grid.

    Args:
        config: that the keys are of.
        grid: such as "model.chunk_size=64,128", one a key.

    Returns:
        The runs that are possible, and a sentence on each combination that is not.

    Raises:
        InputError: a key or a value that is wrong by itself, or nothing that is possible.
    """
    axes, problems = [], []
    for words in grid:
        key, _, values = words.partition("=")
        axis = []
        for value in re.split(r",(?![^(]*\))", values):  # the commas that are not inside a tuple
            alone: Any = config.copy_and_resolve_references()
            problem = override(alone, f"--config.{key}={value}") or problem_of(alone)
            problems += [f"--grid {words}: {problem}"] if problem else []
            axis += [] if problem else [(key, value, _value(alone, key))]
        axes.append(axis)
    if problems:
        raise InputError("\n".join(problems))
    runs, impossible = {}, []
    for combination in itertools.product(*axes):
        name = ",".join(f"{key.split('.')[-1]}={text}" for key, text, _ in combination).replace("/", "_")
        changes = {key: value for key, _, value in combination}
        if problem := problem_of(changed(config, changes)):
            impossible.append(f"{name} is left out: {problem}")
        else:
            runs[name] = changes
    if not runs:
        raise InputError("\n".join(impossible) or "the grid is empty: give --grid=model.chunk_size=64,128, or the like")
    return runs, impossible


def check_runs(config: ConfigDict, runs: Runs) -> None:
    """Checks the config of every run.

    Raises:
        InputError: with what is wrong, a line a run.
    """
    problems = {name: problem_of(changed(config, changes)) for name, changes in runs.items()}
    if wrong := [f"{name}: {problem}" for name, problem in problems.items() if problem]:
        raise InputError("\n".join(wrong))


def problem_of(config: ConfigDict) -> str | None:
    """What is wrong with a config, in one line."""
    try:
        completed(parse(config))
    except InputError as error:
        return "; ".join(str(error).splitlines())
    return None


def run_study(
    config: ConfigDict, runs: Runs, workdir: pathlib.Path, split: str, should_stop: Callable[[], bool]
) -> dict[str, str]:
    """Trains and evaluates each run in a folder of its name; what is done is skipped, what was begun goes on.

    Args:
        config: of all.
        runs: how they differ.
        workdir: of the folders.
        split: to be scored.
        should_stop: asked after every step and every run; when true, the study is left as it is.

    Returns:
        Why it failed, for each run that did: its loss became non-finite. The others are not kept from running.

    Raises:
        InputError: bad config, data or workdir.
    """
    failures = {}
    for number, (name, changes) in enumerate(runs.items(), start=1):
        folder, here = workdir / name, changed(config, changes)
        if is_done(folder, split, here.train.steps):
            print(f"run {number} of {len(runs)}, {name}: done before", flush=True)
            continue
        print(f"run {number} of {len(runs)}, {name}", flush=True)
        try:
            train(here, folder, should_stop)
        except RunError as error:
            failures[name] = str(error)
            print(f"{name} failed: {error}", flush=True)
            continue
        if should_stop():
            break
        append_jsonl(folder / "results.jsonl", evaluate(folder, split, []))
    return failures


def is_done(folder: pathlib.Path, split: str, steps: int) -> bool:
    """Whether the run in a folder has been evaluated on a split after its last step."""
    file = folder / "results.jsonl"
    lines = read_jsonl(file) if file.exists() else []
    return any(line["split"] == split and line["step"] == steps for line in lines)


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config
