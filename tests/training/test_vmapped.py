"""Runs that are trained as one program equal their single runs, and each of them stops, fails and resumes as such."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.config.registry import FAMILIES
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.run_name import run_name
from flash_lm.sweeps.grid import programs, run_study
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.compiled_step import CompiledStep
from flash_lm.training.metrics import TIMES
from flash_lm.training.resume import new_state
from flash_lm.training.setup import Experiment, build_experiment, build_setup
from flash_lm.training.sharding import make_mesh
from flash_lm.training.train_loop import train
from flash_lm.training.vmapped_loop import train_vmapped
from flash_lm.training.vmapped_step import VmappedStep
from training.runs import stop_after

pytestmark = pytest.mark.usefixtures("usual_promotion")

# Two seeds, and two rates.
MEMBERS = {
    "a": {"seed": 0, "train.learning_rate": 0.01},
    "b": {"seed": 1, "train.learning_rate": 0.01},
    "c": {"seed": 0, "train.learning_rate": 0.02},
}
STEPS = 50


@pytest.fixture
def float64(monkeypatch):
    """Programs compute in float64, also where they say float32.

    Adam turns a gradient that is zero but for its rounding into an update of the size of the learning rate, so
    parameters that compute in float32 may differ although both programs are right.
    """
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        yield


def make_setups(family: str):
    config = small_config("text", ".cache", family)
    config.model.vocab_size = 61
    config.train.steps = STEPS
    if "causal" not in FAMILIES[family].serves:
        config.task = "masked_lm"
    for changes in MEMBERS.values():
        parsed = parse(apply_changes(config, changes))
        model = dataclasses.replace(complete(parsed.model), dtype="float64", param_dtype="float64")
        yield build_setup(dataclasses.replace(parsed, model=model), make_mesh(parsed.mesh, jax.devices()[:1]))


def draw_batches(seed: int, packed: bool):
    """Four batches of eight sequences; with packing, sequences of two documents and padding."""
    draw = np.random.default_rng(seed)
    lengths = (20, 9) if packed else (29,)
    ids = np.concatenate([np.full(n, i) for i, n in enumerate(lengths, start=1)] + [np.zeros(3)]).astype(np.int32)
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(3)]).astype(np.int32)
    same = lambda row: np.tile(row, (8, 1))
    for _ in range(4):
        yield {
            "inputs_BxL": draw.integers(61, size=(8, 32), dtype=np.int32),
            "targets_BxL": draw.integers(61, size=(8, 32), dtype=np.int32),
            "segment_ids_BxL": same(ids),
            "positions_BxL": same(positions),
            "loss_mask_BxL": same(ids > 0).astype(np.float32),
        }


@pytest.mark.slow("trains runs in float64")
@pytest.mark.representatives("transformer")
@pytest.mark.parametrize("family", FAMILIES)
def test_members_equal_single_runs_in_every_family(family, float64):
    """Losses of 50 steps and the parameters after them; the Performer's features differ between seeds."""
    setups = list(make_setups(family))
    batches = [list(draw_batches(seed, setups[0].config.data.packed)) for seed in range(len(setups))]
    with jax.set_mesh(setups[0].mesh):
        program = VmappedStep(setups)
        states, together = program.stack([new_state(setup) for setup in setups]), []
        for step in range(STEPS):
            states, metrics = program(states, [batch[step % 4] for batch in batches])
            together.append(metrics)
        for number, setup in enumerate(setups):
            state, single = new_state(setup), CompiledStep(setup)
            assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype(np.float64)}
            for step in range(STEPS):
                state, metrics = single(state, jax.device_put(batches[number][step % 4]))
                assert metrics.keys() == together[step].keys()
                for name, value in metrics.items():
                    np.testing.assert_allclose(together[step][name][number], value, rtol=1e-6, err_msg=name)
            compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
            jax.tree.map(compare, program.select(states, number).params, state.params)


def make_config(folder):
    config = small_config(write_corpus(folder / "text"), folder / "cache")
    config.train.on_nonfinite = "skip"
    return config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("corpus"))


def train_members(config, folder, should_stop=lambda: False, members=tuple(MEMBERS)):
    return train_vmapped({folder / name: apply_changes(config, MEMBERS[name]) for name in members}, should_stop)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """A folder with the members, trained together without interruption."""
    folder = tmp_path_factory.mktemp("together")
    assert train_members(config, folder) == {}
    return folder


def figures(workdir):
    """The metric lines without the times."""
    lines = read_jsonl(workdir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def saved(config, workdir):
    """The newest state, and its facts."""
    return restore(run_name(workdir), build_experiment(parse(config)).abstract)


def assert_same_state(config, a, b):
    (first, _), (second, _) = saved(config, a), saved(config, b)
    assert all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))


