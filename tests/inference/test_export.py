"""Exported models: each family, dtype and mesh to the bit, tokenizers with equal ids, and correct model cards."""

import dataclasses
import io
import json
import pathlib
import random
import sys

import jax
import numpy as np
import pytest
import sentencepiece
from flax.traverse_util import flatten_dict
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from small import check_permissions, small_config, text_tasks, write_corpus
from tokenizers import Tokenizer

import flash_lm
from flash_lm import export
from flash_lm.cli.run import run
from flash_lm.config.experiment import parse
from flash_lm.data.hf_tokenizer import to_hugging_face
from flash_lm.data.tokenizer import ByteTokenizer, CharacterTokenizer
from flash_lm.data.tokenizers import SentencePieceTokenizer, save_tokenizer, train_sentencepiece
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete_config
from flash_lm.inference.api import LoadedModel
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.export import export as write
from flash_lm.inference.model import TrainedModel, load_model
from flash_lm.runs.jsonl import append_jsonl
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import run_name
from flash_lm.training.export_folder import flatten_arrays, write_weights
from flash_lm.training.sharding import make_mesh
from flash_lm.training.train_state import ModelFunction

pytestmark = pytest.mark.usefixtures("usual_promotion")
CODE = {"git": "c0ffee123456", "versions": "python 3, jax 0"}


def trained_model(folder: pathlib.Path, family: str, task: str = "causal_lm", param_dtype: str = "float32", **keys):
    """A model of a run without a checkpoint: the parameters are drawn; `keys`: of config.model."""
    raw = small_config("corpus", folder / "cache", family)
    raw.task = task
    raw.model.update(param_dtype=param_dtype, dropout=0.0, vocab_size=ByteTokenizer.vocab_size, **keys)
    raw.mesh.shape = (1, 1, 1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw.to_dict()))
    save_tokenizer(ByteTokenizer(), folder / "tokenizer")
    config = complete_config(parse(raw))
    model, mesh = ModelFunction(config.model, seed=1), make_mesh(config.mesh, jax.devices()[:1])
    random = np.random.default_rng(0)
    drawn = lambda x: jax.numpy.asarray(random.standard_normal(x.shape), x.dtype)
    params = jax.tree.map(drawn, jax.eval_shape(model.init))
    facts = {"corpus": "ab" * 32, "tokenizer": "bytes", "train_seconds": 1.0, "code": CODE}
    held, name = DecodeParams(model, params), run_name(folder)
    return LoadedModel(7, config, ByteTokenizer(), held, mesh, facts, name, RunFolder(folder))


def assert_same_bits(trained: TrainedModel, params, constants) -> None:
    for a, b in ((trained.params, params), (trained.model.constants, constants)):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.representatives("flash", "performer")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip(family, tmp_path):
    """Also onto a mesh of eight devices, and in the dtype of the parameters."""
    for dtype in ("float32", "bfloat16"):
        trained = trained_model(tmp_path / dtype, family, text_tasks(family)[0], param_dtype=dtype)
        out = tmp_path / f"out_{dtype}"
        assert write(trained, out, "mit") == []
        for mesh in ((-1, 1, 1), (2, 2, 2)):
            loaded = flash_lm.load(out, mesh=mesh)
            assert_same_bits(trained, loaded.params, loaded.constants)
        on_disk = load_file(out / "model.safetensors")
        assert on_disk.keys() == flatten_arrays(trained.params, trained.model.constants).keys()
        assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("x", [np.arange(6.0).reshape(2, 3).T, np.arange(24.0).reshape(2, 3, 4)[:, ::2], np.float32(3)])
def test_arrays_that_are_not_contiguous_are_written_correctly(x, tmp_path):
    """Of such arrays, safetensors writes the bytes in memory."""
    write_weights(tmp_path, {"x": np.asarray(x)})
    actual = load_file(tmp_path / "model.safetensors")["x"]
    assert actual.shape == np.shape(x) and np.array_equal(actual, x)


@pytest.fixture(scope="module")
def exported_model(tmp_path_factory):
    """A model, and the folder of its export."""
    folder = tmp_path_factory.mktemp("exports")
    trained = trained_model(folder / "mine", "flash")
    score = {"run": "mine", "step": 7, "split": "test", "length": 32, "corpus": "text", "perplexity": 12.5}
    other = score | {"step": 6, "perplexity": 99.0}
    append_jsonl(folder / "mine" / "results.jsonl", [other, score, score | {"own_corpus": False, "perplexity": 77.0}])
    write(trained, folder / "out", "cc-by-4.0")
    return trained, folder / "out"


def test_an_export_respects_the_umask(exported_model, tmp_path):
    trained, _ = exported_model
    with check_permissions(tmp_path / "out"):
        write(trained, tmp_path / "out", "mit")


