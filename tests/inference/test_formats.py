"""Formats of other libraries: models of their classes, with the logits of those, are imported and written back."""

import dataclasses
import itertools
import json
import math
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import flash_lm
from benchmarks.lib.gguf import write_gguf
from benchmarks.peers.golden_formats import EVERY, GOLDEN, LENGTH, VOCAB
from flash_lm.config.experiment import default_config, parse
from flash_lm.config.registry import FAMILIES, FORMATS
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.inference.export import export
from flash_lm.inference.import_hf import import_with_message
from flash_lm.inference.model import load_model
from flash_lm.inference.sources.gguf import unpermute
from flash_lm.models.formats.format import find_format
from flash_lm.models.formats.settings import to_keys
from flash_lm.training.train_state import ModelFunction
from inference.test_export import trained_model

pytestmark = pytest.mark.usefixtures("usual_promotion")
NAMES = sorted(path.name for path in GOLDEN.iterdir())
FILES = {"rwkv4_pth": "model.pth"}  # what to import, if it is not the folder
IDS = np.random.default_rng(0).integers(1, VOCAB, size=(1, LENGTH))

# Keys that say how something is computed; and of formats, those that other keys or `problems` make void.
HOW = {"kernels", "quadratic.implementation", "quadratic.block_size"}
HOW |= {f"{section}.chunk_size" for section in ("ssd", "linear", "delta")}
VOID = {"gpt2": {"head_dim", "rotary_base", "convolution.activation"}}
VOID |= {name: {"convolution.activation"} for name in ("llama", "qwen2", "qwen3")}


