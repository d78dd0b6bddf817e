"""Grid sweeps: runs of one config that differ in a few keys, each trained and evaluated once, even after restarts."""

import copy
import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from flash_lm.config.changes import Runs, apply_changes
from flash_lm.config.experiment import is_free_text, parse
from flash_lm.config.overrides import override
from flash_lm.errors import InputError, NonfiniteError, RunError, Stopped
from flash_lm.families.family import complete_config
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import append_jsonl, read_lines
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training.resolve import continue_run, normalize
from flash_lm.training.sharding import check_batch, make_mesh
from flash_lm.training.train_loop import train
from flash_lm.training.vmapped_loop import check_vmapped, train_vmapped


def grid_runs(config: ConfigDict, grid: list[str]) -> tuple[Runs, list[str]]:
    """Builds the runs of a grid: all combinations of its values.

    Args:
        config: the config that has the keys.
        grid: words such as "model.chunks.size=64,128", one per key.

    Returns:
        The runs that are possible, and a sentence on each combination that is not.

    Raises:
        InputError: a key or a value is wrong by itself, a key is repeated, or no combination with a value is
            possible.
    """
    # Parse each axis: the texts of a key, with their values.
    axes, problems = {}, []
    for words in grid:
        key, _, values = words.partition("=")
        if key in axes:
            problems.append(f"--grid: {key} is given twice: give all its values in one --grid")
        axis = axes[key] = {}
        # Split at commas outside of tuples, and at spaces, except in free text such as a path.
        for value in re.split(r",(?![^(]*\))" if is_free_text(key) else r"[,\s]+(?![^(]*\))", values):
            alone = copy.deepcopy(config)
            problem = override(alone, f"--config.{key}={value}") if value else "an empty value"
            problems += [f"--grid={words}: {problem}"] if problem else []
            axis[value] = None if problem else get_value(alone, key)
    if problems:
        raise InputError.of(problems)
    # Combine the axes; every value must be part of a possible run.
    runs, impossible = {}, {}
    without = {(key, text) for key, axis in axes.items() for text in axis}  # values without a possible run so far
    for texts in itertools.product(*axes.values()):
        chosen = dict(zip(axes, texts, strict=True))
        name = ",".join(f"{key.partition('.')[2] or key}={text}" for key, text in chosen.items()).replace("/", "_")
        changes = {key: axes[key][text] for key, text in chosen.items()}
        if problem := find_problem(apply_changes(config, changes)):
            impossible[name] = problem
        else:
            runs[name] = changes
            without -= set(chosen.items())
    if without:
        raise InputError.of(f"{name}: {problem}" for name, problem in impossible.items())
    return runs, [f"{name} is left out: {problem}" for name, problem in impossible.items()]


def resolve_workdir(runs: Runs, workdir: pathlib.Path) -> Runs:
    """Replaces {workdir} in values of a sweep's runs, by which one run may name another: {workdir}/NAME."""
    resolve = lambda value: value.replace("{workdir}", str(workdir)) if isinstance(value, str) else value
    return {name: {key: resolve(value) for key, value in changes.items()} for name, changes in runs.items()}


def check_runs(config: ConfigDict, runs: Runs) -> None:
    """Checks the config of every run.

    Raises:
        InputError: configs are wrong, one line per run.
    """
    problems = {name: find_problem(apply_changes(config, changes)) for name, changes in runs.items()}
    if wrong := [f"{name}: {problem}" for name, problem in problems.items() if problem]:
        raise InputError.of(wrong)


def find_problem(config: ConfigDict) -> str | None:
    """The problem of a config on these devices, on one line; None if it has none."""
    # Also what only a device mesh shows, such as rows that it cannot share.
    try:
        parsed = complete_config(parse(config))
        check_batch(make_mesh(parsed.mesh), parsed.data.batch_size, parsed.train.accumulate)
    except InputError as error:
        return "; ".join(str(error).splitlines())
    return None


