"""Bits per byte of enwik8, sequence length 1024: AFT against Transformers, linear and not (AFT, section 5).

    flash-lm reproduce --table=enwik8 --corpus=enwik8 --out=studies/tables/results/enwik8
    flash-lm reproduce --table=enwik8 --scale=small --corpus=stdlib --out=runs/enwik8

12 layers of 512 or 24 of 256; enwik8 is a local file.
"""

from ml_collections import ConfigDict

from flash_lm.configs import aft_local_enwik8
from flash_lm.configs.tables._small_scale import shrink

TITLE = "AFT: bits per byte of enwik8, sequence length 1024"
METRIC = "bits_per_byte"
SHAPES = {"12x512": (12, 512), "24x256": (24, 256)}
# (family, shape) -> the paper's bits per character of the test split
FIGURES = {
    ("transformer", "12x512"): 1.137,
    ("transformer", "24x256"): 1.130,
    ("linear_transformer", "12x512"): 1.207,
    ("performer", "12x512"): 1.199,
    ("aft_local", "12x512"): 1.180,
    ("aft_local", "24x256"): 1.154,
    ("aft_simple", "24x256"): 1.209,
}
# Replaced by one run per family at small scale.
SMALL = [
    ("transformer", "12x512"),
    ("linear_transformer", "12x512"),
    ("performer", "12x512"),
    ("aft_local", "12x512"),
    ("aft_simple", "24x256"),
]


def get_config(scale: str = "paper") -> ConfigDict:
    config = aft_local_enwik8.get_config()
    return shrink(config) if scale == "small" else config


def get_runs(scale: str = "paper") -> dict[str, dict]:
    if scale == "small":
        return {family: {"model.family": family} for family, _ in SMALL}
    runs = {}
    for family, shape in FIGURES:
        layers, dim = SHAPES[shape]
        runs[f"{family}_{shape}"] = {"model.family": family, "model.num_layers": layers, "model.model_dim": dim}
    return runs


def get_figures(scale: str = "paper") -> dict[str, float]:
    if scale == "small":
        return {family: figure for (family, shape), figure in FIGURES.items() if (family, shape) in SMALL}
    return {f"{family}_{shape}": figure for (family, shape), figure in FIGURES.items()}
