"""AFT-local's sequence length on enwik8, 24 layers of 256, window 32 (AFT, section 5).

    flash-lm reproduce --table=enwik8_length --corpus=enwik8 --out=studies/tables/results/enwik8_length

The paper: longer sequences are better.
"""

from ml_collections import ConfigDict

from flash_lm.configs import aft_local_enwik8
from flash_lm.configs.tables._small_scale import shrink, shrunk_length

TITLE = "AFT-local: bits per byte of enwik8 by sequence length"
METRIC = "bits_per_byte"
FIGURES = {1024: 1.154, 2048: 1.135, 4096: 1.134}  # length -> the paper's bits per character of the test split


def get_config(scale: str = "paper") -> ConfigDict:
    config = aft_local_enwik8.get_config()
    config.model.update(num_layers=24, model_dim=256)
    return shrink(config) if scale == "small" else config


def get_runs(scale: str = "paper") -> dict[str, dict]:
    return {f"length_{n}": {"model.max_length": n} for n in (shrunk_length(length, scale) for length in FIGURES)}


def get_figures(scale: str = "paper") -> dict[str, float]:
    return {f"length_{shrunk_length(length, scale)}": figure for length, figure in FIGURES.items()}
