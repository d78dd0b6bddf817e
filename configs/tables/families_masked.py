"""Bidirectional families as masked language models of one size: perplexity of masked tokens and step time.

    flash-lm reproduce --table=families_masked --scale=small --corpus=$DATA/books --split=validation \
        --out=studies/families/results/masked

Not a table of a paper. Linformer and Nyströmformer have no causal form. The other four are for comparison.
"""

from ml_collections import ConfigDict

from flash_lm.configs.tables import families as causal

TITLE = "Masked language models at one size"
METRIC = "perplexity"
BASELINE = "transformer_plus_plus"

# A narrower MLP at the small size, so that the slots' projections do not make the model larger than the others.
_SMALL = {"linformer": {"model.linformer.slots": 64, "model.linformer.share_slots": "kv", "model.mlp_dim": 384}}


def get_config(scale: str = "paper") -> ConfigDict:
    config = causal.get_config(scale)
    config.task = "masked_lm"
    return config


def get_runs(scale: str = "paper") -> dict[str, dict]:
    names = (BASELINE, "flash_quad", "flash", "linear_transformer", "linformer", "nystromformer")
    changes = _SMALL if scale == "small" else {}
    return {name: {"model.family": name} | changes.get(name, {}) for name in names}


def get_figures(scale: str = "paper") -> dict[str, float]:
    return {}
