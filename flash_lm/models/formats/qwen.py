"""Qwen2 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388): Llamas with biases, or with norms, of queries and keys."""

import dataclasses
from typing import Any

from flash_lm.config.model import ModelConfig
from flash_lm.models.formats.format import Format, Settings, of_type
from flash_lm.models.formats.llama import DEFAULTS, INACTIVE, LLAMA, OURS, THEIRS, read_heads, write_heads


def _read(values: Settings) -> tuple[dict[str, Any], list[str]]:
    keys, wrong = read_heads(values)
    # The window of a file that does not use it has no effect.
    if values.get("use_sliding_window"):
        wrong.append("use_sliding_window=True")
    kinds = values.get("layer_types")
    if kinds not in (None, ["full_attention"] * values["num_hidden_layers"]):
        wrong.append(f"layer_types={kinds}")
    return keys, wrong


def _row(name: str, title: str, width: int | None, ours: dict[str, Any], theirs: dict[str, Any]) -> Format:
    """A row for a model_type, with its class's default width of a head."""
    about = {"architectures": [title], "model_type": name, "use_sliding_window": False}

    def write(config: ModelConfig) -> dict[str, Any]:
        return write_heads(config) | about

    return dataclasses.replace(
        LLAMA,
        title=title,
        recognises=of_type(name),
        ours=OURS | ours,
        theirs=THEIRS | theirs,
        inactive=INACTIVE,
        defaults=DEFAULTS | {"head_dim": width},
        read=_read,
        write=write,
        problems=lambda config: [],
    )


ROWS = {
    # No setting says that queries, keys and values have biases: the class does.
    "qwen2": _row("qwen2", "Qwen2ForCausalLM", None, {"biases": "qkv", "query_key_norm": False}, {}),
    "qwen3": _row(
        "qwen3", "Qwen3ForCausalLM", 128, {"biases": "none", "query_key_norm": True}, {"attention_bias": False}
    ),
}
