"""MODEL:text and MODEL:chat as --config: a new run from the model of a folder."""

import json

import pytest
from small import small_config

from flash_lm.cli.load import config_name, load_config
from flash_lm.config.experiment import default_config, parse
from flash_lm.errors import InputError

MODEL = {"model.num_layers": 6, "model.param_dtype": "bfloat16", "model.max_length": 128, "data.tokenizer": "hf"}


def write_model(folder, **keys) -> str:
    raw = small_config("books", folder / "cache")
    raw.update_from_flattened_dict(MODEL | {"train.learning_rate": 9.0, "seed": 5} | keys)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw.to_dict()))
    return str(folder)


def test_the_model_is_that_of_the_folder_and_the_rest_is_new(tmp_path):
    folder = write_model(tmp_path / "model")
    config = parse(load_config(f"{folder}:chat", ["--config.data.path=chats.jsonl", "--config.train.steps=7"]))
    assert (config.train.init_from, config.train.steps, config.seed) == (folder, 7, default_config().seed)
    assert (config.data.corpus, config.data.pack, config.data.path) == ("chat", "examples", "chats.jsonl")
    assert (config.data.tokenizer, config.data.length, config.model.num_layers) == ("hf", 128, 6)
    assert config.train.learning_rate < default_config().train.learning_rate
    assert config.model.param_dtype == "float32" and config.model.scan_layers is False
    text = parse(load_config(f"{folder}:text", ["--config.data.path=books"]))
    assert (text.data.corpus, text.data.pack) == ("text", "stream")
    assert parse(load_config(folder, [])).train.learning_rate == 9.0  # without a preset as it is


def test_a_deep_model_is_scanned_and_rows_are_short(tmp_path):
    folder = write_model(tmp_path / "model", **{"model.num_layers": 48, "model.max_length": 4096})
    config = parse(load_config(f"{folder}:text", ["--config.data.path=books"]))
    assert config.model.scan_layers and config.data.length == 256


def test_another_preset_is_refused(tmp_path):
    folder = write_model(tmp_path / "model")
    with pytest.raises(InputError, match=f"{folder}:chats is not known: a model is fine-tuned with .*:text or .*:chat"):
        load_config(f"{folder}:chats", [])
    assert config_name(f"{folder}:chat") == "model_chat"
