"""Renamed keys: maps former names, and the names that other libraries use, to those of today."""

from typing import Any

# A key that is renamed or split gets an entry: its former full name -> its full names today, such as
# "model.chunk_size": ("model.chunks.size", "model.linear.chunk_size"). Then runs with the former name load, and a flag
# with it is answered. No key has a former name now.
RENAMED: dict[str, tuple[str, ...]] = {}

# What transformers, nanoGPT and PyTorch call a key, in whichever group it is written.
FOREIGN = {
    "hidden_size": "model.model_dim",
    "d_model": "model.model_dim",
    "n_embd": "model.model_dim",
    "num_hidden_layers": "model.num_layers",
    "n_layer": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "n_head": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "intermediate_size": "model.mlp_dim",
    "max_position_embeddings": "model.max_length",
    "block_size": "model.max_length",
    "rope_theta": "model.rotary_base",
    "seq_len": "data.length",
    "batch_size": "data.tokens_per_batch",
    "lr": "train.learning_rate",
    "max_steps": "train.steps",
    "max_iters": "train.steps",
    "grad_clip": "train.clip",
    "gradient_accumulation_steps": "train.accumulate",
}


def rename(values: dict[str, Any]) -> dict[str, Any]:
    """Renames former names of keys to those of today, in a config as nested dicts of plain values."""
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for former, names in RENAMED.items():
        # Take the value out at the former name, if the config has it.
        *parents, last = former.split(".")
        level = values
        for parent in parents:
            level = level.get(parent, {})
        if last not in level:
            continue
        # Put it at all names of today that have no value yet.
        value = level.pop(last)
        for name in names:
            *parents, last = name.split(".")
            level = values
            for parent in parents:
                level = level.setdefault(parent, {})
            level.setdefault(last, value)
    return values


def names_today(name: str) -> tuple[str, ...]:
    """The full names that a key has today, from the full name that it has or had."""
    return RENAMED.get(name, (name,))
