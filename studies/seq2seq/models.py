"""Models of equal size, rates, seeds and rules of the studies of prefixes and encoders."""

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from flash_lm.configs import base
from studies.seq2seq.report import Comparison

RATES = (1e-3, 3e-3, 1e-2)
MORE_SEEDS = (1, 2)
HEADS = (1, 2, 4, 8)
_ALONE = {"task": "causal_lm", "model.num_layers": 4, "model.encoder.family": None}
_APART = {"task": "seq2seq", "model.num_layers": 2, "model.cross.kind": "softmax"}


def small_model(dim: int, length: int, rows: int) -> ConfigDict:
    """Returns a config of four layers of `dim` channels, on batches of `rows` sequences of `length` tokens."""
    config: Any = base.get_config()
    config.model.update(model_dim=dim, num_layers=4, num_heads=8, max_length=length, init="lecun", scan_layers=False)
    config.model.update(gau={"shared_dim": 32}, cross={"shared_dim": 32}, linear={"chunk_size": 32})
    # As in the recorded runs.
    config.model.update(residual_init="as_init", scale_init="as_init", divides="weights")
    config.data.update(pack="examples", tokens_per_batch=rows * length)
    config.train.update(schedule="cosine", weight_decay=0.1, clip=0.5, checkpoint_every=0)
    return config


def models(dim: int) -> dict[str, dict]:
    """Returns the config keys of each model, by name.

    A model has four layers without an encoder, or two encoder layers and two decoder layers. The widths of the MLP, or
    E, are chosen so that a Transformer has 56 D² parameters and a model of gated attention units 60 D².
    """
    wide = _ALONE | {"model.mlp_dim": 5 * dim}
    alone = {
        "transformer": wide | {"model.family": "transformer"},
        "linear_transformer": wide | {"model.family": "linear_transformer"},
        "flash_quad": _ALONE | {"model.family": "flash_quad", "model.gau.expanded_dim": 5 * dim // 2},
    }
    both = lambda family: _APART | {"model.family": family, "model.encoder.family": family}
    gau, narrow = both("flash_quad"), 2 * (13 * dim // 12)  # softmax has 4 D² instead of 6 D²
    cross = {"model.cross.kind": "gau", "model.cross.expanded_dim": 2 * dim - 24}  # for a second map to S
    return {
        **alone,
        **{f"{name}_prefix": keys | {"task": "prefix_lm"} for name, keys in alone.items()},
        "transformer_encoder": both("transformer"),
        "linear_transformer_encoder": both("linear_transformer"),
        **{f"gau_encoder_{n}": gau | cross | {"model.cross.heads": n} for n in HEADS},
        "gau_encoder_softmax": gau | {"model.gau.expanded_dim": narrow},
    }


def rules(measure: str, margin: float) -> Sequence[Comparison]:
    """Returns the rules of the two hypotheses, set before the first run.

    Args:
        measure: "perplexity" or "accuracy".
        margin: a share of the perplexity, or a difference of accuracy.
    """
    return (
        *(Comparison(1, measure, "gau_encoder_1", "no worse", f"gau_encoder_{n}", margin) for n in HEADS[1:]),
        Comparison(1, measure, "gau_encoder_1", "no worse", "gau_encoder_softmax", margin),
        Comparison(2, measure, "flash_quad_prefix", "better", "flash_quad", margin),
    )
