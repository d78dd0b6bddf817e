"""Times the training steps of several configs side by side on one device."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from flash_lm.config.changes import Runs, apply_changes
from flash_lm.config.experiment import Config, parse
from flash_lm.runs.jsonl import Line, append_jsonl, read_lines
from flash_lm.runs.provenance import config_hash, provenance
from flash_lm.runs.run_folder import run_hash
from flash_lm.timing.bare_step import BareStep
from flash_lm.timing.turns import Cell, make_turn, take_turns
from flash_lm.training.setup import build_experiment

BLOCKED = "blocked"
_OPEN_TOKENS = 1 << 15  # of a microbatch whose size is open


def time_steps(
    config: ConfigDict, runs: Runs, baseline_of: dict[str, str], rounds: int, file: pathlib.Path
) -> list[Line]:
    """Times one microbatch of each run on one device, in ms; runs with the same baseline take turns.

    The lines are appended to `file`, group by group. A group that the file has with the same configs, device, number of
    rounds and softmax attention is not measured again.
    """
    lines, about = [], provenance(jax.devices()[0].device_kind)
    before = read_lines(file)
    for baseline in dict.fromkeys(baseline_of.values()):
        configs = {name: apply_changes(config, runs[name]) for name in runs if baseline_of[name] == baseline}
        identity = {"device": about["device"], "config_hash": hash_of_group(configs), "rounds": rounds}
        identity["softmax"] = softmax_of_group(configs, jax.default_backend())
        # Lines without the field are older than the other implementations.
        group_lines = [line for line in before if identity.items() <= ({"softmax": BLOCKED} | line).items()]
        if not group_lines:
            group = {name: one_microbatch(config) for name, config in configs.items()}
            group_lines = [line | about | identity for line in time_group(group, baseline, rounds)]
            append_jsonl(file, group_lines)
        lines += group_lines
    return lines


def hash_of_group(group: Mapping[str, Any]) -> str:
    """Returns twelve hex digits: a hash of the configs of runs that take turns, by name."""
    return config_hash({name: run_hash(one_microbatch(config).to_dict()) for name, config in group.items()})


def softmax_of_group(group: Mapping[str, Any], platform: str) -> str:
    """Returns the softmax attention that a group's models ask for: one word, or if they differ, one per model, by name.

    `run_hash` leaves it out. On a CPU auto is blocked.
    """
    of_auto = {"auto": BLOCKED} if platform == "cpu" else {}
    asked: list[str] = [group[name].model.quadratic.implementation for name in sorted(group)]
    words: list[str] = [of_auto.get(word, word) for word in asked]
    return " ".join(words if len(set(words)) > 1 else words[:1])


def _of_experiment(name: str, config: Any) -> Config:
    return build_experiment(parse(config)).config


def time_group(
    group: Mapping[str, Any], baseline: str, rounds: int, complete: Callable[[str, Any], Config] = _of_experiment
) -> list[Line]:
    """Times steps, which take turns.

    Args:
        group: configs by name.
        baseline: the name whose speed the others are compared with.
        rounds: see `take_turns`.
        complete: fills in the keys that the corpus and the family define; gets a name and its config.

    Returns:
        A line per name; `rounds_ms` has the mean of its turns in each round.
    """
    # Compile and warm up all steps, then time them in turn.
    cells, flops = [], {}
    for name, config in group.items():
        step = BareStep(complete(name, config))
        flops[name] = step.model_flops
        step.start()
        cells.append(Cell.warm_up(name, make_turn(step.step)))
        print(f"step of {name}: compiled in {step.compile_s:.1f} s", flush=True)
    take_turns(cells, rounds, lambda text: print(text, flush=True))
    medians = {cell.name: cell.median_ms for cell in cells}
    return [
        {
            "run": cell.name,
            "microbatch_ms": cell.median_ms,
            "iqr_ms": cell.iqr_ms,
            "rounds_ms": cell.rounds_ms,
            "speedup": medians[baseline] / cell.median_ms,
            "model_flops": flops[cell.name],
        }
        for cell in cells
    ]


def one_microbatch(config: Any) -> ConfigDict:
    """Returns the config whose step is one microbatch of this config's step."""
    tokens = parse(config).data.tokens_per_batch // timed_microbatches(config)
    return apply_changes(config, {"train.accumulate": 1, "data.tokens_per_batch": tokens})


def timed_microbatches(config: Any) -> int:
    """The microbatches of a step; if their number is open, so many that one has 32,768 tokens, for all runs alike."""
    return config.train.accumulate or max(parse(config).data.tokens_per_batch // _OPEN_TOKENS, 1)
