"""Prefixes, cross attention and encoders on couplets: a second line for a first line, on two cores.

    python -m studies.seq2seq.data $DATA/couplets --out=runs/seq2seq/data
    python -m flash_lm.train --config=studies/seq2seq/configs/couplets.py --config.data.path=runs/seq2seq/data \
        --workdir=runs/pairs
    python -m flash_lm.generate --workdir=runs/pairs --prompt=春風得意馬蹄疾 --samples=8
    python -m studies.seq2seq --config=studies/seq2seq/configs/couplets.py --config.data.path=runs/seq2seq/data \
        --workdir=runs/seq2seq/c --out=runs/seq2seq/couplets

A model has an encoder and reads it by a gated attention unit with one head; studies/seq2seq/README.md has the study.
"""

from ml_collections import ConfigDict

from studies.seq2seq import models as study_models
from studies.seq2seq.models import MORE_SEEDS, RATES  # noqa: F401 (the study reads them)

_DIM = 128
MODELS = study_models.models(_DIM)
RULES = study_models.rules("perplexity", 0.02)


def get_config() -> ConfigDict:
    config = study_models.small_model(_DIM, length=16, rows=64)
    config.update_from_flattened_dict(MODELS["gau_encoder_1"])
    config.data.update(corpus="couplets", path="couplets")
    config.train.update(steps=2000, eval_every=500, label_smoothing=0.1)
    return config
