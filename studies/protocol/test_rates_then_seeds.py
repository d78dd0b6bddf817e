"""The rates of a small study: those of its grid, and further ones while a model's best is at the edge."""

from typing import NamedTuple

import pytest
from ml_collections import ConfigDict

from studies.protocol.rates_then_seeds import next_rate, rates_then_seeds


class Model(NamedTuple):
    """A model without weights: its score falls with the distance from its best rate."""

    name: str
    best: float

    def at(self, rate, seed):
        return {"model": self.name, "rate": rate, "seed": seed}

    def of_run(self, rate, seed):
        return ConfigDict(self.at(rate, seed))


def one_run(model, rate, seed, folder):
    score = -abs(rate - model.best)
    return model.at(rate, seed) | {"score": score, "config_hash": "of this run"}


@pytest.mark.parametrize(
    ("best", "beyond", "rates"),
    [
        (0.01, 2, [0.003, 0.01, 0.03]),
        (0.03, 0, [0.003, 0.01, 0.03]),
        (0.03, 2, [0.003, 0.01, 0.03, 0.09]),  # the further rate is worse, so the search ends
        (0.0001, 2, [0.003, 0.01, 0.03, 0.001, 0.00033]),
        (0.0001, 1, [0.003, 0.01, 0.03, 0.001]),
    ],
)
def test_further_rates_are_tried_while_the_best_is_at_the_edge(tmp_path, best, beyond, rates):
    highest = lambda lines: max(lines, key=lambda line: line["score"])
    file = tmp_path / "runs.jsonl"
    lines = rates_then_seeds([Model("a", best)], (0.003, 0.01, 0.03), (1,), file, tmp_path, one_run, highest, beyond)
    assert [line["rate"] for line in lines if line["seed"] == 0] == rates
    assert [line["rate"] for line in lines if line["seed"] == 1] == [highest(lines)["rate"]]


def test_rates_go_on_by_a_factor_of_three():
    assert [next_rate([0.3, 0.1], best) for best in (0.1, 0.3)] == [0.033, 0.9]
    assert next_rate([0.1, 0.3, 1.0], 0.3) is None
    assert next_rate([0.1], 0.1) == 0.3
