"""Warmup-stable-decay: one run at a constant rate, and a decay that branches off it for each budget.

    python -m flash_lm.sweep --config=studies/defaults/configs/decays.py --split=test --workdir=runs/decays

Each decay is the last fifth of its budget, by 1 − √ as Hägele et al. 2024 (arXiv:2405.18392) recommend. At the largest
budget a linear decay is also trained. A branch equals a full run of its schedule, to the bit, at a fifth of the cost.
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

BUDGETS = (120, 240, 480)  # steps
PART = 5  # the last fifth decays


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.train.update(schedule="constant", warmup_steps=20)
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    tokens = config.data.tokens_per_batch
    shortest, longest = min(BUDGETS), max(BUDGETS)
    every = shortest - shortest // PART
    runs = {"stable": {"train.steps": longest - longest // PART, "train.checkpoint_every": every, "train.keep": 99}}
    for steps in BUDGETS:
        decay = steps // PART
        branch = {
            "train.steps": None,
            "train.tokens": steps * tokens,
            "train.decay_steps": decay,
            "train.branch_from": f"{{workdir}}/stable@{steps - decay}",
        }
        runs[f"sqrt_{steps}"] = branch | {"train.schedule": "sqrt"}
    return runs | {f"linear_{longest}": branch | {"train.schedule": "linear"}}
