"""Llamas: an export matches Llama's equations, and an import is the same model, with its tokenizer."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from oracles import llama as oracle
from safetensors.numpy import load_file, save_file
from small import write_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import flash_lm
from flash_lm import import_model
from flash_lm.cli.load import load_config
from flash_lm.data.foreign_tokenizer import HuggingFaceTokenizer, read_tokenizer
from flash_lm.data.tokenizers import load_tokenizer, save_tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.export import export as write
from flash_lm.inference.model import load_model
from flash_lm.inference.scoring import evaluate
from flash_lm.training.train_loop import train
from inference.test_export import trained_model

pytestmark = pytest.mark.usefixtures("usual_promotion")
IDS = np.random.default_rng(0).integers(5, 90, size=23)
SHAPE = {"num_layers": 2, "norm": "rms", "num_heads": 4, "num_kv_heads": 2, "rotary_base": 300.0, "norm_epsilon": 1e-3}
UP = "model.layers.1.mlp.up_proj.weight"
TEXTS = ("the cat sat", "  two  blanks\n\ttab", "naïve 猫 😀", "<|end|> is text here", "")


def export_llama(folder: pathlib.Path, **keys) -> pathlib.Path:
    trained = trained_model(folder / "run", "transformer_plus_plus", **SHAPE | keys)
    assert write(trained, folder / "llama", "mit", "llama") == []
    return folder / "llama"


def parts(folder: pathlib.Path) -> tuple[dict, dict]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return export_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("keys", [{}, {"tie_embeddings": False, "num_kv_heads": 1, "num_layers": 3}], ids=str)
def test_an_export_is_a_llama(keys, tmp_path):
    folder = export_llama(tmp_path, **keys)
    expected = oracle.logits(*parts(folder), IDS)
    ours = flash_lm.load(tmp_path / "back") if flash_lm.import_hf(folder, tmp_path / "back") else None
    assert ours is not None
    np.testing.assert_allclose(ours.logits(IDS), expected, atol=1e-4 * np.abs(expected).max())


def test_the_round_trip_is_bit_for_bit(llama, tmp_path):
    """Parameters in bfloat16, too; an imported model can be exported again."""
    trained = trained_model(tmp_path / "half", "transformer_plus_plus", param_dtype="bfloat16", **SHAPE)
    write(trained, tmp_path / "llama", "mit", "llama")
    for folder in (llama, tmp_path / "llama"):
        out = flash_lm.import_hf(folder, tmp_path / f"{folder.parent.name}_in")
        model = load_model(out)
        write(model, tmp_path / f"{folder.parent.name}_out", "mit", "llama")
        (before, settings), (after, again) = parts(folder), parts(tmp_path / f"{folder.parent.name}_out")
        assert before.keys() == after.keys()
        assert all(before[key].tobytes() == after[key].tobytes() for key in before)
        assert {**settings, "flash_lm": 0} == {**again, "flash_lm": 0}
        assert (
            Tokenizer.from_file(str(folder / "tokenizer.json")).to_str()
            == Tokenizer.from_file(str(tmp_path / f"{folder.parent.name}_out" / "tokenizer.json")).to_str()
        )


def byte_level() -> Tokenizer:
    """Like the tokenizer of GPT-2, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat sat on the mat", "naïve 猫"] * 9, trainer)
    return tokenizer


def write_foreign_model(folder: pathlib.Path, llama: pathlib.Path) -> pathlib.Path:
    """A model as others publish them: a padded vocabulary, two files, and another kind of tokenizer."""
    arrays, settings = parts(llama)
    folder.mkdir()
    vocab, dim = 320, settings["hidden_size"]
    rng = np.random.default_rng(1)
    arrays["model.embed_tokens.weight"] = rng.standard_normal((vocab, dim)).astype(np.float32)
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    halves = [dict(list(arrays.items())[i::2]) for i in (0, 1)]
    files_of_arrays = {}
    for i, half in enumerate(halves):
        save_file(half, folder / f"model-{i}.safetensors")
        files_of_arrays |= dict.fromkeys(half, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files_of_arrays}))
    settings = {key: x for key, x in settings.items() if key not in ("rope_parameters", "flash_lm", "head_dim")}
    settings |= {"vocab_size": vocab, "bos_token_id": None, "eos_token_id": [0, 1]}
    (folder / "config.json").write_text(json.dumps(settings))
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return folder