def assert_close_lines(actual, expected):
    """All lines and fields of a single run, and the number of runs besides."""
    assert len(actual) == len(expected) > 12
    for line, single in zip(actual, expected, strict=True):
        line = dict(line)
        assert line.pop("vmapped_runs") == len(MEMBERS)
        assert line.keys() == single.keys() and line["split"] == single["split"]
        for key in single.keys() - {"split"}:
            assert np.isclose(line[key], single[key], rtol=1e-5), key


def test_folders_are_those_of_single_runs(config, trained, tmp_path):
    """The lines, the files, and the checkpoints, which other commands load."""
    changed = apply_changes(config, MEMBERS["b"])
    train(changed, tmp_path / "b")
    assert_close_lines(figures(trained / "b"), figures(tmp_path / "b"))
    files = lambda folder: {str(path.relative_to(folder)) for path in folder.rglob("*.json*")}
    assert files(trained / "b") == files(tmp_path / "b")
    assert (trained / "b" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()
    together, alone = (evaluate(folder / "b", "validation")[0] for folder in (trained, tmp_path))
    assert together["step"] == 12 and abs(together["loss"] / alone["loss"] - 1) < 1e-6
    assert together["vmapped_runs"] == 3 and "vmapped_runs" not in alone


@pytest.mark.slow("trains two programs")
def test_an_interrupted_program_continues_as_if_uninterrupted(config, trained, tmp_path):
    train_members(config, tmp_path, stop_after(5))
    assert {name: int(saved(config, tmp_path / name)[0].step) for name in MEMBERS} == dict.fromkeys(MEMBERS, 5)
    train_members(config, tmp_path)
    for name in MEMBERS:
        assert figures(tmp_path / name) == figures(trained / name)
        assert_same_state(config, tmp_path / name, trained / name)


@pytest.mark.slow("trains two programs and two single runs")
def test_a_member_continues_alone_and_the_others_without_it(config, trained, tmp_path):
    train_members(config, tmp_path, stop_after(5))
    alone = apply_changes(config, MEMBERS["b"])
    train(alone, tmp_path / "b", stop_after(2))
    assert int(saved(config, tmp_path / "b")[0].step) == 7
    train_members(config, tmp_path)
    for name in MEMBERS:
        lines = [line["loss"] for line in figures(tmp_path / name)]
        np.testing.assert_allclose(lines, [line["loss"] for line in figures(trained / name)], rtol=1e-6)
        assert saved(config, tmp_path / name)[1]["vmapped_runs"] == 3
    runs = [line.get("vmapped_runs") for line in figures(tmp_path / "b") if line["split"] == "train"]
    assert runs == [3] * 5 + [None] * 7


@pytest.fixture
def poison(monkeypatch):
    """Makes steps of the run with seed 1 non-finite, by a token without an embedding."""
    training_batches, steps = Experiment.training_batches, []

    def batches(experiment, share, start_step, position):
        for step, batch in enumerate(training_batches(experiment, share, start_step, position), start=start_step + 1):
            if experiment.config.seed == 1 and step in steps:
                batch = batch | {"inputs_BxL": np.full_like(batch["inputs_BxL"], 10**6)}
            yield batch

    monkeypatch.setattr(Experiment, "training_batches", batches)
    return steps


@pytest.mark.slow("trains another program")
def test_a_skipped_step_of_a_member_is_its_own(config, trained, tmp_path, poison):
    poison.append(6)
    assert train_members(config, tmp_path) == {}
    lines = {name: figures(tmp_path / name) for name in MEMBERS}
    assert [line["skipped_steps"] for line in lines["b"] if line["split"] == "train"] == [0] * 5 + [1] * 6
    for name in "ac":
        assert lines[name] == figures(trained / name)
        assert_same_state(config, tmp_path / name, trained / name)


@pytest.mark.slow("trains three runs")
def test_a_member_that_fails_does_not_end_the_others(config, trained, tmp_path, poison):
    poison.extend(range(6, 13))
    failures = train_members(config, tmp_path)
    assert failures.keys() == {tmp_path / "b"} and "step 7 " in failures[tmp_path / "b"]
    assert [line["step"] for line in figures(tmp_path / "b")][-1] == 5
    assert int(saved(config, tmp_path / "b")[0].step) == 6, "of its last checkpoint"
    for name in "ac":
        assert_same_state(config, tmp_path / name, trained / name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.corpus": "hf", "data.streaming": True}, "--vmap needs a corpus that is not streamed.*streaming=false"),
        ({"model.kernels": "pallas"}, "--vmap trains without kernels, but got model.kernels=pallas.*kernels=auto"),
        ({"model.quadratic.implementation": "cudnn"}, "without kernels, but got model.quadratic.implementation=cudnn"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_before_anything_is_written(config, tmp_path, changes, message):
    """Even if it would come after other runs."""
    runs = {"first": {"model.model_dim": 8}} | {name: changes | member for name, member in MEMBERS.items()}
    with pytest.raises(InputError, match=message) as caught:
        run_study(config, runs, tmp_path / "sweep", "validation", lambda: False, vmap=4)
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "sweep").exists()


def test_runs_that_differ_only_in_seed_and_rate_are_one_program(config):
    wide = {"model.model_dim": 32}
    runs = {f"wide_{name}": changes | wide for name, changes in MEMBERS.items()} | MEMBERS
    runs = {name: runs[name] for name in sorted(runs, key=lambda name: name[-1])}
    assert list(runs) == ["wide_a", "a", "wide_b", "b", "wide_c", "c"]
    assert programs(config, runs, 8) == [["wide_a", "wide_b", "wide_c"], ["a", "b", "c"]]
    assert programs(config, runs, 2) == [["wide_a", "wide_b"], ["wide_c"], ["a", "b"], ["c"]]
    assert programs(config, runs, 1) == [[name] for name in runs]


_OPTIONS = {
    "averaged": {"train.ema": 0.9, "train.log_groups": True, "train.z_loss": 1e-3},
    "accumulated": {"train.accumulate": 2, "data.tokens_per_batch": 512},
    "carried": {"model.family": "retnet", "train.carry_state": True},
    "masked": {"task": "masked_lm"},
    "unrolled": {"model.num_layers": 2, "model.scan_layers": False, "model.remat": "full"},
    "schedule_free": {"train.optimizer": "schedule_free_adamw", "train.freeze": ("embedding",)},
    "adafactor": {"train.optimizer": "adafactor", "train.clip_mode": "parameter"},
    "muon": {"train.optimizer": "muon"},
}


@pytest.mark.slow("trains four runs")
@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_options_of_training_hold_for_each_member(config, tmp_path, options):
    config = apply_changes(config, options)
    train_members(config, tmp_path / "together")
    for name, changes in MEMBERS.items():
        train(apply_changes(config, changes), tmp_path / name)
        lines, single = (
            {(line["step"], line["split"]): line for line in figures(folder)}
            for folder in (tmp_path / "together" / name, tmp_path / name)
        )
        assert lines.keys() == single.keys()
        for key, line in single.items():
            losses = [field for field in line if "loss" in field]
            np.testing.assert_allclose([lines[key][x] for x in losses], [line[x] for x in losses], rtol=1e-6)


@pytest.mark.slow("trains three runs")
def test_a_member_that_reaches_its_accuracy_is_done(config, trained, tmp_path):
    """The others go on, and none of them is trained again."""
    goal = apply_changes(config, {"train.stop_accuracy": 0.15})
    train_members(goal, tmp_path)
    accuracies = {
        name: [x["accuracy"] for x in figures(trained / name) if x["split"] == "validation"] for name in MEMBERS
    }
    steps = {name: 4 * next((i for i, x in enumerate(of, start=1) if x >= 0.15), 3) for name, of in accuracies.items()}
    assert len(set(steps.values())) > 1
    assert {name: figures(tmp_path / name)[-1]["step"] for name in MEMBERS} == steps
    before = {name: figures(tmp_path / name) for name in MEMBERS}
    train_members(goal, tmp_path)
    assert {name: figures(tmp_path / name) for name in MEMBERS} == before


@pytest.mark.slow("trains four runs")
def test_branches_of_a_run_are_trained_together(config, trained, tmp_path):
    config = apply_changes(config, {"train.branch_from": str(trained / "a"), "train.steps": 16})
    rates = {"x": {"train.learning_rate": 1e-3}, "y": {"train.learning_rate": 3e-3}}
    configs = {name: apply_changes(config, changes) for name, changes in rates.items()}
    train_vmapped({tmp_path / name: changed for name, changed in configs.items()}, lambda: False)
    for name, changed in configs.items():
        train(changed, tmp_path / "alone" / name)
        lines, single = (figures(folder / name) for folder in (tmp_path, tmp_path / "alone"))
        assert [line["step"] for line in lines] == [line["step"] for line in single] == [13, 14, 15, 16, 16]
        np.testing.assert_allclose([x["loss"] for x in lines], [x["loss"] for x in single], rtol=1e-6)
