"""The gain from a state that is carried between sequences: families trained with and without it, scored by position.

    python -c "import pathlib, pandas; d = pathlib.Path('ten_books'); d.mkdir(); \
        [pandas.read_parquet(f).head(10 if f.stem == 'train' else None).to_parquet(d / f.name) \
        for f in pathlib.Path('$DATA/books').glob('*.parquet')]"
    python -m flash_lm.sweep --config=studies/carry/config.py --split=validation --workdir=runs/carry \
        --config.data.corpus=hf --config.data.path=ten_books
    for run in runs/carry/*_rows runs/carry/*_carried; do python -m flash_lm.evaluate --workdir=$run --split=test \
        --carry --first=32768 --results=studies/carry/results/positions.jsonl; done
    flash-lm positions studies/carry/results/positions.jsonl --out=studies/carry/results

Set before the first run: the perplexity of the first 32768 tokens of the test split's books. Training with a carried
state helps a family if its perplexity at positions from 8192 on, with the state, is at least 2 % below that of the
model trained and scored on separate sequences. A family uses a long state without being trained for it if the second
model, scored with the state, is at least 2 % below itself without. Seeds: one, so neither is a verdict. The learning
rate is that of configs/quickstart.py, not tuned. Both arms read the same ten books, about once, in sequences of the
same length.

A first design had all 230 books and 750 steps. In it eight streams read about a dozen books, and separate sequences
come from all books. FLASH's perplexity on the validation split, in separate sequences, was 104.6 when trained on such
sequences and 135.4 when trained in streams. That shows the effect of few books and not of the state, so it was stopped.
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart

WITHOUT_TABLES = {"model.absolute_positions": "none"}
FAMILIES = {
    "flash": {},
    "aft_conv": WITHOUT_TABLES,
    "linear_transformer": WITHOUT_TABLES | {"model.rotary": True},
    "transformer_xl": {},
}


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.model.max_length = 256
    config.data.vocab_size = 4096
    config.train.update(steps=500, warmup_steps=50, eval_every=250, eval_steps=20, checkpoint_every=250)
    return config


def get_runs(config: ConfigDict) -> dict[str, dict]:
    return {
        f"{family}_{name}": {"model.family": family, "train.carry_state": carry, **changes}
        for family, changes in FAMILIES.items()
        for name, carry in (("rows", False), ("carried", True))
    }
