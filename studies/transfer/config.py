"""Config of the transfer study: do gated attention units transfer as well as attention? See studies/transfer/README.md.

python -m studies.transfer data $DATA/imdb --out=runs/transfer/data
python -m studies.transfer run --data=runs/transfer/data --workdir=runs/transfer --out=runs/transfer/results
python -m studies.transfer table --out=runs/transfer/results
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart
from studies.transfer.report import NoWorse
from studies.transfer.run import Arm

TITLE = "Sentiment of IMDb reviews, by the share of the labels that was used"
FAMILIES = ("transformer_plus_plus", "flash_quad", "flash", "linear_transformer")
PRETRAINING_STEPS, STEPS, TUNING_STEPS = 1500, 600, 150
SHARES, SEEDS, TUNED_SHARE = (0.01, 0.1, 1.0), (0, 1, 2), 0.1
_HEAD_ALONE = {"train.freeze": ("^(?!classifier)",)}
ARMS = (
    Arm("from scratch", None, {}),
    Arm("fine-tuned", "unlabelled", {}),
    Arm("frozen", "unlabelled", _HEAD_ALONE | {"train.learning_rate": 3e-3}),
    Arm("own rows", "own", {}),
)


def get_config() -> ConfigDict:
    """Returns the config of all runs; python -m studies.transfer fills in the path of the data."""
    config = quickstart.get_config()
    config.model.update(num_layers=2, max_length=256)
    config.model.update(residual_init="as_init", divides="weights")  # as in the recorded runs
    config.data.update(corpus="hf", length=256, vocab_size=4096, tokens_per_batch=8192)
    config.train.update(
        steps=STEPS, warmup_steps=60, learning_rate=1e-3, eval_every=0, checkpoint_every=0, log_every=20
    )
    return config


def get_pretraining() -> dict:
    """Returns the config keys of pretraining."""
    return {
        "task": "masked_lm",
        "train.steps": PRETRAINING_STEPS,
        "train.learning_rate": 3e-3,
        "train.warmup_steps": 150,
    }


def get_hypotheses() -> list[NoWorse]:
    """Returns the hypotheses of the study, see studies/transfer/README.md."""
    context = {"pretraining": "unlabelled", "nats": 5.5}  # frequencies alone have 6.2
    compared = [("fine-tuned", None), ("frozen", None), ("fine-tuned", "from scratch")]
    return [
        NoWorse(arm, family, "transformer_plus_plus", points=2.0, over=over, **context)
        for arm, over in compared
        for family in ("flash", "flash_quad")
    ]
