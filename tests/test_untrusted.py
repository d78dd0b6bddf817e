"""Folders from somebody else: whatever their files hold, loading ends in one line, without a traceback or a wait."""

import json
import os
import pathlib
import shutil

import jax
import pytest
from inference.test_export import trained_model
from safetensors.numpy import load_file

import flash_lm
from flash_lm.config.regexes import regex_problem
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.inference.api import LoadedModel
from flash_lm.inference.export import export as write
from flash_lm.runs.json_file import parse_json
from flash_lm.runs.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    write(trained_model(folder / "run", "transformer_plus_plus"), folder / "out", "mit")
    return folder / "out"


@pytest.fixture
def folder(intact, tmp_path):
    """An export, to be changed."""
    return pathlib.Path(shutil.copytree(intact, tmp_path / "theirs"))


def set_config_key(folder: pathlib.Path, key: str, value) -> None:
    """Sets a key of config.json, or removes it if the value is KeyError."""
    content = json.loads((folder / "config.json").read_text())
    *parents, last = key.split(".")
    level = content
    for parent in parents:
        level = level[parent]
    level[last] = value
    if value is KeyError:
        del level[last]
    (folder / "config.json").write_text(json.dumps(content))


SLOW = r"(\w+/?)+!"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("flash_lm.facts", None, "config.json has no good facts"),
        ("flash_lm.facts", [], "config.json has no good facts"),
        ("flash_lm.facts", {}, "its facts name no corpus"),
        ("flash_lm.facts.code", "x", "its facts have a wrong code"),
        ("flash_lm.facts.tokenizer", 3, "its facts have a wrong tokenizer"),
        ("flash_lm.step", "../x", "config.json has no good step"),
        ("flash_lm.step", True, "config.json has no good step"),
        ("flash_lm.run", ["x"], "config.json has no good run"),
        ("flash_lm", 3, "does not say what made the export"),
        ("config", None, "config.json is damaged: restore it"),
        ("config", [1], "config.json is damaged: restore it"),
        ("config.data.corpus", ["text"], r"data.corpus=\('text',\) must be of type str"),
        ("config.data.path", 3, "data.path=3 must be of type str"),
        ("config.model", {}, r"config.json is damaged \(model.\w+ is missing; model.\w+ is missing; "),
        ("config.train", {}, r"config.json is damaged \(train.\w+ is missing"),
        ("config.mesh", {}, r"config.json is damaged \(mesh.shape is missing; mesh.rules is missing\)"),
        ("config.mesh", None, "mesh is no group of keys"),
        ("config.mesh", KeyError, "mesh is missing"),
        ("config.model.gau", None, "config.json is damaged"),
        ("config.model.gau", {"heads": None}, "model.gau.heads=None must be of type int"),
        ("config.model.num_layers", "4", "model.num_layers='4' must be of type int"),
        ("config.model.param_dtype", "evil", "model.param_dtype=evil must be one of"),
        ("config.model.a\nb", 1, r"unknown key model.a\\nb"),
        ("config.model.items", 1, "(unknown key model.items|config.json is damaged)"),
        ("config.mesh.rules", [[SLOW, ["tensor", None]]], "mesh.rules=.* must be .* repeats a group"),
        ("config.mesh.rules", [["a{99999999999}", []]], "is not a regex"),
        ("config.train.freeze", [SLOW], "train.freeze=.* must be .* repeats a group"),
    ],
    ids=str,
)
def test_a_config_ends_in_one_line(folder, key, value, message):
    set_config_key(folder, key, value)
    with pytest.raises(InputError, match=message) as error:
        flash_lm.load(folder, dtype="float32")
    assert all(line.isprintable() for line in str(error.value).splitlines())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**8}, "config.json has 100,000,000 layers, and the weights have not"),
        ({"num_layers": 300, "pattern": ["transformer_plus_plus", "flash"] * 150}, "config.json has 300 layers"),
        ({"vocab_size": 2**31 - 1}, r"embedding is \(260, 16\), expected \(2147483647, 16\)"),
        ({"family": "performer", "favor.features": 2**31 - 1}, "expected"),
        ({"num_layers": 2}, "expected"),
    ],
    ids=str,
)
def test_only_layers_in_the_weights_are_built(folder, changes, message, monkeypatch):
    for key, value in changes.items():
        set_config_key(folder, f"config.model.{key}", value)
    monkeypatch.setattr(jax, "device_get", None)  # constants would be computed and fetched
    with pytest.raises(InputError, match=f"{folder} is damaged .*{message}.*: export the run again"):
        flash_lm.load(folder)


