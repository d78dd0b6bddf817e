"""Plans the runs of a scaling study: sizes and tokens for budgets of FLOPs, by each family's FLOPs."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from flash_lm.models.facts import FORWARD_AND_BACKWARD, facts

_WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_HEAD = 32  # width of a head, and of a layer's share of the width: a model of 128 has 4 heads and 4 layers
_FROM, _TO = 4.0, 100.0  # tokens per parameter


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A planned run; `changes` are config keys, by name, that differ from the config."""

    name: str
    family: str
    parameters: int
    tokens: int
    flops: float
    changes: dict[str, Any]


def plan(config: Any, families: Sequence[str], budgets: Iterable[float]) -> list[PlannedRun]:
    """Plans runs for every budget: all sizes with 4 to 100 tokens per parameter.

    Args:
        config: base config of all runs, with a vocabulary; FLOPs per token are those at its sequence length.
        families: names of families.
        budgets: model FLOPs of a run, without recomputation.
    """
    length = config.data.length or config.model.max_length
    runs = []
    for family in families:
        # A size per width; layers and heads grow with it.
        for width in _WIDTHS:
            shape = {
                "model.family": family,
                "model.model_dim": width,
                "model.num_layers": max(2, width // _HEAD // 2 * 2),
                "model.num_heads": max(1, width // _HEAD),
            }
            sized = config.copy_and_resolve_references()
            sized.update_from_flattened_dict(shape)
            about = facts(family, sized.model, (), (length,))
            for budget in budgets:
                # The tokens that the budget allows; sizes far from the optimum are left out.
                tokens = round(budget / (FORWARD_AND_BACKWARD * about.flops[length]))
                if not _FROM <= tokens / about.parameters <= _TO:
                    continue
                changes = shape | {"train.steps": None, "train.tokens": tokens}
                name = f"{family}_{width}_{budget:g}".replace("+", "")
                runs.append(PlannedRun(name, family, about.parameters, tokens, budget, changes))
    return runs


def sweep_file(config: str, overrides: Sequence[str], runs: Sequence[PlannedRun]) -> str:
    """Returns the text of a config file whose sweep makes the runs.

    Args:
        config: name of the base config, such as quickstart.
        overrides: words such as --config.model.vocab_size=8192 that change it.
        runs: from `plan`.
    """
    lines = "".join(f"    {run.name!r}: {run.changes!r},\n" for run in runs)
    return f'''"""A scaling study: {len(runs)} runs, planned by flash-lm scaling."""

from flash_lm.cli.load import load_config

RUNS = {{
{lines}}}


def get_config():
    return load_config({config!r}, {list(overrides)!r})


def get_runs(config):
    return RUNS
'''