def write_tokenizer(folder: pathlib.Path) -> None:
    """A tokenizer of bytes of which only some are in the vocabulary; token 0 ends texts."""
    words = ["<|endoftext|>", *map(chr, range(ord("A"), ord("A") + VOCAB - 1))]
    content = {
        "added_tokens": [{"id": 0, "content": words[0], "special": True}],
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"][0] |= flags
    content["decoder"] |= {"add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.fixture
def theirs(request, tmp_path):
    """A copy of a golden model, with a tokenizer, to be imported or changed."""
    folder = pathlib.Path(shutil.copytree(GOLDEN / request.param, tmp_path / "theirs"))
    write_tokenizer(folder)
    return folder


def check_logits(folder: pathlib.Path, golden: str) -> None:
    expected = np.load(GOLDEN / golden / "logits.npy")
    difference = flash_lm.load(folder).logits(IDS)[0, ::EVERY] - expected
    assert np.abs(difference).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("theirs", NAMES, indirect=True)
def test_a_model_is_imported_and_written_back(theirs, request, tmp_path):
    name = request.node.callspec.params["theirs"]
    imported = import_with_message(theirs / FILES.get(name, ""), tmp_path / "ours")
    assert imported.message.startswith(f"read {name.removesuffix('_pth')} from ")
    check_logits(imported.folder, name)
    # Back again, bit for bit, and with settings that make the same model.
    row, trained = FORMATS[name.removesuffix("_pth")], load_model(imported.folder)
    if row.one_way:
        with pytest.raises(InputError, match="folds the first norm|written as mamba2"):
            export(trained, tmp_path / "back", "mit", name.removesuffix("_pth"))
        return
    export(trained, tmp_path / "back", "mit", name)
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert before.keys() - {"lm_head.weight"} == after.keys() - {"lm_head.weight"}
    assert all(before[key].tobytes() == after[key].tobytes() for key in after)
    again = load_model(flash_lm.import_hf(tmp_path / "back", tmp_path / "again")).config.model
    assert dataclasses.replace(again, dtype="float32") == dataclasses.replace(trained.config.model, dtype="float32")
    card = (tmp_path / "back" / "README.md").read_text()
    assert f"library_name: {row.library}" in card and (tmp_path / "back" / "tokenizer.json").exists()


@pytest.mark.parametrize("theirs", ["gated_deltanet"], indirect=True)
def test_a_model_without_its_output_gate(theirs, tmp_path):
    """Read and written with the setting of that name, and without the arrays."""
    settings, arrays = json.loads((theirs / "config.json").read_text()), load_file(theirs / "model.safetensors")
    arrays = {name: x for name, x in arrays.items() if ".g_proj." not in name}
    save_file(arrays, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(settings | {"use_gate": False}))
    trained = load_model(flash_lm.import_hf(theirs, tmp_path / "ours"))
    assert trained.config.model.output_gate == "none" and trained.config.model.head_norm
    export(trained, tmp_path / "back", "mit", "gated_deltanet")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["use_gate"] is False
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: x.tobytes() for name, x in after.items()} == {name: x.tobytes() for name, x in arrays.items()}


@pytest.mark.parametrize("theirs", ["llama", "qwen2", "qwen3"], indirect=True)
def test_a_gguf_file_is_the_same_model(theirs, request, tmp_path):
    """Queries and keys of a Llama are permuted there, keys with their own number of heads."""
    name = request.node.callspec.params["theirs"]
    write_gguf(theirs, tmp_path / "model.gguf")
    message = import_with_message(tmp_path / "model.gguf", tmp_path / "ours").message
    assert message.startswith(f"read {name} from GGUF (F32)")
    check_logits(tmp_path / "ours", name)


_QWEN = {
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "num_key_value_heads": 2,
}
_GPT_NEOX = {"vocab_size": 50_288, "tie_word_embeddings": True, "n_groups": 1}
# Models with published weights: settings, and the number of parameters by a formula from their sizes.
PUBLISHED = {
    "SmolLM2-135M": (
        {
            "model_type": "llama",
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        134_515_008,
        lambda v=49_152, d=576, f=1536, n=30: v * d + d + n * (2 * d + 2 * d * d + 2 * d * 3 * 64 + 3 * d * f),
    ),
    "Qwen2.5-0.5B": (
        _QWEN
        | {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
        },
        494_032_768,
        lambda v=151_936, d=896, f=4864, n=24: (
            v * d + d + n * (2 * d + 2 * d * d + 2 * d * 2 * 64 + d + 2 * 2 * 64 + 3 * d * f)
        ),
    ),
    "Qwen3-0.6B": (
        _QWEN
        | {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
        596_049_920,
        lambda v=151_936, d=1024, f=3072, n=28: (
            v * d + d + n * (2 * d + 2 * d * 16 * 128 + 2 * d * 8 * 128 + 2 * 128 + 3 * d * f)
        ),
    ),
    "gpt2": (
        {"model_type": "gpt2", "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12},
        124_439_808,
        lambda v=50_257, t=1024, d=768, n=12: v * d + t * d + 2 * d + n * (12 * d * d + 13 * d),
    ),
    "mamba2-130m": (
        _GPT_NEOX | {"model_type": "mamba2", "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24},
        128_989_632,
        lambda v=50_288, d=768, e=1536, s=128, h=24, n=24: (
            v * d + d + n * (d + d * (2 * e + 2 * s + h) + 5 * (e + 2 * s) + 3 * h + e + e * d)
        ),
    ),
    "mamba2-130m of its authors": (
        {"d_model": 768, "n_layer": 24, "vocab_size": 50_277, "ssm_cfg": {"layer": "Mamba2"}, "rms_norm": True}
        | {"pad_vocab_size_multiple": 16},
        128_989_632,
        lambda v=-(-50_277 // 16) * 16, d=768, e=1536, s=128, h=24, n=24: (
            v * d + d + n * (d + d * (2 * e + 2 * s + h) + 5 * (e + 2 * s) + 3 * h + e + e * d)
        ),
    ),
    # Without the norm that an import folds into the embedding.
    "rwkv-4-169m": (
        {"model_type": "rwkv", "vocab_size": 50_277, "hidden_size": 768, "num_hidden_layers": 12},
        169_342_464 - 2 * 768,
        lambda v=50_277, d=768, n=12: 2 * v * d + 2 * d + n * (13 * d * d + 11 * d),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    settings, published, formula = PUBLISHED[name]
    raw = default_config()
    raw.data.length = 128
    raw.model.update_from_flattened_dict(to_keys(FORMATS[find_format(settings)], settings))
    count = ModelFunction(complete(parse(raw).model), seed=0).parameter_count()
    assert count == published == formula()


def test_rows_of_queries_are_put_back_from_gguf():
    """Rows by hand: llama.cpp has those that rotate together side by side, ours are half a head apart."""
    assert unpermute(np.array([0, 2, 1, 3, 4, 6, 5, 7]), 2).tolist() == list(range(8))
    assert unpermute(np.array([0, 4, 1, 5, 2, 6, 3, 7]), 1).tolist() == list(range(8))
    rows = np.arange(8)
    assert unpermute(rows, 1).tolist() != unpermute(rows, 2).tolist()  # keys have their own number of heads


@pytest.mark.parametrize("theirs", ["llama"], indirect=True)
def test_gguf_files_of_other_writers(theirs, tmp_path):
    """Old files without the width of a head, and half precision; settings that would change the model are refused."""
    path = tmp_path / "model.gguf"
    write_gguf(theirs, path, {"attention.key_length": None, "rope.dimension_count": 4}, "float16")
    imported = import_with_message(path, tmp_path / "half")
    assert "GGUF (F16" in imported.message
    expected = np.load(GOLDEN / "llama" / "logits.npy")
    logits = flash_lm.load(imported.folder).logits(IDS)[0, ::EVERY]
    assert 0 < np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()
    for name, value in (
        ("rope.scaling.factor", 4.0),
        ("rope.scale_linear", 4.0),
        ("attention.causal", False),
        ("attention.sliding_window", 8),
        ("rope.dimension_count", 2),
        ("logit_scale", 2.0),
        ("head_count_of_another_writer", 3),
    ):
        write_gguf(theirs, path, {name: value})
        with pytest.raises(InputError, match=f"has llama.{name}={value}, which flash_lm does not support"):
            flash_lm.import_hf(path, tmp_path / "out")


@pytest.mark.parametrize("name", sorted({*FORMATS} - {"my_llama"}))
def test_every_key_of_a_family_is_part_of_its_format(name):
    """A key that a family reads, and that changes the model, must not be lost in a file."""
    row = FORMATS[name]
    if row.one_way:
        return
    known = {*row.ours, *row.keys}
    settings = json.loads((GOLDEN / name / "config.json").read_text())
    known |= to_keys(row, settings).keys()
    lost = {key.removeprefix("model.") for key in FAMILIES[row.ours["family"]].reads()} - known
    assert lost <= HOW | VOID.get(name, set())


@pytest.mark.parametrize(
    ("theirs", "change", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types=.'sliding_attention'"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"n_inner": 3}, "mlp.c_fc.weight is \\[16, 64\\], not \\[16, 3\\]"),
        ("mamba2", {"n_groups": 2, "use_bias": True}, "n_groups=2, use_bias=True"),
        ("mamba2", {"num_hidden_layers": 3}, "num_hidden_layers=3 .it must be even"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit=\\[0.0, 0.1\\]"),
        ("mamba_ssm", {"ssm_cfg": {"layer": "Mamba2", "ngroups": 8}}, "ssm_cfg.ngroups=8"),
        ("mamba_ssm", {"attn_layer_idx": [3]}, "attn_layer_idx=\\[3\\]"),
        ("mamba_ssm", {"ssm_cfg": {"layer": "Mamba1"}}, "no format of flash_lm recognises"),
        ("rwkv4", {"attention_hidden_size": 8}, "attention_hidden_size=8"),
        ("gla", {"expand_v": 2.0, "num_kv_heads": 1}, "expand_v=2.0, num_kv_heads=1"),
        ("gla", {"use_short_conv": False}, "also model.layers.0.attn.k_conv1d.weight"),
        ("gla", {"use_output_gate": False}, "use_output_gate=False"),
        ("gated_deltanet", {"use_gate": False}, "also model.layers.0.attn.g_proj.weight"),
        ("gated_deltanet", {"use_short_conv": False, "num_v_heads": 4}, "use_short_conv=False, num_v_heads=4"),
    ],
    indirect=["theirs"],
)
def test_what_a_format_cannot_hold_is_refused(theirs, change, message, tmp_path):
    settings = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(InputError, match=message):
        flash_lm.import_hf(theirs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(name for name in NAMES if name not in FILES))
def test_damaged_settings_are_one_error(name):
    """Each setting missing, or of another type or sign: keys that make a model, or an InputError."""
    settings = json.loads((GOLDEN / name / "config.json").read_text())
    for key, value in itertools.product(settings, (None, "x", -1, 0, 0.5, [], {}, True, 10**40, math.nan, math.inf)):
        changed = {**settings, key: value}
        if value is None:
            del changed[key]
        try:
            default_config().model.update_from_flattened_dict(to_keys(FORMATS[find_format(changed)], changed))
        except InputError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("theirs", ["qwen2"], indirect=True)
def test_missing_and_unknown_arrays_are_listed(theirs, tmp_path):
    arrays = load_file(theirs / "model.safetensors")
    arrays["model.layers.0.self_attn.o_proj.bias"] = arrays.pop("model.layers.1.self_attn.q_proj.bias")
    save_file(arrays, theirs / "model.safetensors")
    expected = "no model.layers.1.self_attn.q_proj.bias, also model.layers.0.self_attn.o_proj.bias"
    with pytest.raises(InputError, match=expected):
        flash_lm.import_hf(theirs, tmp_path / "out")


@pytest.mark.parametrize(
    ("keys", "form", "message"),
    [
        ({"family": "transformer_plus_plus", "norm": "rms", "biases": "qkv"}, "llama", "biases=qkv, not none or all"),
        ({"family": "mamba2", "norm": "rms", "short_convolution": 0}, "mamba2", "short_convolution=0, not some taps"),
        ({"family": "gla", "norm": "rms", "gla": {"gate_floor": -0.1}}, "gla", "gate_floor=-0.1, not -5.0"),
        ({"family": "transformer"}, "gpt2", "model.biases=none, not all"),
        ({"family": "transformer", "biases": "all", "head_dim": 6}, "gpt2", "model.head_dim=6, not"),
        ({"family": "mamba2", "norm": "rms", "ssd": {"expanded_dim": 24}}, "mamba2", "expanded_dim=24, not a multiple"),
        ({"family": "flash"}, "llama", "model.family=flash, not transformer_plus_plus"),
        ({"family": "flash"}, "elsewhere", "--format=elsewhere must be one of flash_lm, stablehlo, "),
    ],
    ids=str,
)
def test_what_a_format_cannot_express_is_not_written(keys, form, message, tmp_path):
    trained = trained_model(tmp_path / "run", keys["family"], **{key: x for key, x in keys.items() if key != "family"})
    with pytest.raises(InputError, match=message):
        export(trained, tmp_path / "out", "mit", form)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("theirs", ["gpt2", "llama"], indirect=True)
def test_masks_of_old_files_are_left_out_and_a_head_that_is_not_tied_is_an_error(theirs, tmp_path):
    arrays = load_file(theirs / "model.safetensors")
    if "transformer.wte.weight" in arrays:
        masks = {f"transformer.h.{i}.attn.bias": np.ones((1, 1, 4, 4), bool) for i in range(2)}
        save_file(arrays | masks, theirs / "model.safetensors")
        check_logits(flash_lm.import_hf(theirs, tmp_path / "ours"), "gpt2")
        return
    head = arrays["model.embed_tokens.weight"]
    save_file(arrays | {"lm_head.weight": head}, theirs / "model.safetensors")
    check_logits(flash_lm.import_hf(theirs, tmp_path / "ours"), "llama")
    save_file(arrays | {"lm_head.weight": 3 * head}, theirs / "model.safetensors")
    with pytest.raises(InputError, match="lm_head.weight is model.embed_tokens.weight, and the two differ"):
        flash_lm.import_hf(theirs, tmp_path / "out")


@pytest.mark.parametrize("theirs", ["mamba_ssm"], indirect=True)
def test_parts_of_models_are_named(theirs, tmp_path):
    """Several pickles, or several GGUF files, of one model."""
    (theirs / "pytorch_model.bin").rename(theirs / "pytorch_model-00001-of-00002.bin")
    (theirs / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(InputError, match="has several pytorch_model.bin files: convert them to safetensors"):
        flash_lm.import_hf(theirs, tmp_path / "out")
    (folder := tmp_path / "gguf").mkdir()
    for name in ("a.gguf", "b.GGUF"):
        write_gguf(GOLDEN / "llama", folder / name)
    with pytest.raises(InputError, match="has 2 models, such as a.gguf: give one of these files"):
        flash_lm.import_hf(folder, tmp_path / "out")
