"""Times the training steps of the models of a study."""

import pathlib
from collections.abc import Sequence

from ml_collections import ConfigDict

from flash_lm.runs.jsonl import Line
from flash_lm.timing.step_times import time_steps
from studies.protocol.hypotheses import step_name
from studies.quality.run import Part


def time_parts(
    config: ConfigDict, parts: Sequence[Part], lines: Sequence[Line], rounds: int, file: pathlib.Path
) -> list[Line]:
    """Times the steps of the models of a study that have lines; the models of a part take turns.

    Rounds are short, so a slow phase of the machine affects all models of a part alike.

    Args:
        config: base config of all models.
        parts: parts of the study.
        lines: lines of its runs.
        rounds: number of rounds in which the models take turns.
        file: see `time_steps`.
    """
    scored = {(line["part"], line["run"]) for line in lines}
    runs, baseline_of, first = {}, {}, {}
    for part in parts:
        part_runs = {step_name(part.name, x): changes for x, changes in part.runs.items() if (part.name, x) in scored}
        runs |= part_runs
        baseline_of |= {name: first.setdefault(part.name, name) for name in part_runs}
    return time_steps(config, runs, baseline_of, rounds, file)
