"""The command that converts a model to another family: the folder, its config, its origin, and what is refused."""

import json
import pathlib

import numpy as np
import pytest
from chats import CHATML, chat_tokenizer

import flash_lm
from flash_lm import convert
from flash_lm.config.experiment import default_config, parse
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.inference.convert import fill_from_source
from flash_lm.inference.export import export
from flash_lm.inference.model import load_model
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training.checkpoint_read import identity
from flash_lm.training.export_folder import flatten_arrays, read_origin, write_export
from flash_lm.training.train_state import ModelFunction

pytestmark = pytest.mark.usefixtures("usual_promotion")
LLAMA = {
    "family": "transformer_plus_plus",
    "num_layers": 2,
    "model_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 24,
    "max_length": 64,
    "norm": "rms",
    "vocab_size": 260,
}


def llama_config():
    raw = default_config()
    raw.model.update(LLAMA)
    raw.data.tokenizer = "hf"
    return raw


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> pathlib.Path:
    raw, tokenizer, out = llama_config(), chat_tokenizer(), tmp_path_factory.mktemp("models") / "llama"
    params = ModelFunction(complete(parse(raw).model), seed=3).init()
    facts = {"corpus": None, "tokenizer": tokenizer.fingerprint, "train_seconds": 0.0}
    origin = {"run": "downloads/llama", "step": 0, "facts": facts}
    write_export(out, flatten_arrays(params, {}), raw.to_dict(), origin, tokenizer)
    return out


def run(llama: pathlib.Path, out: pathlib.Path, *overrides: str) -> None:
    convert.main([f"--model={llama}", f"--out={out}", *(f"--config.{word}" for word in overrides)])


def test_a_converted_model_is_read_like_any_other(llama, tmp_path, capsys):
    """One chunk a text: the same model, with the same tokenizer, and the record of its parent."""
    out = tmp_path / "mixed"
    run(llama, out, "model.family=mc_tfm", "model.chunks.size=64", "model.chunks.zero_global=true")
    first, new = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{out}: mc_tfm from {llama}, ") and first.endswith(
        "; 9 taken, 2 widened, 0 restacked, 4 new, 0 left out"
    )
    assert new.startswith("new: layers/sublayer_0/key_variants/offset, ") and " in layers" not in new
    before, after = flash_lm.load(llama), flash_lm.load(out)
    ids = np.random.default_rng(0).integers(5, 260, size=40)
    expected = before.logits(ids)
    np.testing.assert_allclose(after.logits(ids), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint and after.tokenizer.chat_template == CHATML
    assert after.can_chat and (before.config.model.norm, before.config.data) == ("rms", after.config.data)
    # The origin, and an export in a dtype.
    origin = read_origin(out)
    assert (origin["run"], origin["step"]) == (str(llama), 0)
    assert origin["facts"]["parent"] == identity(before.run, RunFolder(llama), 0, before.params, before.facts)
    assert origin["facts"]["parent"]["run"] == "downloads/llama"
    export(load_model(out, dtype="bfloat16"), tmp_path / "half", "mit")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["flash_lm"]["facts"] == origin["facts"]


def test_layers_are_named_where_only_these_have_new_parameters(llama, tmp_path, capsys):
    run(llama, tmp_path / "hybrid", "model.pattern=transformer_plus_plus,gla", "model.gla.key_dim=16")
    counts, new = capsys.readouterr().out.splitlines()
    assert "transformer_plus_plus/gla from" in counts and new.startswith(
        "new in layers 1: layers/sublayer_2/decay_bias, "
    )
    assert load_model(tmp_path / "hybrid").config.model.num_kv_heads == 2


def filled(**keys):
    """The model's part of the config of a conversion, as recorded and as completed."""
    raw = llama_config()
    source = complete(parse(raw).model)
    raw.model.update_from_flattened_dict(keys)
    filled = fill_from_source(raw, source, {f"model.{key}" for key in keys})
    return filled.model, complete(parse(filled).model)


@pytest.mark.parametrize("family", ["longformer", "linear_transformer", "retnet"])
def test_what_both_families_read_stays(family):
    """The defaults of these families are an MLP, layer norms, other widths, and learned positions in one."""
    raw, config = filled(family=family)
    assert (config.feed_forward, config.mlp_dim, config.norm) == ("glu", 24, "rms")
    assert (config.absolute_positions, config.rotary, config.short_convolution) == ("none", True, 0)
    # What would be the same anyway stays open, and so does what only the source reads.
    assert raw.state_dtype is raw.residual_init is raw.num_kv_heads is None


def test_keys_that_are_given_are_kept():
    _, config = filled(family="longformer", feed_forward="mlp", mlp_dim=None, absolute_positions="learned")
    assert (config.feed_forward, config.mlp_dim, config.absolute_positions) == ("mlp", 64, "learned")


def test_defaults_of_a_family_alone_stay():
    _, config = filled(family="gated_deltanet")
    assert (config.short_convolution, config.mlp_dim, config.feed_forward) == (0, 24, "glu")
    assert config.get("delta.key_dim") == 12 and config.rotary is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.family=gla"], "key/kernel of a layer is .16, 8. of 2 heads in the source, and .16, 8. of 4 h"),
        (
            ["model.family=flash"],
            "^layers/sublayer_0/output/kernel of a layer is .16, 16. in the source, and .32, 16. in",
        ),
        (["model.family=mc_tfm", "model.norm=layer"], "^model.norm=rms in the source, and layer in the target"),
        (["model.family=mamba2", "model.feed_forward=glu"], "^model.feed_forward=glu has no meaning in mamba2"),
        (["model.family=mc"], "model.family=mc must be one of"),
        (["model.famly=mc_tfm"], "unknown key model.famly: did you mean model.family"),
    ],
)
def test_what_is_refused_writes_nothing(llama, tmp_path, words, message):
    with pytest.raises(InputError, match=message):
        run(llama, tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_kept(llama):
    with pytest.raises(InputError, match=f"^--out={llama} already exists: give a new folder"):
        run(llama, llama, "model.family=mc_tfm")
