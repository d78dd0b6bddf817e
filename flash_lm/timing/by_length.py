"""Times the training step of several families at several sequence lengths, with the same number of tokens per step."""

from collections.abc import Sequence
from typing import Any

from flash_lm.runs.jsonl import Line
from flash_lm.timing.bare_step import BareStep, step_config
from flash_lm.timing.machine import machine
from flash_lm.timing.turns import Cell, make_turn, take_turns


def time_by_length(config: Any, families: Sequence[str], lengths: Sequence[int], tokens_per_step: int) -> list[Line]:
    """Times steps; at each length the families take turns, twice.

    Args:
        config: what all have in common, with a vocabulary size.
        families: values of model.family.
        lengths: sequence lengths, each a divisor of the tokens.
        tokens_per_step: tokens of a step.

    Returns:
        A line per family and length, with the median in `step_ms`, and the machine.
    """
    about, lines = machine(), []
    keys: dict[str, Any] = {"tokens_per_step": tokens_per_step, "dtype": config.model.dtype, "task": config.task}
    for length in lengths:
        cells = []
        for family in families:
            step = BareStep(step_config(config, family, length, **keys))
            step.start()
            cells.append(Cell.warm_up(family, make_turn(step.step)))
        take_turns(cells, rounds=1, settling=0)
        for cell in cells:
            line = {"family": cell.name, "length": length, "step_ms": cell.median_ms, "turns": len(cell.times_ms)}
            lines.append(line | {"tokens_per_step": tokens_per_step} | about)
            print(f"length {length:,}: {cell.name} takes {cell.median_ms:,.0f} ms per step", flush=True)
    return lines
