"""The models of the curve, what its lines say, and which fleets make the jobs left."""

import itertools
import math

import numpy as np
import pytest
from small import ROOT

from flash_lm.cli.load import load_config
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.models.facts import facts
from flash_lm.runs.provenance import config_hash
from flash_lm.training.vmapped_loop import check_vmapped
from studies.controls import design
from studies.gpu import curve, fleet
from studies.quality.run import list_trunks, schedules


def test_the_models_of_the_curve_have_25_million_parameters():
    """Equal to within 3 %, as in the study; and they read the same batches."""
    trunks = curve.make_trunks(list(curve.MODELS), None, curve.FULL)
    configs = [apply_changes(trunk.config, {"model.vocab_size": trunk.config.data.vocab_size}) for trunk in trunks]
    sizes = [facts(config.model.family, config.model, (), (2048,)).parameters for config in configs]
    assert max(sizes) / min(sizes) < 1.03 and 24e6 < min(sizes) < 26e6
    assert len({config_hash(config.data.to_dict()) for config in configs}) == 1
    assert all(config.model.max_length == config.data.length == 2048 for config in configs)
    local = configs[-1].model.to_dict() | {"chunks": configs[1].model.chunks.to_dict()}
    assert local == configs[1].model.to_dict() and not configs[-1].model.chunks.global_attention


@pytest.mark.parametrize("size", [curve.FULL, curve.REHEARSAL])
def test_the_budgets_of_the_curve_branch_off_one_trunk(tmp_path, size):
    """Decays of a fifth, at steps at which the trunk saves."""
    (trunk, *_) = curve.make_trunks([curve.BASE], None, size)
    runs = schedules(trunk, 0.001, tmp_path)
    assert [runs[name]["train.steps"] for name in runs if name != "stable"] == [size.steps // 2, size.steps]
    for changes in runs.values():
        parse(apply_changes(trunk.config, changes))


def line(model: str, steps: int, loss: float, step_ms: float) -> dict:
    about = {"part": curve.PART, "run": model, "seed": 0, "split": "test", "length": 8, "trained_length": 8}
    return about | {"step": steps, "loss": loss, "step_ms": step_ms}


def test_models_are_compared_after_equal_steps_and_after_equal_time():
    """FLASH's step takes 1.5 times as long: at the time of 300 steps of the other it has made 200."""
    lines = [line(curve.BASE, 150, 4.0, 10), line(curve.BASE, 300, 3.5, 10)]
    flash = [line(curve.COMPARED, 150, 3.9, 15), line(curve.COMPARED, 200, 3.6, 15), line(curve.COMPARED, 300, 3.3, 15)]
    said = curve.comparison([*lines, *flash])
    assert f"after 150 steps {math.exp(-0.1):.3f}" in said and f"after 300 steps {math.exp(-0.2):.3f}" in said
    assert f"at equal time {math.exp(0.1):.3f} (a step takes 1.50×)" in said
    assert curve.comparison(lines) == "nothing is compared: a model has no budget yet"
    too_short = [line(curve.BASE, 50, 4.0, 10), line(curve.BASE, 100, 3.5, 10)]
    assert "not at equal time" in curve.comparison([*too_short, *flash])


@pytest.fixture(scope="module")
def fleets() -> list[fleet.Fleet]:
    return fleet.left_fleets()


def test_each_job_left_is_a_member_of_one_fleet(fleets):
    """By its config, rate and seed; a rate that is not known yet is that of a member."""
    controls, quality = design.folders(ROOT)
    jobs = design.jobs_now(design.Data(fleet.TEXTS), design.read_counted_lines(controls, quality))
    left = [job for job in jobs if not (controls / "runs" / f"{job.name}.jsonl").exists()]
    assert sum(one.jobs for one in fleets) == len(left) > 0
    schedule = {"train.schedule": "linear", "train.decay_steps": 1}  # tested below
    key = lambda config: config_hash(apply_changes(config, schedule).to_dict())
    members = {
        key(apply_changes(one.config, {"train.learning_rate": rate, "seed": seed}))
        for one in fleets
        for rate, seed in itertools.product(one.rates, one.seeds)
    }
    assert {key(job.config) for job in left} <= members


def test_each_fleet_can_be_trained_as_one_program(fleets):
    for one in fleets:
        check_vmapped(parse(one.config))


def test_a_fleet_has_the_schedule_of_the_last_decay(fleets, tmp_path):
    (softmax,) = [one for one in fleets if one.name == "rows_of_512_transformer_plus_plus"]
    changes = {"model.family": "transformer_plus_plus"}
    (trunk,) = list_trunks(
        softmax.config, [design.ROWS._replace(models={"transformer_plus_plus": changes}, seeds=(0,))]
    )
    last = dict(schedules(trunk, 0.1, tmp_path)["1"])
    last.pop("train.branch_from")
    assert apply_changes(softmax.config, last | {"train.learning_rate": 0.001}).train == softmax.config.train


def test_the_command_of_a_fleet(fleets, tmp_path):
    (mqar,) = [one for one in fleets if one.name == "mqar_flash"]
    module, config, *words = mqar.command(tmp_path)
    assert module == "flash_lm.sweep" and "--vmap" in words
    assert "--grid=train.learning_rate=0.0003,0.001,0.003" in words and "--grid=seed=0,1,2" in words
    loaded = load_config(config.removeprefix("--config="), [])
    assert config_hash(loaded.to_dict()) == config_hash(mqar.config.to_dict())
    assert not mqar.missing_texts()  # its sequences are drawn
    assert np.prod([len(mqar.rates), len(mqar.seeds)]) == mqar.jobs


def test_texts_are_made_of_what_a_folder_has(tmp_path, capsys):
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    (tmp_path / "data" / "shakespeare" / "input.txt").write_text("To be, or not to be. " * 10)
    fleet.prepare_texts(tmp_path / "data", tmp_path / "texts")
    assert "no texts of study" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["shakespeare"]
    assert sorted(path.name for path in (tmp_path / "texts" / "shakespeare").iterdir()) == [
        "test.txt",
        "train.txt",
        "valid.txt",
    ]
