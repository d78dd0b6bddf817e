"""Compares optimizers, each at its tuned learning rate.

    python -m flash_lm.sweep --config=quickstart --runs=studies/defaults/configs/optimizers.py \
        --tune=train.learning_rate --budget=2M --workdir=runs/optimizers

Schedule-free AdamW has no decay: the average of its iterates is scored instead. The average of AdamW (train.ema) is
scored in addition to its last parameters, as ema_loss in metrics.jsonl.
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart


def get_config() -> ConfigDict:
    return quickstart.get_config()


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {
        "adamw": {"train.ema": 0.99},
        "lion": {"train.optimizer": "lion", "train.learning_rate": config.train.learning_rate / 8},
        "muon": {"train.optimizer": "muon"},
        "schedule_free_adamw": {"train.optimizer": "schedule_free_adamw", "train.schedule": "constant"},
    }