@pytest.mark.slow("loads an export in another process")
def test_three_lines(exported_model):
    trained, out = exported_model
    model, original = flash_lm.load(out), trained
    assert "flash" in repr(model) and model.config.model == trained.config.model
    assert model.generate("the", 9, temperature=0) == original.generate("the", 9, temperature=0)
    assert model.generate(["the", "a"], 5, seed=3) == original.generate(["the", "a"], 5, seed=3)
    score = model.score("a cat")
    assert score == original.score("a cat") and score.tokens == model.tokenizer.encode(["a cat"])[0].tolist()
    row = np.array([model.tokenizer.begin, *score.tokens])
    logits = model.logits(row)
    assert logits.shape == (6, model.config.model.vocab_size) and model.logits([row, row]).shape == (2, *logits.shape)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    expected = exact[np.arange(5), row[1:]]
    np.testing.assert_allclose(score.log_probs, expected, atol=1e-4)
    assert score.bits_per_byte == pytest.approx(-expected.sum() / np.log(2) / 5, rel=1e-4)
    assert score.perplexity == pytest.approx(np.exp(-expected.mean()), rel=1e-4)
    assert flash_lm.load(out, dtype="bfloat16").params["embedding"].dtype == "bfloat16"


@pytest.mark.parametrize("family", ["transformer_plus_plus", "linformer"])
def test_a_masked_model(family, tmp_path):
    trained, out = trained_model(tmp_path / "run", family, "masked_lm"), tmp_path / "out"
    write(trained, out, "mit")
    model = flash_lm.load(out)
    (candidates,) = model.fill_in("the [MASK]at", 2).masks
    assert len(candidates) == 2
    for ask in (lambda: model.generate("a"), lambda: model.score("a")):
        with pytest.raises(InputError, match="cannot continue a text"):
            ask()
    assert ModelCard.load(out / "README.md").data.pipeline_tag == "fill-mask"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda model: model.logits([]), "give integers"),
        (lambda model: model.logits([0.5]), "give integers"),
        (lambda model: model.logits([[1, 2], [1]]), "rows of ids have different lengths"),
        (lambda model: model.logits([[[1]]]), "L or B×L"),
        (lambda model: model.logits([1, 260]), "the vocabulary has 260"),
        (lambda model: model.generate("a", heat=1), "unknown setting heat: sampling has temperature"),
        (lambda model: model.generate([]), "there is no prompt"),
        (lambda model: model.score(""), "the text is empty"),
        (lambda model: model.fill_in("a [MASK]"), "has no \\[MASK\\]"),
    ],
)
def test_calls_that_a_model_does_not_support(exported_model, ask, message):
    with pytest.raises(InputError, match=message):
        ask(flash_lm.load(exported_model[1]))


def test_the_card_and_the_config_record_the_provenance(exported_model):
    trained, out = exported_model
    card, config = ModelCard.load(out / "README.md"), json.loads((out / "config.json").read_text())
    assert card.data.license == "cc-by-4.0" and card.data.pipeline_tag == "text-generation"
    (result,) = card.data.eval_results
    assert (result.metric_value, result.dataset_type) == (12.5, "text")
    for word in ("flash_lm.load", CODE["git"], "abababababab", "| test | 32 | perplexity per token 12.5 |"):
        assert word in card.text
    assert config["model_type"] == "flash_lm" and config["flash_lm"]["step"] == 7
    assert (
        config["flash_lm"]["facts"] == trained.facts and {"git", "versions"} <= config["flash_lm"]["exported_by"].keys()
    )
    assert config["vocab_size"] == 260 and config["hidden_size"] == 16


def test_a_card_shows_only_what_the_model_supports(tmp_path):
    """The copy task generates no text; scores are those of the parameters as trained."""
    trained = trained_model(tmp_path / "run", "transformer")
    data = dataclasses.replace(trained.config.data, corpus="copy", pack="examples")
    trained = dataclasses.replace(trained, config=dataclasses.replace(trained.config, data=data))
    score = {"run": "run", "step": 7, "split": "test", "length": 32, "corpus": "copy", "accuracy": 0.5}
    append_jsonl(tmp_path / "run" / "results.jsonl", [score])
    model = dataclasses.replace(trained.config.model, param_dtype="bfloat16")
    rounded = dataclasses.replace(trained, config=dataclasses.replace(trained.config, model=model))
    write(rounded, tmp_path / "mine", "mit")
    card = ModelCard.load(tmp_path / "mine" / "README.md")
    assert "generate" not in card.text and card.data.pipeline_tag is None and card.data.model_name == "mine"
    assert 'load("path/to/mine")' in card.text and "before they were rounded" in card.text


