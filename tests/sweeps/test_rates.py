"""The rates of a model: those that are planned, and further ones while the best is at the edge."""

import math
from typing import NamedTuple

import pytest
from ml_collections import ConfigDict

from flash_lm.sweeps.jobs import JobFolder, make_jobs, read_job_lines
from flash_lm.sweeps.rates import best_rate, rate_and_seed_jobs, rates_to_try


class Model(NamedTuple):
    """A model without weights: its loss grows with the distance from its best rate."""

    name: str
    best: float

    def about(self, rate, seed):
        return {"model": self.name, "rate": rate, "seed": seed}

    def run_config(self, rate, seed):
        return ConfigDict(self.about(rate, seed))


def run_model(model, rate, seed, folder, should_stop):
    return [model.about(rate, seed) | {"loss": abs(rate - model.best)}]


@pytest.mark.parametrize(
    ("best", "further", "rates"),
    [
        (0.01, 2, [0.003, 0.01, 0.03]),
        (0.03, 0, [0.003, 0.01, 0.03]),
        (0.03, 2, [0.003, 0.01, 0.03, 0.09]),  # the further rate is worse, so the search ends
        (0.0001, 2, [0.003, 0.01, 0.03, 0.001, 0.00033]),
        (0.0001, 1, [0.003, 0.01, 0.03, 0.001]),
    ],
)
def test_further_rates_are_tried_while_the_best_is_at_the_edge(tmp_path, best, further, rates):
    out, models = tmp_path / "out", [Model("a", best), Model("b", 0.01)]
    selection_loss = lambda line: line["loss"]
    jobs = lambda: rate_and_seed_jobs(
        models, (0.003, 0.01, 0.03), (1, 2), further, read_job_lines(out), selection_loss, run_model, 3.0
    )
    assert make_jobs(jobs, JobFolder(out, tmp_path / "runs", bool)) == []
    lines = [line for line in read_job_lines(out) if line["model"] == "a"]
    assert sorted(line["rate"] for line in lines if line["seed"] == 0) == sorted(rates)
    nearest = min(rates, key=lambda rate: abs(rate - best))
    assert [(x["seed"], x["rate"]) for x in lines if x["seed"]] == [(1, nearest), (2, nearest)]


def test_rates_go_on_by_the_factor_that_is_given_or_that_between_the_lowest_two():
    losses = {0.1: 2.0, 0.3: 1.0}
    assert rates_to_try([0.1, 0.3], losses, 1) == [0.1, 0.3, 0.9]
    assert rates_to_try([0.1, 0.3], losses, 1, factor=2.0) == [0.1, 0.3, 0.6]
    assert rates_to_try([0.1, 0.3], losses | {0.1: 0.5}, 1) == [0.1, 0.3, 0.033]
    assert rates_to_try([0.1, 0.3], {0.1: 2.0}, 1) == [0.1, 0.3]  # not all are tried yet
    assert rates_to_try([0.1], {0.1: 2.0}, 1) == [0.1]


def test_the_best_is_the_first_of_equals_and_failed_runs_are_the_worst():
    assert best_rate([0.1, 0.3, 1.0], {0.1: math.inf, 0.3: 1.0, 1.0: 1.0}) == 0.3
    assert best_rate([0.1, 0.3], {0.1: math.inf, 0.3: math.inf}) == 0.1
    assert best_rate([0.1, 0.3], {0.1: 1.0}) is None
