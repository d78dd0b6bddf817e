"""What divides relu² of the scores: the visible keys, a constant, the row's length, or n² (the appendix of FLASH).

python -m flash_lm.sweep --config=configs/ablations/normalizer.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    constant = str(config.model.max_length)
    return {
        f"{family}_{normalizer}": {"model.family": family, "model.normalizer": normalizer}
        for family in ("flash_quad", "flash")
        for normalizer in ("count", constant, "length", "paper")
    }
