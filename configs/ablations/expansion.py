"""The expansion E / D of a gated attention unit; the number of layers keeps the number of parameters constant.

flash-lm sweep --config=configs/ablations/expansion.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

EXPANSIONS = (1, 2, 3)


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    model = config.model
    weights = lambda times: 3 * times * model.model_dim**2 + model.model_dim * model.gau.shared_dim  # of a unit
    return {
        f"expansion_{times}": {
            "model.family": "flash",
            "model.gau.expanded_dim": times * model.model_dim,
            "model.num_layers": round(model.num_layers * weights(2) / weights(times)),
        }
        for times in EXPANSIONS
    }
