"""What N divides, scores (the appendix of FLASH) or relu² of them, and what it is: keys, a constant, or the length.

flash-lm sweep --config=configs/ablations/normalizer.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    constant = str(config.model.max_length)
    divisors = {"weights": ("count", constant, "length"), "scores": (constant, "length", "length_everywhere")}
    return {
        f"{family}_{divides}_{n}": {"model.family": family, "model.divides": divides, "model.normalizer": n}
        for family in ("flash_quad", "flash")
        for divides, normalizers in divisors.items()
        for n in normalizers
    }