@pytest.mark.parametrize("file", ["../out/model.safetensors", "ABSOLUTE", "pipe", "sub", "missing"])
def test_an_index_names_only_files_of_its_folder(folder, intact, file):
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    shutil.copytree(intact, folder.parent / "out")
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file = str(intact / "model.safetensors") if file == "ABSOLUTE" else file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    with pytest.raises(InputError, match=f"is damaged \\({file} is no file of the folder\\)"):
        flash_lm.load(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"config":' * 100_000, "[" * 90 + "]" * 90, "", "\xff", "null", "3"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer/kind.json", "labels.json"])
def test_a_file_without_an_object_is_reported_in_one_line(folder, file, text):
    (folder / file).write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=f"({file} is damaged|holds no tokenizer, or a damaged one)") as error:
        flash_lm.load(folder)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("info", [[], {}, {"kind": []}, {"kind": "hf"}, {"kind": "numbers"}, {"kind": "characters"}])
def test_a_damaged_tokenizer_ends_in_one_line(folder, info):
    (folder / "tokenizer" / "kind.json").write_text(json.dumps(info))
    (folder / "tokenizer" / "sentencepiece.model").write_bytes(b'\xff{"tokenizer": []}')
    with pytest.raises(InputError, match="holds no tokenizer, or a damaged one: restore it"):
        flash_lm.load(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer/kind.json", "tokenizer/sentencepiece.model", "labels.json"])
def test_nothing_waits_for_a_pipe(folder, file):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(InputError):
        flash_lm.load(folder)


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"train.steps": "x"}', '{"data": 3}', '{"model.new.key": 1}', "[" * 100_000]
)
def test_a_change_that_no_run_writes_is_reported_in_one_line(tmp_path, line):
    (tmp_path / "config.json").write_text(json.dumps(get_config().to_dict()))
    (tmp_path / "changes.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match=r"changes.jsonl(: line 1)? is damaged"):
        _ = RunFolder(tmp_path).config


def test_an_intact_folder_is_loaded(folder):
    assert isinstance(flash_lm.load(folder), LoadedModel)


@pytest.mark.parametrize(
    "regex",
    [rule for rule, _ in get_config().mesh.rules]
    + ["embedding", r"layers/sublayer_\d+/.*kernel$", "^(?!embedding)", "(query|key)/(kernel|bias)", "[a-z_]+/[(*|+]"],
)
def test_usual_regexes_are_accepted(regex):
    assert regex_problem(regex) is None


@pytest.mark.parametrize(
    "regex",
    [
        SLOW,
        "(a|a)*b",
        "((a+))+",
        "(a?){50}b",
        ".*.*.*.*!",
        "(.|.)" * 30,
        "a?" * 30 + "!",
        r"(a+)\1",
        "(?P<x>a)(?P=x)",
        "(",
        "a" * 201,
        "a{99999999999}",
        3,
    ],
    ids=str,
)
def test_regexes_that_may_take_exponential_time_are_refused(regex):
    assert regex_problem(regex)


def test_the_depth_of_json_is_bounded():
    deep = lambda levels: "[" * levels + "]" * levels
    assert parse_json(deep(60)) and parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    for levels in (70, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(deep(levels))