@pytest.fixture(scope="module")
def imported_model(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    import_model.main([f"--model={write_foreign_model(folder / 'theirs', llama)}", f"--out={folder / 'ours'}"])
    return folder


def test_a_foreign_model_is_scored_and_continued(imported_model):
    model = flash_lm.load(imported_model / "ours")
    settings = json.loads((imported_model / "theirs" / "config.json").read_text())
    arrays = {}
    for path in (imported_model / "theirs").glob("*.safetensors"):
        arrays |= load_file(path)
    expected = oracle.logits(arrays, settings, IDS)
    np.testing.assert_allclose(model.logits(IDS), expected, atol=1e-4 * np.abs(expected).max())
    score = model.score("the cat")
    assert score.tokens == byte_level().encode("the cat").ids and model.tokenizer.begin == model.tokenizer.end == 0
    row = oracle.logits(arrays, settings, np.array([0, *score.tokens]))
    log_probs = row - np.log(np.exp(row).sum(axis=1, keepdims=True))
    picked = log_probs[np.arange(len(score.tokens)), score.tokens]
    np.testing.assert_allclose(score.log_probs, picked, atol=1e-3)
    assert isinstance(model.generate("the", 5, temperature=0), str)


def test_special_tokens_without_an_embedding_are_left_out(imported_model, copied_foreign, tmp_path, caplog):
    tokenizer = byte_level()
    tokenizer.add_special_tokens([f"<|{i}|>" for i in range(320 - tokenizer.get_vocab_size())] + ["<|pad|>", "<|x|>"])
    tokenizer.enable_padding(pad_id=320, pad_token="<|pad|>")
    tokenizer.save(str(copied_foreign / "tokenizer.json"))
    with caplog.at_level("INFO", "flash_lm"):
        model = flash_lm.load(flash_lm.import_hf(copied_foreign, tmp_path / "ours"))
    assert "without an embedding: <|pad|>, <|x|>" in caplog.text
    assert model.tokenizer.vocab_size == 320
    before = flash_lm.load(imported_model / "ours").tokenizer
    for text in TEXTS:
        assert model.tokenizer.encode([text])[0].tolist() == before.encode([text])[0].tolist()


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda x: x.add_tokens(["a word"]), "321 tokens: delete 'a word' (id 320) of added_tokens from tokenizer"),
        (lambda x: x.add_special_tokens(["<|last|>"]), "delete '<|last|>' (id 320, an end of texts) of added_tokens"),
    ],
    ids=["not special", "end of text"],
)
def test_other_tokens_without_an_embedding_are_named(add, message, copied_foreign, tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens([f"<|{i}|>" for i in range(320 - tokenizer.get_vocab_size())])
    add(tokenizer)
    tokenizer.save(str(copied_foreign / "tokenizer.json"))
    end = "<|last|>" if "last" in message else "<|end|>"
    (copied_foreign / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    with pytest.raises(InputError, match=re.escape(message)):
        flash_lm.import_hf(copied_foreign, tmp_path / "ours")


@pytest.mark.slow("trains a run")
def test_a_foreign_model_is_fine_tuned_and_evaluated(imported_model, tmp_path):
    corpus = write_corpus(tmp_path)
    words = ("corpus=text", f"path={corpus}", f"cache_dir={tmp_path}")
    overrides = [f"--config.data.{word}" for word in words]
    (line,) = evaluate(imported_model / "ours", "test", [16], overrides=overrides)
    assert line["own_corpus"] is False and line["bytes"] > 0
    words = [*overrides, "--config.data.length=16", "--config.data.tokens_per_batch=128", "--config.train.steps=2"]
    config = load_config(str(imported_model / "ours"), [*words, f"--config.train.init_from={imported_model / 'ours'}"])
    train(config, tmp_path / "child")
    parent = json.loads((tmp_path / "child" / "config.json").read_text())
    assert parent["train"]["init_from"] == str(imported_model / "ours")
    assert load_tokenizer(tmp_path / "child" / "tokenizer").kind == "hf"


@pytest.fixture
def copied_foreign(imported_model, tmp_path):
    """The folder of a foreign model, to be changed."""
    return pathlib.Path(shutil.copytree(imported_model / "theirs", tmp_path / "theirs"))


@pytest.fixture
def copied_folder(llama, tmp_path):
    """The folder of a Llama, to be changed."""
    return pathlib.Path(shutil.copytree(llama, tmp_path / "copied"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type=mistral, which no format of flash_lm recognises"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters={'rope_type': 'yarn'}"),
        ({"rope_parameters": {"type": "linear", "factor": 4.0}}, "rope_parameters="),
        ({"rope_parameters": "linear"}, "rope_parameters=linear"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta=big"),
        ({"head_dim": 5}, "model.rotary pairs dimensions: the head width 5 must be even"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": "4"}, "num_attention_heads=4"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps=1e-5"),
        ({"max_position_embeddings": 32.0}, "max_position_embeddings=32.0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        ({"vocab_size": 200}, "200 rows of embeddings for 260 tokens"),
        ({"num_hidden_layers": 7}, "no model.layers"),
        ({"num_hidden_layers": 10**8}, "has 100,000,000 layers, and the weights have 20 arrays"),
        ({"num_hidden_layers": 1}, "also model.layers.1"),
        ({"intermediate_size": 11}, "model.layers.0.mlp.gate_proj.weight is"),
    ],
    ids=str,
)
def test_other_models_are_refused(change, message, copied_folder, tmp_path):
    settings = parts(copied_folder)[1] | change
    (copied_folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message):
        flash_lm.import_hf(copied_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_biases_and_missing_files_are_refused(llama, copied_folder, tmp_path):
    arrays = parts(copied_folder)[0]
    save_file(
        arrays | {"model.layers.0.self_attn.q_proj.bias": np.ones(3, np.float32)}, copied_folder / "model.safetensors"
    )
    with pytest.raises(InputError, match=r"with this config.json: also model.layers.0.self_attn.q_proj.bias"):
        flash_lm.import_hf(copied_folder, tmp_path / "out")
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (copied_folder / name).unlink()
        with pytest.raises(InputError, match=r"cannot (be )?read"):
            flash_lm.import_hf(copied_folder, tmp_path / "out")
    with pytest.raises(InputError, match="exists"):
        flash_lm.import_hf(llama, copied_folder)


def test_weights_that_do_not_fit_are_refused(copied_folder, tmp_path):
    arrays = parts(copied_folder)[0]
    index = copied_folder / "model.safetensors.index.json"
    for change, message in (
        ({UP: arrays[UP][:-1]}, r"model.layers.1.mlp.up_proj.weight is \[47, 16\], not \[48, 16\]"),
        ({UP: arrays[UP].astype(np.int32)}, "up_proj.weight is I32: only BF16, F16, F32 can be read"),
    ):
        save_file(arrays | change, copied_folder / "model.safetensors")
        with pytest.raises(InputError, match=message):
            flash_lm.import_hf(copied_folder, tmp_path / "out")
    for text, message in (
        ("[]", "not a JSON object"),
        ("{}", "the weights are nothing"),
        (
            '{"weight_map": {"a": "../copied/model.safetensors"}}',
            "../copied/model.safetensors is no file of the folder",
        ),
        ('{"weight_map": {"a": "/dev/stdin"}}', "/dev/stdin is no file of the folder"),
        ('{"weight_map": [1]}', "weight_map"),
    ):
        index.write_text(text)
        with pytest.raises(InputError, match=message):
            flash_lm.import_hf(copied_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_array_in_float32_keeps_all_of_them(copied_folder, tmp_path):
    arrays = parts(copied_folder)[0]
    halves = {name: x.astype("bfloat16") for name, x in arrays.items() if "embed" in name}
    save_file(arrays | halves, copied_folder / "model.safetensors")
    model = flash_lm.load(flash_lm.import_hf(copied_folder, tmp_path / "ours"))
    assert model.params["layers"]["sublayer_1"]["up"]["kernel"].dtype == "float32"
    np.testing.assert_array_equal(model.params["layers"]["sublayer_1"]["up"]["kernel"][1], arrays[UP].T)


def test_the_card_of_an_imported_model_names_its_source(llama, tmp_path):
    out = flash_lm.import_hf(llama, tmp_path / "in")
    write(load_model(out), tmp_path / "again", "mit", "llama")
    card = (tmp_path / "again" / "README.md").read_text()
    assert f"from `{llama}`" in card and "trained with" not in card and "steps" not in card
    with pytest.raises(InputError, match="another --dtype"):
        write(load_model(out), tmp_path / "copy", "mit")
    write(load_model(out, dtype="bfloat16"), tmp_path / "half", "mit")
    assert flash_lm.load(tmp_path / "half").params["embedding"].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"norm": "layer"}, "model.norm=layer, not rms"), ({"rotary": False}, "rotary=False")],
    ids=str,
)
def test_a_model_that_is_not_a_llama_is_not_written_as_one(keys, message, tmp_path):
    trained = trained_model(tmp_path / "run", "transformer_plus_plus", **SHAPE | keys)
    with pytest.raises(InputError, match=message):
        write(trained, tmp_path / "out", "mit", "llama")
    assert not (tmp_path / "out").exists()


def test_a_llama_is_not_a_run(llama):
    with pytest.raises(InputError, match=r"flash-lm import --model="):
        flash_lm.load(llama)


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer.of(json.loads(byte_level().to_str()), "<|end|>", "<|end|>")


def test_a_foreign_tokenizer(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint and again.vocab_size == tokenizer.vocab_size
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert again.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids.tolist())) == text.encode()
        assert tokenizer.bytes_per_token()[ids].sum() == len(text.encode())
        assert tokenizer.end not in ids.tolist()
    assert tokenizer.token_bytes(tokenizer.end) == tokenizer.token_bytes(10_000) == b""


