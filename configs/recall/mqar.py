"""Recall against state on two cores: associative recall (MQAR) of 4 to 32 pairs in rows of 128, 2048 words.

    python -m flash_lm.train --config=configs/recall/mqar.py --config.model.family=flash
    python scripts/recall.py --config=configs/recall/mqar.py --runs=runs/mqar --out=results/recall/mqar

Not the published setting, which is configs/recall/mqar_published.py: rows, words and models are smaller, each step has
new rows, and models keep their own positions and feed-forwards. Filler is the word 0, as in the published figure, so
100 % can be reached. Chunks and windows have 16 tokens, far below a row.

Set before the first run. Each model is trained at three rates with seed 0; the rate with the best accuracy on the
validation split gets seeds 1 and 2; what is reported is the test split. A run ends at 99 %. Softmax must reach 99 % at
width 128, and AFT-simple must stay below 20 % at width 32, or the reason is found. Claims: `results/claims.toml`.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base

RATES = (1e-3, 3e-3, 1e-2)
WIDTHS = (32, 128)
MORE_SEEDS = (1, 2)
_IN_TURN = ("linear_transformer",) * 3 + ("transformer_plus_plus",)
HYBRID = f"linear_transformer+num_layers=4+pattern={','.join(_IN_TURN)}"
# A family, and keys of config.model that differ from `get_config`.
MODELS = (
    "transformer_plus_plus",
    "flash_quad",
    "flash",
    "mc_tfm",
    "longformer",
    "aft_simple",
    "linear_transformer",
    "based",
    "gated_deltanet",
    "mamba2",
    HYBRID,
    *(
        f"{family}+short_convolution=3"
        for family in ("flash", "mc_tfm", "longformer", "aft_simple", "linear_transformer")
    ),
)


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="transformer_plus_plus", num_layers=2, model_dim=32, num_heads=2, max_length=128, init="lecun"
    )
    config.model.update(
        gau={"shared_dim": 32}, chunks={"size": 16}, window={"size": 16}, linear={"chunk_size": 32}, scan_layers=False
    )
    config.data.update(corpus="mqar", pack="examples", tokens_per_batch=64 * 128)
    parts = tuple((128, pairs, 1 << 17) for pairs in (4, 8, 16, 32))
    config.data.mqar.update(
        words=2048,
        train=parts,
        validation=tuple((length, pairs, 64) for length, pairs, _ in parts),
        test=tuple((length, pairs, 256) for length, pairs, _ in parts),
        random_filler=False,
    )
    config.train.update(
        steps=1500,
        schedule="cosine",
        weight_decay=0.1,
        eval_every=50,
        stop_accuracy=0.99,
        checkpoint_every=0,
    )
    return config
