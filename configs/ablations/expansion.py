"""How wide a gated attention unit expands, E / D; the layers are as many as keep the number of parameters.

python -m flash_lm.sweep --config=configs/ablations/expansion.py
"""

from ml_collections import ConfigDict

from configs import quickstart

# E / D -> layers of two units, for 3 D E + D S weights a unit at D = 128 and S = 64
LAYERS = {1: 8, 2: 4, 3: 3}


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs() -> dict[str, dict]:
    dim = get_config().model.model_dim
    return {
        f"expansion_{times}": {"model.family": "flash", "model.expanded_dim": times * dim, "model.num_layers": layers}
        for times, layers in LAYERS.items()
    }
