"""A run whose number of steps is raised when it is resumed."""

import json

import jax
import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import run_name
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.resolve import continue_run, normalize
from flash_lm.training.setup import build_experiment
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    config = small_config(write_corpus(folder / "text"), folder / "cache")
    config.train.update(schedule="constant", steps=4, warmup_steps=2, eval_every=0, checkpoint_every=0, eval_steps=1)
    return config


def changed(config, **keys):
    config = config.copy_and_resolve_references()
    config.train.update(keys)
    return config


def test_a_run_of_4_steps_extended_to_8_is_that_of_8(config, tmp_path):
    train(config, tmp_path / "extended")
    before = (tmp_path / "extended" / "config.json").read_bytes()
    longer = changed(config, steps=8)
    train(longer, tmp_path / "extended")
    train(longer, tmp_path / "whole")
    abstract = build_experiment(parse(longer)).abstract
    states = [jax.tree.leaves(restore(run_name(tmp_path / x), abstract)[0]) for x in ("extended", "whole")]
    assert all(np.array_equal(a, b) for a, b in zip(*states, strict=True))
    assert (tmp_path / "extended" / "config.json").read_bytes() == before
    assert json.loads((tmp_path / "extended" / "changes.jsonl").read_text())["train.steps"] == 8
    with pytest.raises(InputError, match=r"train.steps=8 there, 4 here\); it has done 8 steps: choose another"):
        train(config, tmp_path / "extended")


def saved(config, folder) -> RunFolder:
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json())
    return RunFolder(folder)


@pytest.mark.parametrize(
    ("keys", "done", "allowed"),
    [
        ({"schedule": "constant"}, 100, True),
        ({"schedule": "step", "boundaries": (50,)}, 100, True),
        ({"schedule": "cosine", "decay_steps": 20}, 80, True),
        ({"schedule": "cosine", "decay_steps": 20}, 90, False),
        ({"schedule": "linear"}, 10, True),  # all of them warm-up
        ({"schedule": "linear"}, 12, False),
        ({"schedule": "cosine"}, 100, False),
        ({"schedule": "sqrt"}, 0, True),
    ],
    ids=str,
)
def test_steps_may_be_raised_where_the_rates_of_steps_done_stay(config, tmp_path, keys, done, allowed):
    config = changed(config, steps=100, **keys)
    config.train.warmup_steps = None  # a tenth of 100
    run, longer = saved(config, tmp_path / "run"), normalize(changed(config, steps=300))
    if not allowed:
        with pytest.raises(InputError, match=f"of the {done} steps done would have been another, since train.schedule"):
            continue_run(longer, run, done)
        return
    record, changes = continue_run(longer, run, done)
    assert parse(record).train.warmup_steps == 10
    assert changes == {"train.steps": (100, 300), "train.warmup_steps": (10, 10)}
    run.record_changes({key: now for key, (_, now) in changes.items()})
    assert continue_run(longer, RunFolder(run.path), done)[1] == {}


def test_the_rate_may_not_change_with_the_steps(config, tmp_path):
    run = saved(config, tmp_path / "run")
    with pytest.raises(InputError, match=r"train.learning_rate=.*branch_from="):
        continue_run(normalize(changed(config, steps=8, learning_rate=0.5)), run, 4)
