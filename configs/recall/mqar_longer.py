"""Do models that recall little learn slowly, or start badly? Associative recall as in mqar.py, four times as long.

    python scripts/recall.py --config=configs/recall/mqar_longer.py --runs=runs/longer --out=results/recall/longer

In mqar.py a hybrid with one softmax layer in four recalls 38 points less than softmax at width 32, and the models with
the largest states recall nothing after 600 steps: two claims are contradicted. Its Transformers start with sublayers
that add much (docs/study.md). So here width 32 has 2400 steps; all but the gated attention units, whose layers add next
to nothing at first, are trained with both values of `residual_init`; and the rate 3e-3, the best one at this width for
no model that recalled anything, is left out.

Set before the first run. Of the hybrid: if it is at most one point below softmax with every seed, it had not been
trained enough; if so with `depth` alone, it started badly; else a larger width, where it is 2 points below in mqar.py,
is what is left. Of state against recall: if FLASH, FLASH-Quad and Mamba-2 all recall more than 50 % with every seed,
the rank correlation of mqar.py was that of how fast they learn; of what recalls less nothing is known about its state.
"""

from ml_collections import ConfigDict

from flash_lm.configs.recall import mqar

RATES = (1e-2, 3e-2)
WIDTHS = (32,)
MORE_SEEDS = mqar.MORE_SEEDS
_TAPS = "+short_convolution=3"
_HYBRID = next(name for name in mqar.MODELS if "pattern" in name)
_STARTS = ("+residual_init=as_init", "+residual_init=depth")
MODELS = (
    *(f"{name}{start}" for start in _STARTS for name in (f"transformer_plus_plus{_TAPS}", _HYBRID)),
    *(f"{name}{start}" for start in _STARTS for name in (f"linear_transformer{_TAPS}", "mamba2")),
    f"flash{_TAPS}",
    f"flash_quad{_TAPS}",
)


def get_config() -> ConfigDict:
    config = mqar.get_config()
    config.train.steps = 2400
    return config
