"""AFT-local's window on enwik8, 24 layers of 256, sequence length 1024 (AFT, section 5).

    flash-lm reproduce --table=enwik8_window --corpus=enwik8 --out=studies/tables/results/enwik8_window

The paper finds 32 the best: bits per byte fall up to it, and rise slowly after it.
"""

from ml_collections import ConfigDict

from flash_lm.configs import aft_local_enwik8
from flash_lm.configs.tables._small_scale import shrink

TITLE = "AFT-local: bits per byte of enwik8 by window"
METRIC = "bits_per_byte"
# window -> the paper's bits per character of the test split
FIGURES = {
    0: 1.209,
    1: 1.205,
    2: 1.176,
    4: 1.165,
    8: 1.162,
    32: 1.154,
    64: 1.160,
    128: 1.165,
    256: 1.164,
    512: 1.171,
    1024: 1.173,
}
SMALL = (0, 2, 8, 32, 128)


def get_config(scale: str = "paper") -> ConfigDict:
    config = aft_local_enwik8.get_config()
    config.model.update(num_layers=24, model_dim=256)
    return shrink(config) if scale == "small" else config


def get_runs(scale: str = "paper") -> dict[str, dict]:
    windows = SMALL if scale == "small" else FIGURES
    return {f"window_{window}": {"model.aft.window": window} for window in windows}


def get_figures(scale: str = "paper") -> dict[str, float]:
    return {f"window_{window}": figure for window, figure in FIGURES.items()}
