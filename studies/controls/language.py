"""Language modelling runs of the controls: each model is tuned at the full budget's schedule."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flash_lm.config.changes import Changes, apply_changes
from flash_lm.runs.jsonl import Line
from flash_lm.sweeps.jobs import Job, ShouldStop, study_hash
from flash_lm.sweeps.rates import best_rate, rates_to_try
from studies.quality import config as study
from studies.quality.run import DECAY, Part, Trunk, run_trunk

# Seconds per step of 4096 tokens in sequences of 512, on one core of an AMD EPYC whose other core is busy.
_STEP_S = {
    "transformer": 0.8,
    "transformer_plus": 0.85,
    "transformer_plus_plus": 0.85,
    "linear_transformer": 0.85,
    "flash": 1.05,
    "flash_quad": 1.1,
}
_FURTHER = 2  # most rates beyond the planned ones
_SCORED_S = 240  # seconds to start, and to score the validation and the test split at both sequence lengths


class Candidate(NamedTuple):
    """A model of a part, with the rates to try.

    Attributes:
        name: the model's name in its lines.
        changes: config keys of the model.
        rates: rates of seed 0, see `candidate_rates`; the best on the validation split gets the other seeds.
        slower: its time per step over that of its family at sequence length 512.
    """

    name: str
    changes: Changes
    rates: Sequence[float]
    slower: float = 1.0


class Text(NamedTuple):
    """The text that the models of a part read: config keys of the data, and a hash of the texts."""

    data: Changes
    texts_hash: str


def jobs(
    part: Part, candidates: Sequence[Candidate], text: Text, lines: Sequence[Line], taken: Mapping[str, float]
) -> list[Job]:
    """Lists the jobs of a part: each candidate at each rate with seed 0, and at its best rate with the other seeds.

    Args:
        part: seeds, steps, shares and scores; its `models` are not read.
        candidates: the models.
        text: the text that they read.
        lines: lines so far, of these and of taken runs.
        taken: rate of each candidate whose runs at that rate, with all seeds, are lines of an older study.
    """
    config = apply_changes(study.get_config(), text.data)
    job_list = []
    for candidate in candidates:
        part_of_candidate = part._replace(models={candidate.name: candidate.changes})
        # Not trunks_of, which checks that the batch fits the devices: jobs are listed on any machine.
        first, *others = [
            Trunk(
                part_of_candidate,
                candidate.name,
                seed,
                apply_changes(config, {**part_of_candidate.runs[candidate.name], "seed": seed}),
            )
            for seed in part.seeds
        ]
        known_rate = taken.get(candidate.name)
        rates = [rate for rate in candidate_rates(lines, part.name, candidate) if rate != known_rate]
        job_list += [_job(first, rate, candidate, text) for rate in rates]
        best = find_best_rate(lines, part.name, candidate)
        if best is None or best != known_rate:
            job_list += [_job(trunk, best, candidate, text) for trunk in others]
    return job_list


def candidate_rates(lines: Sequence[Line], part: str, candidate: Candidate) -> list[float]:
    """Returns the rates of a candidate; while the best is the lowest or highest, up to `_FURTHER` are added."""
    return sorted(rates_to_try(candidate.rates, losses_by_rate(lines, part, candidate), _FURTHER))


def losses_by_rate(lines: Sequence[Line], part: str, candidate: Candidate) -> dict[float, float]:
    """Returns the loss on the validation split at the full budget, seed 0, by rate tried so far; ∞: it failed."""
    losses: dict[float, float] = {}
    for line in lines:
        if (line["part"], line["run"], line["seed"]) == (part, candidate.name, 0):
            if "failed" in line:
                losses[line["rate"]] = math.inf
            elif line["split"] == "validation" and line["share"] == 1:
                losses[line["rate"]] = line["loss"]
    return losses


def find_best_rate(lines: Sequence[Line], part: str, candidate: Candidate) -> float | None:
    """Returns the rate with the lowest of `losses_by_rate`; None: not all of `candidate_rates` are tried."""
    return best_rate(candidate_rates(lines, part, candidate), losses_by_rate(lines, part, candidate))


def lines_at_best_rates(lines: Sequence[Line], part: str, candidates: Sequence[Candidate]) -> list[Line]:
    """Returns the lines that count: those of each candidate at its best rate."""
    best = {candidate.name: find_best_rate(lines, part, candidate) for candidate in candidates}
    return [line for line in lines if line["part"] == part and line["rate"] == best.get(line["run"])]


def _job(trunk: Trunk, rate: float | None, candidate: Candidate, text: Text) -> Job:
    """Returns the job of a run; `rate` is None until it is known."""
    part = trunk.part
    used = candidate.rates[0] if rate is None else rate

    def make(folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
        return run_trunk(trunk, used, folder, should_stop)

    config: Any = apply_changes(trunk.config, {"train.learning_rate": used})
    scored = [[*of] for of in (part.shares, part.lengths, part.slices)]
    hours = (_steps(part) * _STEP_S[config.model.family] * candidate.slower + _SCORED_S) / 3600
    at_rate = "best_rate" if rate is None else f"{rate:g}"
    name = f"{part.name}_{trunk.model}_{at_rate}_seed_{trunk.seed}".replace("/", "_")
    job_hash = study_hash(config, text.texts_hash, scored)
    about = {**trunk.about, "rate": used}
    return Job(name, about, job_hash, make, is_ready=rate is not None, hours=hours, config=config)


def _steps(part: Part) -> int:
    """Returns the steps of a trunk and its decays together."""
    ends = [round(share * part.steps) for share in part.shares]
    decays = [end // DECAY for end in ends]
    if len(ends) == 1:
        return ends[0]
    return max(end - decay for end, decay in zip(ends, decays, strict=True)) + sum(decays)
