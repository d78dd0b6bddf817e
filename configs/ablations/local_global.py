"""Which part of mixed chunk attention matters: the local one, the global one, both (FLASH, section 4).

    flash-lm sweep --config=configs/ablations/local_global.py

At the paper's size: --config=configs/flash_base.py --runs=configs/ablations/local_global.py. The paper finds the local
part to matter more, and both together best.
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    parts = {"both": (True, True), "local": (True, False), "global": (False, True)}
    return {
        name: {"model.family": "flash", "model.chunks.local_attention": local, "model.chunks.global_attention": global_}
        for name, (local, global_) in parts.items()
    }
