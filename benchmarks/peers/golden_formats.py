"""Writes tests/golden/formats: small random models of other libraries' classes, with their logits.

    make peers
    python -m benchmarks.peers.golden_formats

The tests read them, and need neither torch nor transformers. logits.npy has the logits of every eighth of 160 tokens,
which tests/inference/test_formats.py draws in the same way.
"""

import argparse
import json
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np

from benchmarks.lib.peers import add_python, check_python
from benchmarks.peers.formats import MAMBA_NAMES, RWKV_NAMES, ask, call
from flash_lm.cli.run import run

GOLDEN = pathlib.Path("tests/golden/formats")
LENGTH, EVERY, VOCAB = 160, 8, 48
_SPECIAL = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 256}
_FLA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_heads": 2, "norm_eps": 1e-6}
_MAMBA = {"hidden_size": 16, "num_hidden_layers": 4, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2": _LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": _LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "mamba2": _MAMBA | {"tie_word_embeddings": True},
    "rwkv4": {"hidden_size": 16, "num_hidden_layers": 2, "context_length": 256, "rescale_every": 0},
    "gla": _FLA | {"model_type": "gla", "expand_k": 0.5, "use_short_conv": True},
    "gated_deltanet": _FLA | {"model_type": "gated_deltanet", "head_dim": 8, "expand_v": 2},
}
_AUTHORS = {"d_model": 16, "n_layer": 4, "ssm_cfg": {"layer": "Mamba2", "headdim": 8, "d_state": 8}, "rms_norm": True}


def main(argv: list[str]) -> None:
    """Replaces tests/golden/formats."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add_python(parser)
    python = parser.parse_args(argv).python
    check_python(python)
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as temporary:
            theirs, folder = pathlib.Path(temporary), GOLDEN / name
            np.save(theirs / "ids.npy", np.random.default_rng(0).integers(1, VOCAB, size=(1, LENGTH)))
            answer = ask(python, name, theirs, _SPECIAL | shape)
            folder.mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(theirs / file, folder / file)
            np.save(folder / "logits.npy", answer.logits_BxLxV[0, ::EVERY])
    # The same models in the files of their authors' libraries.
    for name, of, file, names in (
        ("mamba_ssm", "mamba2", "pytorch_model.bin", MAMBA_NAMES),
        ("rwkv4_pth", "rwkv4", "model.pth", RWKV_NAMES),
    ):
        (folder := GOLDEN / name).mkdir()
        call(python, "pickle", GOLDEN / of / "model.safetensors", folder / file, json.dumps(names))
        shutil.copyfile(GOLDEN / of / "logits.npy", folder / "logits.npy")
    (GOLDEN / "mamba_ssm" / "config.json").write_text(json.dumps(_AUTHORS | {"vocab_size": VOCAB}))


if __name__ == "__main__":
    run(main)
