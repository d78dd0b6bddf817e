"""Prefixes, cross attention and encoders on couplets: a second line for a first line, on two cores.

    python -m flash_lm.train --config=configs/seq2seq/couplets.py --config.data.path=$DATA/couplets --workdir=runs/pairs
    python -m flash_lm.generate --workdir=runs/pairs --prompt=春風得意馬蹄疾 --samples=8
    python scripts/seq2seq.py --config=configs/seq2seq/couplets.py --config.data.path=$DATA/couplets \
        --runs=runs/seq2seq_couplets --out=runs/seq2seq/couplets

A model has an encoder and reads it by a gated attention unit with one head; docs/seq2seq.md has the study.
"""

from ml_collections import ConfigDict

from flash_lm.configs.seq2seq import _study
from flash_lm.configs.seq2seq._study import MORE_SEEDS, RATES  # noqa: F401 (the study reads them)

_DIM = 128
MODELS = _study.models(_DIM)
RULES = _study.rules("perplexity", 0.02)


def get_config() -> ConfigDict:
    config = _study.small_model(_DIM, length=16, rows=64)
    config.update_from_flattened_dict(MODELS["gau_encoder_1"])
    config.data.update(corpus="couplets", path="couplets")
    config.train.update(steps=1000, eval_every=250, label_smoothing=0.1)
    return config
