"""The chunk length of FLASH (in FLASH, section 4, 128 to 1024 differ little).

flash-lm sweep --config=configs/ablations/chunk_size.py
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

SIZES = (32, 64, 128, 256, 512)


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {f"chunk_{size}": {"model.family": "flash", "model.chunks.size": size} for size in SIZES}
