"""Compares random Llamas of transformers with their import by `flash_lm.import_hf` and their export for transformers.

    make peers
    python -m benchmarks.peers.llama --out=benchmarks/peers/results

For each shape it reports the largest difference of the logits, relative to the largest logit, in each direction, and
whether both libraries continue a text with the same sixteen tokens. Weights have the dtype of the file; computation is
in float32.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
from typing import Any

import jax
import numpy as np

from benchmarks.lib.peers import add_python, check_python
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.run import run
from flash_lm.data.hf_tokenizer import to_hugging_face
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.errors import RunError
from flash_lm.inference.api import load
from flash_lm.inference.engine import Engine
from flash_lm.inference.export import export
from flash_lm.inference.import_llama import import_hf
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.runs.jsonl import Line, write_jsonl
from flash_lm.runs.provenance import provenance

WORKER = pathlib.Path(__file__).with_name("llama_worker.py")
ROWS, LENGTH, CONTINUED = 2, 160, 16
MOST_DIFFERENT = 1e-4
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": ByteTokenizer.begin,
    "eos_token_id": ByteTokenizer.end,
}
SHAPES: dict[str, dict[str, Any]] = {
    "a head of keys each": {"num_key_value_heads": 8, "tie_word_embeddings": True, "dtype": "float32"},
    "two share one": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "dtype": "float32"},
    "all share one": {
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "dtype": "float32",
    },
    "weights in bfloat16": {"num_key_value_heads": 2, "dtype": "bfloat16"},
}


def ask(python: pathlib.Path, folder: pathlib.Path, settings: Line | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits and continuation of transformers for the model in a folder; `settings`: draws the model first."""
    words = [python, WORKER, folder, *([json.dumps(settings)] if settings else [])]
    done = subprocess.run(words, env=user_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{folder}: {done.stderr.strip().splitlines()[-1]}")
    return np.load(folder / "logits.npy"), np.load(folder / "continued.npy")


def continue_greedily(trained: TrainedModel, ids_L: np.ndarray) -> np.ndarray:
    """Returns the greedy continuation of the ids, token by token through the cache; end-of-text is never chosen."""
    not_the_first = np.arange(trained.config.model.vocab_size) != 0
    engine = Engine(trained.decode_params, trained.mesh, end=0, allowed_V=not_the_first)
    greedy = SamplingArrays.from_sampling(Sampling(temperature=0))
    _, new = engine.advance(engine.prefill([ids_L.astype(np.int32)], CONTINUED), greedy, 0, CONTINUED)
    return new.tokens_BxT[0]


def compare(python: pathlib.Path, name: str, folder: pathlib.Path) -> Line:
    """Imports and exports a model of one shape; returns a line with the differences."""
    settings = SMALL | SHAPES[name]
    theirs, exported = folder / "theirs", folder / "again"
    theirs.mkdir()
    ids_BxL = np.random.default_rng(0).integers(4, 260, size=(ROWS, LENGTH))
    np.save(theirs / "ids.npy", ids_BxL)
    # Their logits and their greedy continuation.
    expected, after = ask(python, theirs, settings)
    tokenizer = to_hugging_face(ByteTokenizer())
    assert not isinstance(tokenizer, str)
    tokenizer.save(str(theirs / "tokenizer.json"))
    # Import their folder, export ours, and ask them for the logits of our export.
    trained = load(import_hf(theirs, folder / "ours"), dtype="float32")
    export(load(folder / "ours"), exported, "other", "llama")
    np.save(exported / "ids.npy", ids_BxL)
    back, _ = ask(python, exported)
    scale = np.abs(expected).max()
    return {
        "shape": name,
        "settings": settings,
        "parameters": trained.model.parameter_count(),
        "largest_logit": float(scale),
        "import_difference": float(np.abs(trained.logits(ids_BxL) - expected).max() / scale),
        "export_difference": float(np.abs(back - expected).max() / scale),
        "same_continuation": bool((continue_greedily(trained, ids_BxL[0]) == after).all()),
    }


def main(argv: list[str]) -> None:
    """Writes llama.jsonl to OUT; fails when a difference is above 1e-4."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add_python(parser)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments = parser.parse_args(argv)
    check_python(arguments.python)
    about, lines = provenance(jax.devices()[0].device_kind), []
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            line = compare(arguments.python, name, pathlib.Path(folder))
        differences = [line[key] for key in ("import_difference", "export_difference")]
        print(
            f"{name}: {differences[0]:.1e} read, {differences[1]:.1e} written, same words: {line['same_continuation']}"
        )
        lines.append(line | about)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.out / "llama.jsonl", lines)
    if wrong := [x["shape"] for x in lines if max(x["import_difference"], x["export_difference"]) > MOST_DIFFERENT]:
        raise RunError(f"{', '.join(wrong)}: logits differ by more than {MOST_DIFFERENT}")


if __name__ == "__main__":
    run(main)