def test_an_export_that_is_refused_writes_nothing(exported_model, tmp_path, monkeypatch, capsys):
    trained, out = exported_model
    with pytest.raises(InputError, match="exists: give a new folder"):
        write(trained, out, "mit")
    with pytest.raises(InputError, match="is already an exported model"):
        write(load_model(out), tmp_path / "again", "mit")
    with pytest.raises(InputError, match="--license is empty"):
        write(trained, tmp_path / "x", " ")
    with pytest.raises(InputError, match="has one state: leave @best out"):
        flash_lm.load(f"{out}@best")
    monkeypatch.setattr(sys, "argv", ["export", f"--workdir={trained.run}", f"--out={tmp_path / 'x'}"])
    with pytest.raises(SystemExit, match="2"):
        run(export.main)
    assert "--license" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["weights", "config", "array", "facts"])
def test_a_damaged_export_is_reported_as_such(tmp_path, damage):
    trained, out = trained_model(tmp_path / "run", "transformer"), tmp_path / "out"
    write(trained, out, "mit")
    if damage == "weights":
        (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-9])
    elif damage == "config":
        (out / "config.json").write_text("{")
    elif damage == "facts":
        about = json.loads((out / "config.json").read_text())
        del about["flash_lm"]["facts"]
        (out / "config.json").write_text(json.dumps(about))
    else:
        arrays = load_file(out / "model.safetensors")
        write_weights(out, arrays | {"embedding": arrays["embedding"][:, :8]})
    with pytest.raises(InputError, match="out.* is damaged"):
        flash_lm.load(out)


@pytest.fixture(scope="module")
def tokenizer_pairs(tmp_path_factory):
    """Our tokenizers, and the exported ones read from their files."""
    folder = tmp_path_factory.mktemp("tokenizers")
    texts = sorted(pathlib.Path(write_corpus(folder / "t")).parent.glob("*"))
    lines = [line for path in texts for line in path.read_text().splitlines(keepends=True)]
    without_blanks = ["".join(random.Random(i).choices("ACGT", k=60)) for i in range(50)]
    ours = (
        ByteTokenizer(),
        CharacterTokenizer("春夏秋冬abc"),
        train_sentencepiece(lines, 320),
        train_sentencepiece(without_blanks, 320),
    )
    pairs = []
    for tokenizer in ours:
        theirs = to_hugging_face(tokenizer)
        theirs.save(str(folder / "tokenizer.json"))
        theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
        theirs.encode_special_tokens = True  # ours reads [MASK] in a text as text
        pairs.append((tokenizer, theirs))
    return pairs


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs"])) | st.text("the cat\n ▁猫naï[MASK]<s>ACGT"))
def test_ids_are_equal_in_the_tokenizers_format(tokenizer_pairs, text):
    for ours, theirs in tokenizer_pairs:
        (ids,) = ours.encode([text])
        assert theirs.encode(text, add_special_tokens=False).ids == ids.tolist(), ours.kind
        assert theirs.decode(ids.tolist()) == ours.decode(ids.tolist())
        assert ours.kind == "characters" or theirs.decode(ids.tolist()) == text


def foreign_tokenizer(**settings) -> SentencePieceTokenizer:
    """A SentencePiece model that was trained elsewhere."""
    model, lines = io.BytesIO(), ["the cat sees a dog", "a quick naïve tree (x)", "cats see trees, dogs hear"] * 9
    ours = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "add_dummy_prefix": False,
    }
    ours |= {"remove_extra_whitespaces": False, "vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **ours | settings)
    return SentencePieceTokenizer(model.getvalue())


@pytest.mark.parametrize("settings", [{}, {"bos_piece": "[BOS]"}, {"user_defined_symbols": ["\n", "cat"]}], ids=str)
def test_an_exported_foreign_tokenizer_is_equal(settings):
    """It has a mask after its last token, like ours."""
    ours = foreign_tokenizer(**settings)
    theirs = to_hugging_face(ours)
    assert theirs.encode("a cat").ids == [ours.begin, *ours.encode(["a cat"])[0]]
    assert theirs.token_to_id("[MASK]") == ours.mask == ours.vocab_size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "unigram"}, "not byte-pair encoding"),
        ({"normalization_rule_name": "nfkc"}, "without normalisation"),
        ({"byte_fallback": False}, "not byte-pair encoding"),
        ({"add_dummy_prefix": True}, "adds or removes spaces"),
        ({"user_defined_symbols": ["cat s"]}, "user-defined pieces with spaces"),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_be_equal_is_left_out_with_a_message(settings, message):
    assert message in to_hugging_face(foreign_tokenizer(**settings))


def test_begin_of_text_is_prepended_if_wanted(tokenizer_pairs):
    for ours, theirs in tokenizer_pairs:
        assert theirs.encode("a").ids[0] == ours.begin and theirs.get_vocab_size() == ours.vocab_size


def test_names_of_arrays_are_paths(exported_model):
    trained, _ = exported_model
    names = flatten_dict(trained.params, sep=".")
    assert "embedding" in names and any(name.startswith("layers.sublayer_0.") for name in names)
    assert dataclasses.asdict(trained.config.model)["family"] == "flash"
