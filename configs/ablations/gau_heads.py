"""One head or more in a gated attention unit; each has separate scale-offsets of the shared Z.

flash-lm sweep --config=configs/ablations/gau_heads.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

HEADS = (1, 2, 4, 8)


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {
        f"{family}_heads_{heads}": {"model.family": family, "model.gau.heads": heads}
        for family in ("flash_quad", "flash")
        for heads in HEADS
    }