def test_pieces_of_text(llama, tmp_path):
    """Our SentencePiece as a foreign tokenizer: bytes for rare characters, and a sign for blanks."""
    tokenizer = read_tokenizer(llama)
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids.tolist())) == text.encode()


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("{}", {}, "not a tokenizer"),
        ("no", {}, "not a JSON object"),
        ("[]", {}, "not a JSON object"),
        (None, {"eos_token": {"x": 1}}, "has no end-of-text token"),
        (None, {"eos_token": 1.5}, "has no end-of-text token"),
        (None, {"eos_token": "</s>"}, "end-of-text '</s>'"),
        (None, {}, "has no end-of-text token"),
    ],
)
def test_other_tokenizers_are_refused(text, words, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str() if text is None else text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"} if text else words))
    with pytest.raises(InputError, match=message):
        read_tokenizer(tmp_path)


def test_a_tokenizer_that_loses_text_is_refused():
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match="WordPiece"):
        HuggingFaceTokenizer.of(json.loads(words.to_str()), 0, 1)


@pytest.mark.slow("compiles for another mesh")
def test_shared_keys_survive_the_mesh(llama, tmp_path):
    """Two key heads on a mesh whose tensor axis has four devices."""
    out = flash_lm.import_hf(llama, tmp_path / "in")
    one, eight = (flash_lm.load(out, mesh=mesh) for mesh in ((8, 1, 1), (2, 1, 4)))
    np.testing.assert_allclose(eight.logits(IDS), one.logits(IDS), rtol=1e-4, atol=1e-4)
    assert eight.generate("the", 6, temperature=0) == one.generate("the", 6, temperature=0)
