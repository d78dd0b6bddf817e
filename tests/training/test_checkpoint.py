"""Damaged checkpoints are detected, the newest intact one is used, and no run starts over silently."""

import dataclasses
import itertools
import json
import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.errors import InputError, PassingError, RunError
from flash_lm.inference.scoring import evaluate
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.run_name import run_name
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.fingerprint import fingerprint
from flash_lm.training.resume import new_state
from flash_lm.training.setup import Experiment, build_experiment
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return small_config(write_corpus(folder / "text"), folder / "cache")


@pytest.fixture(scope="module")
def experiment(config) -> Experiment:
    return build_experiment(parse(config))


@pytest.fixture(scope="module")
def states(experiment) -> dict:
    """A state per step, with other bits in every array."""
    first = new_state(experiment)
    later = jax.tree.map(lambda x: jax.device_put(np.asarray(x) + np.ones((), x.dtype), x.sharding), first)
    return {5: first, 7: later}


@pytest.fixture(scope="module")
def intact(states, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("intact")
    checkpoints = Checkpoints(workdir, keep=2)
    for step, state in states.items():
        checkpoints.save(step, state, {"corpus": "x", "train_seconds": 1.5 * step}, {"loss": 1.0})
    checkpoints.close()
    return workdir


@pytest.fixture
def workdir(intact, tmp_path) -> pathlib.Path:
    return shutil.copytree(intact, tmp_path / "run")


def newest(workdir: pathlib.Path, experiment: Experiment, *, read_only: bool = False):
    if read_only:
        return restore(run_name(workdir), experiment.abstract)
    checkpoints = Checkpoints(workdir)
    try:
        return checkpoints.restore_newest(experiment.abstract)
    finally:
        checkpoints.close()


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def data_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Files of the arrays, the largest first, without the per-process files from before the merge."""
    return sorted((folder / "state" / "d").iterdir(), key=lambda path: -path.stat().st_size)


def flip(path: pathlib.Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGES = {
    "truncated": lambda folder: data_files(folder)[0].write_bytes(data_files(folder)[0].read_bytes()[:100]),
    "a bit of an array": lambda folder: flip(data_files(folder)[0], 8 * (data_files(folder)[0].stat().st_size // 2)),
    "a file gone": lambda folder: data_files(folder)[0].unlink(),
    "all arrays gone": lambda folder: shutil.rmtree(folder / "state"),
    "arrays empty": lambda folder: [path.unlink() for path in (folder / "state").rglob("*") if path.is_file()],
    "empty": lambda folder: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in folder.iterdir()],
    "facts are other ones": lambda folder: edit_facts(folder, train_seconds=0.0),
    "facts are no JSON": lambda folder: (folder / "facts" / "metadata").write_text("{"),
    "no marks": lambda folder: [path.unlink() for path in folder.iterdir() if path.is_file()],
    "metrics are no JSON": lambda folder: (folder / "metrics" / "metrics").write_text("{"),
    "metrics are a folder": lambda folder: replace_by_folder(folder / "metrics" / "metrics"),
}


def replace_by_folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def edit_facts(folder: pathlib.Path, **changes) -> None:
    path = folder / "facts" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_intact_checkpoint_is_restored_silently(workdir, experiment, states, caplog):
    state, facts = newest(workdir, experiment)
    assert equal(state, states[7]) and facts == {"corpus": "x", "train_seconds": 10.5}
    assert not [record for record in caplog.records if record.name.startswith("flash_lm")]


@pytest.mark.parametrize(
    "read_only", [False, pytest.param(True, marks=pytest.mark.slow("restores a checkpoint for each damage again"))]
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_intact_checkpoint_is_used(workdir, experiment, states, caplog, damage, read_only):
    DAMAGES[damage](workdir / "checkpoints" / "7")
    before = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    with caplog.at_level(logging.WARNING, "flash_lm"):
        state, facts = newest(workdir, experiment, read_only=read_only)
    if damage == "no marks" or (read_only and "metrics" in damage):  # the damage does not matter
        assert equal(state, states[7])
        return
    assert equal(state, states[5]) and facts["train_seconds"] == 7.5
    assert "checkpoint 7" in caplog.text
    after = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    if read_only:
        assert after == before
    else:
        assert after == ["5"] and (workdir / "damaged" / "7").is_dir()
        state, _ = newest(workdir, experiment)
        assert equal(state, states[5])


@pytest.mark.parametrize(
    "damage",
    [
        "a bit of an array",
        *(pytest.param(x, marks=pytest.mark.slow("another damage")) for x in DAMAGES if x[:4] not in ("a bi", "no m")),
    ],
)
def test_without_an_intact_checkpoint_there_is_an_error_every_time(workdir, experiment, damage):
    for step in ("5", "7"):
        DAMAGES[damage](workdir / "checkpoints" / step)
    for _ in range(2):
        with pytest.raises(InputError, match="no checkpoint in .* is intact"):
            newest(workdir, experiment)
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["5", "7"]


def test_the_best_one_is_kept_after_a_restart(states, tmp_path):
    for step, metrics in ((2, {"loss": 1.0}), (4, {"loss": 2.0}), (6, None)):
        checkpoints = Checkpoints(tmp_path, keep=1)
        checkpoints.save(step, states[5], {}, metrics)
        checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "6"]


def test_a_checkpoint_of_another_run_of_the_same_shapes_is_not_used(workdir, config, experiment, states, caplog):
    """A checkpoint renamed to another step is not used, either."""
    for name, expected in (("other", "8"), ("renamed", "9")):
        other = workdir.with_name(name)
        other.mkdir()
        if name == "other":
            (other / "config.json").write_text('{"seed": 1}')
        with Checkpoints(other) as checkpoints:
            checkpoints.save(8, states[7], {"corpus": "x", "train_seconds": 0.0}, None)
        shutil.move(other / "checkpoints" / "8", workdir / "checkpoints" / expected)
        with caplog.at_level(logging.WARNING, "flash_lm"):
            state, facts = newest(workdir, experiment)
        assert facts["train_seconds"] == 10.5 and equal(state, states[7])
        assert f"checkpoint {expected} is damaged, or of another config (it was saved by another run" in caplog.text


@pytest.mark.slow("trains a run of 11 steps")
def test_a_run_that_has_lost_all_its_checkpoints_does_not_start_over(config, tmp_path):
    counter = itertools.count(1)
    train(config, tmp_path, should_stop=lambda: next(counter) == 11)
    before = (tmp_path / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(InputError, match="has 11 steps, but there is no checkpoint"):
        train(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.slow("trains a run of 12 steps, and the end of it again")
def test_a_damaged_last_checkpoint_is_trained_again(config, tmp_path):
    train(config, tmp_path / "run")
    flip(data_files(tmp_path / "run" / "checkpoints" / "12")[0], 8000)
    train(config, tmp_path / "run")
    state, _ = newest(tmp_path / "run", build_experiment(parse(config)), read_only=True)
    assert int(state.step) == 12 and (tmp_path / "run" / "damaged" / "12").is_dir()


def test_a_checkpoint_of_another_model_is_not_used(workdir, config, states):
    other = config.copy_and_resolve_references()
    other.model.model_dim *= 2
    with pytest.raises(InputError, match="no checkpoint in .* is intact and of this config"):
        newest(workdir, build_experiment(parse(other)))


@pytest.mark.slow("restores dozens of checkpoints")
def test_a_flipped_bit_anywhere_is_detected_or_harmless(intact, experiment, states, tmp_path):
    """In any file of a checkpoint: what is restored is one of the two states, to the bit."""
    rng, restored = np.random.default_rng(0), {5: 0, 7: 0}
    files = [
        p.relative_to(intact) for p in (intact / "checkpoints" / "7").rglob("*") if p.is_file() and p.stat().st_size
    ]
    files_to_damage = files + [file.relative_to(intact) for file in data_files(intact / "checkpoints" / "7")] * 40
    for i, file in enumerate(files_to_damage):
        workdir = shutil.copytree(intact, tmp_path / str(i))
        flip(workdir / file, int(rng.integers(8 * (workdir / file).stat().st_size)))
        state, facts = newest(workdir, experiment)
        step = int(facts["train_seconds"] / 1.5)
        assert equal(state, states[step]), file
        restored[step] += 1
        shutil.rmtree(workdir)
    assert restored[5] > 40, restored


@pytest.mark.slow("trains a run twice, once with a resume, and scores it")
def test_a_run_continues_exactly_from_the_intact_checkpoint(config, tmp_path, caplog):
    train(config, tmp_path / "uninterrupted")
    counter = itertools.count(1)
    train(config, tmp_path / "run", should_stop=lambda: next(counter) == 11)
    flip(data_files(tmp_path / "run" / "checkpoints" / "11")[0], 8000)
    with caplog.at_level(logging.WARNING, "flash_lm"):
        (result,) = evaluate(tmp_path / "run", "validation", [])
        assert result["step"] == 9 and "checkpoint 11 is damaged" in caplog.text
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "damaged" / "11").is_dir()
    losses = [
        [(line["step"], line["loss"]) for line in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "uninterrupted")
    ]
    assert losses[0] == losses[1]


def test_a_fingerprint_depends_on_every_bit_and_position():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4, jnp.bfloat16), "c": jnp.zeros((), jnp.int32)}
    seen = {fingerprint(tree)}
    for name, x in tree.items():
        for index in range(x.size):
            for bit in range(8 * x.dtype.itemsize):
                content = np.array(x)
                content.reshape(-1).view(f"u{x.dtype.itemsize}")[index] ^= 1 << bit
                seen.add(fingerprint(tree | {name: jnp.asarray(content)}))
    assert len(seen) == 1 + 6 * 32 + 4 * 16 + 32
    # Two signs: each changes a sum of words by half of 2³².
    assert fingerprint(tree | {"a": tree["a"].at[0, 1:].multiply(-1)}) not in seen
    assert fingerprint(tree | {"b": -tree["b"]}) not in seen
    swapped = {"a": tree["a"][::-1], "b": tree["b"], "c": tree["c"]}
    assert fingerprint(swapped) not in seen
    assert fingerprint({"b": tree["a"], "a": tree["b"], "c": tree["c"]}) not in seen
    assert fingerprint(tree | {"a": tree["a"].reshape(3, 2)}) not in seen


def test_a_fingerprint_does_not_depend_on_the_mesh():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    x = jnp.arange(64.0).reshape(8, 8)
    one = fingerprint({"x": x})
    for spec in (("x", "y"), ("y", None), (None, ("x", "y")), ()):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        assert fingerprint({"x": jax.device_put(x, sharding)}) == one


@pytest.fixture(scope="module")
def performer(config) -> Experiment:
    other = config.copy_and_resolve_references()
    other.model.family = "performer"
    return build_experiment(parse(other))


@pytest.mark.slow("computes the features of a model twice, operation by operation")
def test_constants_that_are_drawn_are_saved(performer, tmp_path):
    """They are checked, too: if the way they are drawn changes, a trained model keeps its random features."""
    state = new_state(performer)
    drawn = jax.tree.map(lambda x: x + 1, state.constants)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, dataclasses.replace(state, constants=drawn), {"corpus": "x"}, None)
    restored, _ = restore(run_name(tmp_path), performer.abstract)
    assert jax.tree.leaves(drawn) and equal(restored.constants, drawn) and not equal(drawn, performer.model.constants)
    bound = performer.replace_constants(restored.constants).model
    batch = next(performer.training_batches(performer.share()))
    tokens = [jnp.asarray(batch[name]) for name in ("inputs_BxL", "segment_ids_BxL", "positions_BxL")]
    features = [model.bind(state.params).features(ModelInputs(*tokens)) for model in (performer.model, bound)]
    assert not np.allclose(*features, atol=1e-3)
    facts = json.loads((tmp_path / "checkpoints" / "3" / "facts" / "metadata").read_text())
    facts["checksums"]["constants"] = "0" * 16
    edit_facts(tmp_path / "checkpoints" / "3", **facts)
    with pytest.raises(InputError, match="checksum of constants"):
        restore(run_name(tmp_path), performer.abstract)


def test_a_checkpoint_without_constants_or_checksums_is_damaged(performer, tmp_path):
    state = new_state(performer)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, dataclasses.replace(state, constants={}), {"corpus": "x"}, None)
    with pytest.raises(InputError, match="no checkpoint in .* is intact"):
        restore(run_name(tmp_path), performer.abstract)
    path = tmp_path / "checkpoints" / "3" / "facts" / "metadata"
    path.write_text(json.dumps({name: x for name, x in json.loads(path.read_text()).items() if name != "checksums"}))
    with pytest.raises(InputError, match=r"is intact and of this config \(3: it has no checksums\): restore a copy"):
        restore(run_name(tmp_path), performer.abstract)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (
            ValueError("INTERNAL: a/b: No space left on device"),
            RunError,
            r"\(No space left on device\).*: make room,",
        ),
        (PermissionError(13, "Permission denied", "a/b"), RunError, "allow writing there"),
        (OSError(5, "Input/output error"), RunError, "check the disk"),
        (ValueError("UNAVAILABLE: gs://a"), PassingError, "check the network"),
        (ValueError("shapes differ"), ValueError, "^shapes differ$"),
        (RuntimeError("no such thing"), RuntimeError, "^no such thing$"),
    ],
    ids=str,
)
def test_only_a_full_disk_is_reported_as_full(states, tmp_path, monkeypatch, error, expected, message):
    """A programming error is raised unchanged."""
    checkpoints = Checkpoints(tmp_path)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(checkpoints._manager, "save", fail)
    with pytest.raises(expected, match=message) as caught:
        checkpoints.save(5, states[5], {}, None)
    assert type(caught.value) is expected
