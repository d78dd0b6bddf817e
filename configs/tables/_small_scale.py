"""A table's experiment at laptop size: about a minute per run, to show that it runs from start to end."""

from ml_collections import ConfigDict

_LENGTH_DIVISOR = 4


def shrink(config: ConfigDict) -> ConfigDict:
    """Shrinks a config to 200 steps of 2 layers of 128; task, tokenizer and family stay."""
    # The model: two layers that a CPU trains in minutes.
    config.model.update(
        num_layers=2,
        model_dim=128,
        num_heads=4,
        gau={"shared_dim": 64},
        chunks={"size": 64},
        linear={"chunk_size": 64},
        aft={"bias_dim": 32},
        max_length=512,
        init="lecun",  # a standard deviation of 0.02 is meant for wide models
        dtype="float32",
        remat="none",
        dropout=0.0,
    )
    # Two hundred steps: enough to see that everything runs, not to rank.
    config.data.update(vocab_size=4096, tokens_per_batch=2048)
    config.train.update(
        steps=200,
        warmup_steps=20,
        learning_rate=3e-3,
        weight_decay=0.01,
        clip=1.0,
        accumulate=1,
        log_every=10,
        eval_every=50,
        eval_steps=10,
        checkpoint_every=0,
    )
    return config


def shrunk_length(length: int, scale: str) -> int:
    """Returns the sequence length that replaces the paper's at this scale."""
    return length // _LENGTH_DIVISOR if scale == "small" else length
