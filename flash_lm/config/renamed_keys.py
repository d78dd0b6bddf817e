"""Renamed keys: maps former names, and the names that other libraries use, to those of today."""

from typing import Any

# A key that is renamed or split gets an entry: its former full name -> its full names today, such as
# "model.chunk_size": ("model.chunks.size", "model.linear.chunk_size"). Then runs with the former name load, and a flag
# with it is answered. No key has a former name now.
RENAMED: dict[str, tuple[str, ...]] = {}

# What papers and other libraries (transformers, nanoGPT, nanochat, levanter, MaxText) call a key, in whichever group it
# is written.
_SYNONYMS = {
    "model.model_dim": "hidden_size hidden_dim embed_dim embedding_dim emb_dim d_model n_embd dim width dmodel",
    "model.num_layers": "num_hidden_layers n_layer n_layers nlayers layers num_decoder_layers",
    "model.num_heads": "num_attention_heads n_head n_heads nhead heads_num num_q_heads num_query_heads",
    "model.num_kv_heads": "num_key_value_heads n_kv_head n_kv_heads num_kv_groups",
    "model.mlp_dim": "intermediate_size d_ff dff ffn_dim d_ffn hidden_mult mlp_hidden_dim",
    "model.max_length": "max_position_embeddings block_size n_positions context_length max_seq_len max_seqlen",
    "model.rotary_base": "rope_theta rope_base rotary_theta",
    "model.family": "arch architecture model_type model_name attention_type attn mixer",
    "model.dropout": "dropout_rate drop_rate resid_pdrop",
    "data.length": "seq_len seq_length seqlen sequence_length max_sequence_length",
    "data.tokens_per_batch": "batch_size bsz train_batch_size per_device_train_batch_size global_batch_size bs",
    "data.path": "dataset_path data_path data_dir train_file text",
    "data.name": "dataset dataset_name",
    "train.learning_rate": "lr max_lr peak_lr base_lr learning_rate_init",
    "train.end_learning_rate": "min_lr final_lr lr_min",
    "train.warmup_steps": "warmup warmup_iters num_warmup_steps warmup_iterations lr_warmup_steps",
    "train.schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler",
    "train.steps": "max_steps max_iters num_steps n_steps num_train_steps training_steps iterations train_steps",
    "train.tokens": "train_tokens num_tokens total_tokens max_train_tokens",
    "train.clip": "grad_clip gradient_clip max_grad_norm clip_grad_norm clip_norm",
    "train.b1": "beta1 adam_beta1",
    "train.b2": "beta2 adam_beta2",
    "train.eps": "adam_eps adam_epsilon epsilon",
    "train.weight_decay": "wd",
    "train.accumulate": "gradient_accumulation_steps grad_accum accumulation_steps accum_steps",
    "train.eval_every": "eval_interval eval_steps_interval evaluation_interval val_interval val_every",
    "train.checkpoint_every": "save_steps save_interval checkpoint_interval save_every ckpt_interval",
    "train.log_every": "log_interval logging_steps log_steps",
    "train.label_smoothing": "label_smooth smoothing",
    "seed": "random_seed rng_seed",
}
FOREIGN = {name: ours for ours, names in _SYNONYMS.items() for name in names.split()}
# Ours that count in another unit than their synonyms.
UNITS = {"data.tokens_per_batch": "in tokens: sequences times data.length"}


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
