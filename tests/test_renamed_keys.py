"""Keys that are added or renamed: older runs load and keep their hash; former and foreign key names get a hint."""

import json

import pytest
from flax.traverse_util import flatten_dict

from flash_lm.cli.load import load_config
from flash_lm.config import keys
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import Config, identifying_keys, upgrade
from flash_lm.config.keys import key, section
from flash_lm.config.renamed_keys import FOREIGN, RENAMED
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.runs.run_folder import RunFolder, run_hash


@pytest.fixture
def added_section(monkeypatch):
    """A section of a later version, with a key that changes nothing and one whose default changes the result."""
    monkeypatch.setattr(keys.SECTIONS, "registered", dict(keys.SECTIONS))

    @section("model.later")
    class Later:
        size: int = key(3, "of something new; runs before it had none, as by default")
        rule: str = key("new", "how something is done; runs before it did it the old way", before="old")

    return Later


def test_a_key_that_is_added_later_changes_no_hash(request):
    older = [
        apply_changes(get_config(), changes).to_dict()
        for changes in ({}, {"model.family": "aft_conv", "train.steps": 7})
    ]
    hashes = [run_hash(config) for config in older]
    request.getfixturevalue("added_section")
    assert [run_hash(config) for config in older] == hashes
    assert [run_hash(upgrade(config)) for config in older] == hashes
    new = get_config()
    assert run_hash(new.to_dict()) != hashes[0]  # its new behaviour has a new hash
    assert run_hash(apply_changes(new, {"model.later.rule": "old"}).to_dict()) == hashes[0]
    assert run_hash(apply_changes(new, {"model.later.rule": "old", "model.later.size": 4}).to_dict()) != hashes[0]


def test_a_key_that_is_renamed_later_changes_no_hash(monkeypatch):
    """For a run with the former name, at the default or not, and for one former key that is now two."""
    today = ("model.chunks.size", "model.linear.chunk_size")
    monkeypatch.setitem(RENAMED, "model.chunk_size", today)
    for size in (None, 32):
        flat = flatten_dict(get_config().to_dict(), sep=".")
        default = flat[today[0]]
        assert flat[today[1]] == default
        former = {name: value for name, value in flat.items() if name not in today}
        former["model.chunk_size"] = size or default
        assert identifying_keys(former) == ({"model.chunk_size": size} if size else {})


def test_a_run_from_before_a_key_keeps_its_behaviour(request):
    older = get_config().to_dict()
    request.getfixturevalue("added_section")
    assert upgrade(older)["model"]["later"] == {"size": 3, "rule": "old"}
    assert upgrade(older | {"model": older["model"] | {"later": {"size": 5}}})["model"]["later"]["rule"] == "old"
    assert get_config().model.later.rule == "new"


def test_set_keys_are_kept_and_missing_keys_get_their_default():
    full = get_config().to_dict()
    less = {name: dict(value) if isinstance(value, dict) else value for name, value in full.items()}
    for name in ("name", "streaming", "masking"):
        del less["data"][name]
    del less["model"]["gau"], less["mesh"]["rules"]
    less["train"]["clip"] = 0.25
    assert upgrade(less) == full | {"train": full["train"] | {"clip": 0.25}}
    assert upgrade(full) == full
    for damaged in ({name: x for name, x in full.items() if name != "mesh"}, full | {"mesh": {}}):
        assert upgrade(damaged) == damaged  # no key was added: the reader reports what is missing


def test_every_key_that_differs_from_its_default_identifies_a_run():
    flat = flatten_dict(get_config().to_dict(), sep=".")
    assert not identifying_keys(flat) and not identifying_keys(json.loads(json.dumps(flat)))
    for name, value in (("model.query_key_norm", True), ("data.mqar.words", 99), ("train.steps", 7), ("seed", 1)):
        assert identifying_keys(flat | {name: value}) == {name: value}
    assert identifying_keys({**flat, "model.tie_embeddings": 1})  # not True
    # Implementations of the same attention make the same run; before `auto` was the default, `blocked` was.
    name = "model.quadratic.implementation"
    assert identifying_keys(flat | {name: "blocked"}) == {}
    assert identifying_keys(flat | {name: "plain"}) == {name: "plain"}
    # Slices of the loss change rounding alone; before their size was open, it was 1024.
    assert identifying_keys(flat | {"train.loss_chunk": 1024}) == {}
    assert identifying_keys(flat | {"train.loss_chunk": 64}) == {"train.loss_chunk": 64}
    assert identifying_keys(flat | {"model.scan_layers": True}) == {}
    assert identifying_keys(flat | {"model.scan_layers": False}) == {"model.scan_layers": False}
    assert identifying_keys({"of.a.plugin": 1}) == {"of.a.plugin": 1}


def test_a_former_name_gets_a_hint_and_runs_with_it_load(monkeypatch, tmp_path):
    monkeypatch.setitem(RENAMED, "model.chunk_size", ("model.chunks.size", "model.linear.chunk_size"))
    with pytest.raises(InputError, match="chunk_size is now model.chunks.size and model.linear.chunk_size: flash"):
        load_config("quickstart", ["--config.model.chunk_size=8"])
    config = get_config().to_dict()
    del config["model"]["chunks"], config["model"]["linear"]["chunk_size"]
    config["model"]["chunk_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "changes.jsonl").write_text(json.dumps({"model.remat": "full", "train.keep": 3}) + "\n")
    model = RunFolder(tmp_path).config.model
    assert (model.chunks.size, model.linear.chunk_size, model.remat, "chunk_size" in model) == (64, 64, "full", False)
    monkeypatch.setitem(RENAMED, "train.last", ("train.keep",))
    (tmp_path / "changes.jsonl").write_text(json.dumps({"train.last": 5}) + "\n")
    assert RunFolder(tmp_path).config.train.keep == 5


def test_former_and_foreign_names_lead_to_keys():
    known = {one.name for one in keys.keys(Config)}
    assert {name for names in RENAMED.values() for name in names} <= known and not RENAMED.keys() & known
    assert {*FOREIGN.values()} <= known and not {*FOREIGN} & {name.rpartition(".")[2] for name in known}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("model.hidden_size", "model.model_dim"),
        ("train.lr", "train.learning_rate"),
        ("batch_size", "data.tokens_per_batch"),
    ],
)
def test_a_foreign_name_gets_a_hint_with_ours(name, ours):
    with pytest.raises(InputError, match=rf"unknown key {name}: did you mean {ours}\?"):
        load_config("quickstart", [f"--config.{name}=8"])