def run_study(
    config: ConfigDict,
    runs: Runs,
    workdir: pathlib.Path,
    split: str,
    should_stop: Callable[[], bool],
    lengths: Sequence[int] = (),
    vmap: int = 1,
) -> dict[str, str]:
    """Trains and evaluates each run in a folder of its name; finished runs are skipped, unfinished ones are resumed.

    Args:
        config: the config that all runs start from.
        runs: how they differ.
        workdir: the folder that contains the runs' folders.
        split: the split to score.
        should_stop: called after every step and every run; when it returns true, the study stops where it is.
        lengths: row lengths to score; empty: the length of training.
        vmap: most runs to train as one program, see `programs`.

    Returns:
        Why it failed, for each run that did: its loss became non-finite. The other runs still run.

    Raises:
        InputError: bad config, data or workdir, such as the workdir of a study of another config.
    """
    # Check all folders first, so that nothing is trained if one belongs to another config.
    for name, changes in runs.items():
        if (folder := RunFolder(workdir / name)).holds_run():
            continue_run(normalize(apply_changes(config, changes)), folder)  # raises if it is another config's
    groups = programs(config, runs, vmap)
    for names in groups:
        if len(names) > 1:
            check_vmapped(parse(apply_changes(config, runs[names[0]])))
    # Train and score what is not done; a run with a non-finite loss does not stop the others.
    failures, numbers = {}, {name: number for number, name in enumerate(runs, start=1)}
    for names in groups:
        if should_stop():
            break
        unfinished = {}
        for name in names:
            run_config = apply_changes(config, runs[name])
            parsed = parse(run_config)
            # A run is done when it has been scored at all lengths after its last step.
            asked = list(lengths) or [parsed.data.length]
            done = is_done(workdir / name, split, parsed.train.steps, asked, parsed.train.stop_accuracy)
            print(f"run {numbers[name]} of {len(runs)}, {name}{': already done' if done else ''}", flush=True)
            if not done:
                unfinished[name] = run_config, asked
        failed = _train({workdir / name: run_config for name, (run_config, _) in unfinished.items()}, should_stop)
        for name, (_, asked) in unfinished.items():
            folder = workdir / name
            if folder in failed:
                failures[name] = failed[folder]
                print(f"{name} failed: {failed[folder]}", flush=True)
            elif not should_stop():
                append_jsonl(folder / "results.jsonl", evaluate(folder, split, asked))
    return failures


def programs(config: ConfigDict, runs: Runs, most: int) -> list[list[str]]:
    """Groups runs that differ only in `seed` and `train.learning_rate`: one program can train them together.

    Args:
        config: the config that all runs start from.
        runs: how they differ.
        most: most runs of a group.

    Returns:
        The names of the runs of each group, in the order of the runs.
    """
    if most == 1:
        return [[name] for name in runs]
    groups: dict[str, list[str]] = {}
    for name, changes in runs.items():
        alike = apply_changes(config, {**changes, "seed": 0, "train.learning_rate": 1.0})
        groups.setdefault(alike.to_json(sort_keys=True), []).append(name)
    # Without order between groups: a run that starts from another one differs from it in more keys, and so do all runs
    # that are grouped with it.
    return [names[i : i + most] for names in groups.values() for i in range(0, len(names), most)]


def _train(configs: Mapping[pathlib.Path, ConfigDict], should_stop: Callable[[], bool]) -> dict[pathlib.Path, str]:
    """Trains one run, or several as one program; returns why runs failed, by folder."""
    if len(configs) > 1:
        return train_vmapped(configs, should_stop)
    for folder, config in configs.items():
        try:
            train(config, folder, should_stop)
        except NonfiniteError as error:
            return {folder: str(error)}
    return {}


def train_to_end(config: ConfigDict, folder: pathlib.Path, should_stop: Callable[[], bool]) -> None:
    """Trains the run of a folder to its end, so that it can be scored.

    Raises:
        NonfiniteError: the loss became non-finite.
        Stopped: it was asked to stop; the run can go on.
    """
    train(config, folder, should_stop)
    raise_stopped(should_stop)


def raise_stopped(should_stop: Callable[[], bool]) -> None:
    """Ends a command that was asked to stop.

    Raises:
        Stopped: it was.
    """
    if should_stop():
        raise Stopped("stopped: run the same command again to continue")


def raise_failures(failures: Mapping[str, str]) -> None:
    """Ends a command whose study had failed runs.

    Raises:
        RunError: runs failed, one line each.
    """
    if failures:
        raise RunError("\n".join(f"{name} failed: {failure}" for name, failure in failures.items()))


def is_done(folder: pathlib.Path, split: str, steps: int, lengths: Sequence[int], goal: float | None = None) -> bool:
    """Whether the run in a folder has been evaluated on a split at all these lengths after its last step.

    A run that reached train.stop_accuracy (`goal`) has no later step.
    """
    file = folder / "results.jsonl"
    lines = read_lines(file)
    done = [line for line in lines if line["split"] == split and (line["step"] == steps or _has_reached(line, goal))]
    return set(lengths) <= {line["length"] for line in done if line.get("own_corpus", True)}


def _has_reached(line: Mapping[str, Any], goal: float | None) -> bool:
    return goal is not None and line.get("reached", 0.0) >= goal


def get_value(config: Any, key: str) -> Any:
    """The value of a key such as model.chunks.size.

    Raises:
        KeyError: no such key exists.
    """
    for part in key.split("."):
        config = config[part]
    return config
