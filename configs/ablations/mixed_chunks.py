"""What mixed chunks cost a gated attention unit, and what they cost a Transformer (FLASH, section 4).

    flash-lm sweep --config=configs/ablations/mixed_chunks.py

The paper: from FLASH-Quad to FLASH far less quality is lost than from Transformer++ to MC-TFM.
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

FAMILIES = ("flash_quad", "flash", "transformer_plus_plus", "mc_tfm")


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {family: {"model.family": family} for family in FAMILIES}
