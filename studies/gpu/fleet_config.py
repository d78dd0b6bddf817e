"""Configs of the fleets of `studies/gpu/fleet.py`, one per model whose jobs are left in the queue.

python -m flash_lm.sweep --config=studies/gpu/fleet_config.py:mqar_flash --grid=seed=0,1,2 --vmap
"""

from typing import Any

from studies.gpu.fleet import left_fleets

PRESETS = {fleet.name: fleet.config for fleet in left_fleets()}


def get_config(name: str) -> Any:
    """Returns the config of a fleet but for rate and seed."""
    return PRESETS[name].copy_and_resolve_references()
