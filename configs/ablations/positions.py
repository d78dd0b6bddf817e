"""FLASH's position encodings: all three together, each one alone, and none.

flash-lm sweep --config=configs/ablations/positions.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

# name -> absolute, rotary, relative
ENCODINGS = {
    "all_three": ("scaled_sinusoid", True, "toeplitz"),
    "rotary": ("none", True, "none"),
    "sinusoid": ("scaled_sinusoid", False, "none"),
    "relative_bias": ("none", False, "toeplitz"),
    "none": ("none", False, "none"),
}


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {
        name: {
            "model.family": "flash",
            "model.absolute_positions": absolute,
            "model.rotary": rotary,
            "model.gau.relative_bias": relative,
        }
        for name, (absolute, rotary, relative) in ENCODINGS.items()
    }
