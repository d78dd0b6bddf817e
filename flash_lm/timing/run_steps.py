"""Steps of trained runs: their FLOPs, and their times side by side on one device."""

from collections.abc import Mapping
from typing import Any

from flash_lm.config.experiment import Config, parse
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.models.facts import training_flops
from flash_lm.runs.jsonl import Line
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import RunName
from flash_lm.timing.machine import machine
from flash_lm.timing.step_times import one_microbatch, time_group, timed_microbatches
from flash_lm.training.load_weights import model_without_weights
from flash_lm.training.train_state import ModelFunction


def step_flops(name: RunName) -> float:
    """FLOPs of one training step of a run, forward and backward; nothing is compiled."""
    config, model = _complete(name, RunFolder(name.workdir).config)
    return training_flops(model.abstract, config.data.batch_size * config.data.length, config.data.length)


def time_run_steps(names: Mapping[str, RunName], rounds: int) -> list[Line]:
    """Times a step of each run, and the runs take turns.

    Args:
        names: the runs by label; the first is what the speed of the others is compared with.
        rounds: see `take_turns`.

    Returns:
        A line per run as of `time_group`, with `step_ms`: one microbatch times their number; and with the machine.
    """
    about = machine()
    raw = {label: RunFolder(name.workdir).config for label, name in names.items()}
    group = {label: one_microbatch(config) for label, config in raw.items()}
    complete = lambda label, config: _complete(names[label], config)[0]
    lines = time_group(group, next(iter(names)), rounds, complete)
    return [line | {"step_ms": line["microbatch_ms"] * timed_microbatches(raw[line["run"]])} | about for line in lines]


def _complete(name: RunName, config: Any) -> tuple[Config, ModelFunction]:
    """The complete config of a run's folder, perhaps with changes, and its model without parameters."""
    return model_without_weights(name, parse(config), load_tokenizer(name.workdir / "tokenizer"))
