"""Compares random models of other libraries' classes with their import, and with what is exported for those libraries.

    make peers
    python -m benchmarks.peers.formats --out=benchmarks/peers/results

For each format it reports the largest difference of the logits, relative to the largest logit, of the import and of the
export; the largest difference of the gradients of one row, relative to the largest gradient of each array; and whether
both libraries continue a text with the same 64 tokens. Weights have the dtype of the file; computation is in float32.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from benchmarks.lib.gguf import write_gguf
from benchmarks.lib.peers import add_python, check_python
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.run import run
from flash_lm.config.registry import FORMATS
from flash_lm.data.hf_tokenizer import to_hugging_face
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.errors import RunError
from flash_lm.inference.api import LoadedModel, load
from flash_lm.inference.engine import Engine
from flash_lm.inference.export import export
from flash_lm.inference.import_hf import import_hf
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.models.formats.arrays import from_params
from flash_lm.runs.hosts import fetch_array
from flash_lm.runs.jsonl import Line, write_jsonl
from flash_lm.runs.provenance import provenance

WORKER = pathlib.Path(__file__).with_name("formats_worker.py")
ROWS, LENGTH, CONTINUED = 2, 160, 64
MOST_DIFFERENT, MOST_DIFFERENT_GRADIENT = 1e-5, 1e-4
_SPECIAL = {"bos_token_id": ByteTokenizer.begin, "eos_token_id": ByteTokenizer.end, "pad_token_id": 0}
_LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
_MAMBA = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 1, "num_hidden_layers": 4}
_FLA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_heads": 4, "norm_eps": 1e-6}
_GLA = {"model_type": "gla", "expand_k": 0.5, "use_short_conv": True}
_DELTA = {"model_type": "gated_deltanet", "head_dim": 16, "expand_v": 2}
_GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 8, "n_positions": 256}
_RWKV = {"hidden_size": 64, "num_hidden_layers": 4, "context_length": 256, "rescale_every": 0}


class Case(NamedTuple):
    """A model to compare.

    Attributes:
        kind: the name of its format, and of the class in the worker.
        settings: of its config.json.
        repack: function (python, folder of the model, folder to write) that writes another file of the same model, and
            returns what to import; None: the folder itself.
    """

    kind: str
    settings: dict[str, Any]
    repack: Callable[[pathlib.Path, pathlib.Path, pathlib.Path], pathlib.Path] | None = None


def _write_pickle(settings: dict[str, Any] | None, file: str, names: dict[str, str]) -> Any:
    """A writer of PyTorch's pickles with parts of names replaced; `settings`: of another config.json."""

    def repack(python: pathlib.Path, theirs: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
        call(python, "pickle", theirs / "model.safetensors", out / file, json.dumps(names))
        shutil.copy(theirs / "tokenizer.json", out)
        if settings is None:
            return out / file
        vocab = json.loads((theirs / "config.json").read_text())["vocab_size"]
        (out / "config.json").write_text(json.dumps(settings | {"vocab_size": vocab}))
        return out

    return repack


_AS_AUTHORS = {
    "d_model": _MAMBA["hidden_size"],
    "n_layer": _MAMBA["num_hidden_layers"],
    "ssm_cfg": {"layer": "Mamba2", "headdim": _MAMBA["head_dim"], "d_state": _MAMBA["state_size"]},
    "rms_norm": True,
    "tie_embeddings": False,
}
RWKV_NAMES = {
    "rwkv.embeddings.": "emb.",
    "rwkv.": "",
    ".pre_ln.": ".ln0.",
    ".attention.": ".att.",
    ".feed_forward.": ".ffn.",
    "time_mix_key": "time_mix_k",
    "time_mix_value": "time_mix_v",
    "time_mix_receptance": "time_mix_r",
}
MAMBA_NAMES = {"backbone.embeddings.": "backbone.embedding."}
CASES: dict[str, Case] = {
    "llama": Case("llama", _LLAMA | {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama, two share a head of keys": Case("llama", _LLAMA | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama, all share it, base 500,000": Case(
        "llama",
        _LLAMA | {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    ),
    "llama in bfloat16": Case("llama", _LLAMA | {"num_key_value_heads": 2, "dtype": "bfloat16"}),
    "llama with biases": Case("llama", _LLAMA | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama as GGUF": Case(
        "llama", _LLAMA | {"num_key_value_heads": 2}, lambda python, theirs, out: write_gguf(theirs, out / "model.gguf")
    ),
    "qwen2": Case("qwen2", _LLAMA | {"num_key_value_heads": 2}),
    "qwen3": Case("qwen3", _LLAMA | {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 as GGUF": Case(
        "qwen3",
        _LLAMA | {"num_key_value_heads": 2, "head_dim": 32},
        lambda python, theirs, out: write_gguf(theirs, out / "model.gguf"),
    ),
    "gpt2": Case("gpt2", _GPT2),
    "mamba2": Case("mamba2", _MAMBA),
    "mamba2 of its authors": Case("mamba2", _MAMBA, _write_pickle(_AS_AUTHORS, "pytorch_model.bin", MAMBA_NAMES)),
    "rwkv4": Case("rwkv4", _RWKV),
    "rwkv4 of its author": Case("rwkv4", _RWKV, _write_pickle(None, "model.pth", RWKV_NAMES)),
    "gla": Case("gla", _FLA | _GLA),
    "gated_deltanet": Case("gated_deltanet", _FLA | _DELTA),
}


def call(python: pathlib.Path, *words: Any) -> None:
    """Runs the worker; raises RunError with the last line that it said."""
    done = subprocess.run([python, WORKER, *map(str, words)], env=user_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{words[1]}: {(done.stderr.strip() or 'nothing was said').splitlines()[-1]}")


class Answer(NamedTuple):
    """What another library says of a model: logits, the greedy continuation of the first row, and gradients."""

    logits_BxLxV: np.ndarray
    continued: np.ndarray
    gradients: dict[str, np.ndarray]


def ask(python: pathlib.Path, kind: str, folder: pathlib.Path, settings: dict[str, Any] | None = None) -> Answer:
    """Asks the library of a format about the model in a folder; `settings`: draws the model first."""
    call(python, kind, folder, CONTINUED, *([json.dumps(settings)] if settings else []))
    logits, continued = (np.load(folder / f"{name}.npy") for name in ("logits", "continued"))
    return Answer(logits, continued, load_file(folder / "gradients.safetensors"))


def continue_greedily(model: LoadedModel, ids_L: np.ndarray) -> np.ndarray:
    """The greedy continuation of the ids, token by token with the decode state; end-of-text is never chosen."""
    not_the_first = np.arange(model.config.model.vocab_size) != 0
    engine = Engine(model.decode_params, model.mesh, end=0, allowed_V=not_the_first)
    greedy = SamplingArrays.from_sampling(Sampling(temperature=0))
    _, new = engine.advance(engine.prefill([ids_L.astype(np.int32)], CONTINUED), greedy, 0, CONTINUED)
    return new.tokens_BxT[0, :CONTINUED]


def gradient_difference(model: LoadedModel, kind: str, ids_L: np.ndarray, theirs: dict[str, np.ndarray]) -> float:
    """The largest difference of a gradient, relative to the largest of its array."""

    def loss(params: Any) -> jax.Array:
        logits_LxV = model.model.bind(params)(jnp.asarray(ids_L)[None])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits_LxV[:-1], ids_L[1:]).mean()

    # A gradient has the layout of its parameter. Where an import folds arrays, the folded ones cannot be compared.
    ours = from_params(FORMATS[kind], jax.tree.map(fetch_array, jax.jit(jax.grad(loss))(model.params)))
    folded = {name for name in theirs if "pre_ln" in name or (kind == "rwkv4" and "embeddings" in name)}
    both = [(ours[name], x) for name, x in theirs.items() if name not in folded]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in both)


def compare(python: pathlib.Path, name: str, folder: pathlib.Path) -> Line:
    """Imports and exports a model of one case; returns a line with the differences."""
    kind, settings, repack = CASES[name]
    settings = {"vocab_size": 320} | _SPECIAL | settings
    theirs, exported, packed = folder / "theirs", folder / "again", folder / "packed"
    for path in (theirs, packed):
        path.mkdir()
    ids_BxL = np.random.default_rng(0).integers(4, 260, size=(ROWS, LENGTH))
    np.save(theirs / "ids.npy", ids_BxL)
    expected = ask(python, kind, theirs, settings)
    tokenizer = to_hugging_face(ByteTokenizer())
    assert not isinstance(tokenizer, str)
    tokenizer.save(str(theirs / "tokenizer.json"))

    # Import their files, or others of the same model.
    model = load(import_hf(repack(python, theirs, packed) if repack else theirs, folder / "ours"), dtype="float32")
    scale = np.abs(expected.logits_BxLxV).max()
    line: Line = {
        "case": name,
        "format": kind,
        "settings": settings,
        "parameters": model.model.parameter_count(),
        "largest_logit": float(scale),
        "import_difference": float(np.abs(model.logits(ids_BxL) - expected.logits_BxLxV).max() / scale),
        "gradient_difference": gradient_difference(model, kind, ids_BxL[0], expected.gradients),
        "same_continuation": bool((continue_greedily(model, ids_BxL[0]) == expected.continued).all()),
    }
    if FORMATS[kind].one_way:
        return line
    # Export ours, and ask their library for the logits.
    export(load(folder / "ours"), exported, "other", kind)
    np.save(exported / "ids.npy", ids_BxL)
    back = ask(python, kind, exported)
    return line | {"export_difference": float(np.abs(back.logits_BxLxV - expected.logits_BxLxV).max() / scale)}


def main(argv: list[str]) -> None:
    """Writes formats.jsonl to OUT; fails when a difference is above its bound, or a continuation is another one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add_python(parser)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--only", choices=CASES, action="append", help="cases to compare; default: all")
    arguments = parser.parse_args(argv)
    check_python(arguments.python)
    about, lines = provenance(jax.devices()[0].device_kind), []
    for name in arguments.only or CASES:
        with tempfile.TemporaryDirectory() as folder:
            line = compare(arguments.python, name, pathlib.Path(folder))
        written = f", {line['export_difference']:.1e} written" if "export_difference" in line else ""
        print(
            f"{name}: {line['import_difference']:.1e} read{written}, gradients {line['gradient_difference']:.1e}, "
            f"same words: {line['same_continuation']}",
            flush=True,
        )
        lines.append(line | about)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.out / "formats.jsonl", lines)
    if wrong := [line["case"] for line in lines if not agrees(line)]:
        raise RunError(f"{', '.join(wrong)}: not the same model; see formats.jsonl")


def agrees(line: Line) -> bool:
    """Whether all differences of a line are within their bounds."""
    logits = max(line["import_difference"], line.get("export_difference", 0.0))
    return (
        logits <= MOST_DIFFERENT
        and line["gradient_difference"] <= MOST_DIFFERENT_GRADIENT
        and line["same_continuation"]
    )


if __name__ == "__main__":
    run(main)
