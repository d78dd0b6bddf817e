"""relu², softmax and Laplace inside a gated attention unit.

FLASH, section 4, finds relu² about as good as softmax; the Laplace function is Mega's.

flash-lm sweep --config=configs/ablations/attention_function.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

FUNCTIONS = ("relu2", "softmax", "laplace")


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.model.residual_init = "as_init"  # it follows the function by default
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {
        f"{family}_{function}": {"model.family": family, "model.gau.attention_function": function}
        for family in ("flash_quad", "flash")
        for function in FUNCTIONS
    }
