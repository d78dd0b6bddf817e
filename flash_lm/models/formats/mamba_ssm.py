"""Mamba-2 (arXiv:2405.21060) in the files of its authors' library, mamba_ssm: other settings, and the same arrays."""

import dataclasses
from typing import Any

from flash_lm.models.formats.format import Setting, Settings, Tensor
from flash_lm.models.formats.mamba2 import LAYER, MAMBA2, read_sizes
from flash_lm.models.formats.settings import is_a


def _read(values: Settings) -> tuple[dict[str, Any], list[str]]:
    """Reads the options of their block, and the rows of their embedding: a multiple of some number."""
    block = {"d_state": 128, "headdim": 64, "expand": 2, "d_conv": 4, "ngroups": 1} | values["ssm_cfg"]
    others = block.keys() - {"layer", "d_state", "headdim", "expand", "d_conv", "ngroups", "chunk_size"}
    wrong = [f"ssm_cfg.{name}={block[name]}" for name in sorted(others)]
    if block["ngroups"] != 1:
        wrong.append(f"ssm_cfg.ngroups={block['ngroups']}")
    sizes = ("headdim", "d_state", "d_conv", "expand")
    if wrong := wrong + [f"ssm_cfg.{name}={block[name]}" for name in sizes if not is_a(int, block[name])]:
        return {}, wrong
    about = {"hidden_size": values["d_model"], "num_hidden_layers": values["n_layer"], "expand": block["expand"]}
    about |= {"head_dim": block["headdim"], "num_heads": block["expand"] * values["d_model"] // block["headdim"]}
    keys, wrong = read_sizes({**MAMBA2.defaults, **about})
    multiple = values["pad_vocab_size_multiple"]
    sizes = {"ssd.head_width": block["headdim"], "ssd.state_dim": block["d_state"]}
    rows = -(-values["vocab_size"] // multiple) * multiple
    return keys | sizes | {"short_convolution": block["d_conv"], "vocab_size": rows, "norm_epsilon": 1e-5}, wrong


def _recognises(settings: Settings) -> bool:
    return isinstance(block := settings.get("ssm_cfg"), dict) and block.get("layer") == "Mamba2"


ROWS = {
    "mamba_ssm": dataclasses.replace(
        MAMBA2,
        title="Mamba-2 of mamba_ssm",
        recognises=_recognises,
        tensors=(Tensor("backbone.embedding.weight", "embedding"), *LAYER),
        keys={
            "vocab_size": Setting("vocab_size"),
            "model_dim": Setting("d_model"),
            "tie_embeddings": Setting("tie_embeddings", bool),
        },
        needs={"n_layer": int, "pad_vocab_size_multiple": int},
        theirs={},
        inactive={"rms_norm": True, "attn_layer_idx": [], "d_intermediate": 0},
        defaults={"pad_vocab_size_multiple": 8, "tie_embeddings": True},
        read=_read,
        one_way="it is written as mamba2, which mamba_ssm's files were converted to",
    ),
}
