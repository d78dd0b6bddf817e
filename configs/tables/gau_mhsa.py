"""A gated attention unit against attention with a feed-forward layer, at three sizes, length 512 (FLASH, section 4).

    flash-lm reproduce --table=gau_mhsa --out=studies/tables/results/gau_mhsa

Masked LM on C4 at 110M, 336M and 731M parameters. The paper: better perplexity than Transformer++ at equal step time.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_c4
from flash_lm.configs.tables._small_scale import shrink

TITLE = "FLASH: gated attention units against attention with a feed-forward layer, masked LM on C4"
METRIC = "perplexity"
FAMILIES = ("transformer", "transformer_plus", "transformer_plus_plus", "flash_quad")
# name -> layers, width, heads
SIZES = {
    "paper": {"110M": (12, 768, 12), "336M": (24, 1024, 16), "731M": (24, 1536, 24)},
    "small": {"1M": (2, 128, 4), "2M": (4, 128, 4), "4M": (4, 256, 8)},
}


def get_config(scale: str = "paper") -> ConfigDict:
    config = flash_c4.get_config()
    config = shrink(config) if scale == "small" else config
    config.model.max_length = 128 if scale == "small" else 512
    return config


def get_runs(scale: str = "paper") -> dict[str, dict]:
    return {
        f"{family}_{size}": {
            "model.family": family,
            "model.num_layers": layers,
            "model.model_dim": dim,
            "model.num_heads": heads,
        }
        for size, (layers, dim, heads) in SIZES[scale].items()
        for family in FAMILIES
    }


def get_figures(scale: str = "paper") -> dict[str, float]:
    return {}


def baseline(run: str) -> str:
    return f"transformer_plus_plus_{run.rpartition('_')[2]}"
