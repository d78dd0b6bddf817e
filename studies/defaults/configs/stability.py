"""Methods that keep a Transformer++ stable at learning rates that are too high for it.

    python -m flash_lm.sweep --config=studies/defaults/configs/stability.py --workdir=runs/stability

Each run has four times the learning rate of quickstart.py. Lines of metrics.jsonl have `loss_spikes`, and the norm of
the gradient by group of parameters.
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

Z_LOSS, NORM, CAP = {"train.z_loss": 1e-4}, {"model.query_key_norm": True}, {"model.softmax.cap": 30.0}


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.model.family = "transformer_plus_plus"
    config.train.update(learning_rate=4 * config.train.learning_rate, log_groups=True)
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {"plain": {}, "z_loss": Z_LOSS, "query_key_norm": NORM, "cap": CAP, "all": Z_LOSS | NORM | CAP}
