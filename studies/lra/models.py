"""Small model and runs that the stand-ins of Long Range Arena share."""

from typing import Any

from ml_collections import ConfigDict

from flash_lm.configs import base

# Models of the published table that are families here (its local attention is a Longformer without global tokens), and
# FLASH, FLASH-Quad and Mega.
FAMILIES = (
    "transformer",
    "longformer",
    "linear_transformer",
    "performer",
    "linformer",
    "reformer",
    "flash",
    "flash_quad",
    "mega",
)
# Starts of models when these runs were made. Only the runs of the study keep them.
_STARTS_AS_MEASURED = {"model.residual_init": "as_init", "model.scale_init": "as_init", "model.divides": "weights"}


def small_model(length: int, rows: int) -> ConfigDict:
    """Returns a config of two layers of 64 channels with chunks and windows of 32, on batches of `rows` sequences."""
    config: Any = base.get_config()
    config.task = "classify"
    config.model.update(family="transformer", num_layers=2, model_dim=64, num_heads=4, max_length=length, init="lecun")
    config.model.update(
        gau={"shared_dim": 32}, chunks={"size": 32}, window={"size": 32}, linear={"chunk_size": 32}, scan_layers=False
    )
    config.data.tokens_per_batch = rows * length
    config.train.update(learning_rate=1e-3, weight_decay=0.1, eval_every=250, checkpoint_every=0)
    return config


def runs(masked: float) -> dict[str, dict]:
    """Returns for each family a run from scratch, and a run pretrained by masked modelling on the training sequences.

    Args:
        masked: share of the tokens that are masked in the first stage (Amos et al. 2024, arXiv:2310.02980, section 3).
    """
    changes_of_run = {}
    for family in FAMILIES:
        base = {"model.family": family, **_STARTS_AS_MEASURED}
        changes_of_run[f"{family}_scratch"] = base
        changes_of_run[f"{family}_masked"] = base | {"task": "masked_lm", "data.masking.rate": masked}
        changes_of_run[f"{family}_pretrained"] = base | {"train.init_from": f"{{workdir}}/{family}_masked"}
    return changes_of_run
