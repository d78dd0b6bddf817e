"""Why the Linear Transformer learned no context when the transfer study pretrained it: rate, positions or attention.

    python -m studies.transfer data $DATA/imdb --out=runs/transfer/data
    python -m flash_lm.sweep --config=studies/defaults/configs/masked_linear.py --workdir=runs/masked_linear \
        --split=validation

Every run changes only what its name says in that pretraining (studies/transfer/config.py), seed 0. A run has learned
context if its loss is below 5.5 nats, the limit of that study. Frequencies alone have 6.2. One seed shows what can
happen.
"""

from ml_collections import ConfigDict

from studies.transfer import config as transfer


def get_config() -> ConfigDict:
    config = transfer.get_config()
    config.update_from_flattened_dict(transfer.get_pretraining())
    config.model.family = "linear_transformer"
    config.data.update(
        path="runs/transfer/data/unlabelled", tokenizer_path="runs/transfer/data/tokenizer.model", text_column="text"
    )
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {
        "rotary_positions": {"model.rotary": True},
        "softmax": {"model.family": "transformer"},
        "rate_0.01": {"train.learning_rate": 1e-2},
    }
