"""Prefixes, cross attention and encoders on copying a word of 31 symbols, or writing it backwards, on two cores.

    python -m flash_lm.train --config=studies/seq2seq/configs/copy.py --config.data.copy.reverse=True
    python -m studies.seq2seq --config=studies/seq2seq/configs/copy.py --workdir=runs/copy --out=runs/seq2seq/copy
    python -m studies.seq2seq --config=studies/seq2seq/configs/copy.py --config.data.copy.reverse=True \
        --workdir=runs/seq2seq_reverse --out=runs/seq2seq/reverse

Both words share a sequence of 64 tokens. With an encoder each has 32. A run ends at 99.9 %. The study is in
studies/seq2seq/README.md.
"""

from ml_collections import ConfigDict

from studies.seq2seq import models as study_models
from studies.seq2seq.models import MORE_SEEDS, RATES  # noqa: F401 (the study reads them)

_DIM, _ROWS = 64, 64


def _length_keys(length: int) -> dict[str, int]:
    return {"model.max_length": length, "data.tokens_per_batch": length * _ROWS}


MODELS = {
    name: keys | _length_keys(32 if keys["task"] == "seq2seq" else 64)
    for name, keys in study_models.models(_DIM).items()
}
RULES = study_models.rules("accuracy", 0.01)


def get_config() -> ConfigDict:
    config = study_models.small_model(_DIM, length=64, rows=_ROWS)
    config.update_from_flattened_dict(MODELS["gau_encoder_1"])
    config.data.corpus = "copy"
    config.train.update(steps=600, eval_every=50, stop_accuracy=0.999)
    return config
