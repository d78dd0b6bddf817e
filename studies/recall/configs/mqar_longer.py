"""Do models that recall little learn slowly, or start badly? The first study of recall, four times as long.

    python -m studies.recall --config=studies/recall/configs/mqar_longer.py --runs=runs/longer \
        --out=studies/recall/results/longer

In the first study (mqar_as_measured.py) a hybrid with one softmax layer in four recalls 38 points less than softmax at
width 32, and the models with the largest states recall nothing after 600 steps: two claims do not hold. Its
Transformers start with sublayers that add much (studies/quality), and so does its Mamba-2; its gated attention units
start with scales of 1, where queries and keys are equal. So here width 32 has 2400 steps, and each model is trained as
it starts in the first study and, beside it, as it starts by default today.

A model whose best rate is the lowest or the highest is trained at up to two further ones. This was added after 19 runs:
Mamba-2, as it starts in the first study, had recalled 17 %, 1 % and 0 % at the three rates, and the hybrid was best at
0.03.

The hybrid with its softmax layer first was added when that with softmax last had its seeds, 20 to 27 points below
softmax in spite of steps and start. In trials of 600 steps at a rate of 0.03, as today, without lines, it recalled 99 %
after 200 steps; with softmax second 57 %, third 54 %, and last without positions 59 %.

FLASH as it is by default today divides scores by N, and not weights. It was added when all else that has lines had
them, and counts as FLASH as it starts today.

Set before the first run; "today" compares models that both start so.

- The hybrid: if it is at most one point below softmax with every seed, as they start in the first study, it had not
  been trained enough; else, if so as they start today, it started badly; else a larger width, where it is 2 points
  below in the first study, is what is left. Added later: if the one with softmax first is at most one point below, it
  is the place of the softmax layer.
- State against recall: if FLASH, FLASH-Quad and Mamba-2 all recall more than 50 % with every seed, as they start in the
  first study, its rank correlation was that of how fast they learn; else, if so as they start today, that of how they
  start; else nothing is known of what still recalls less, and the contradiction stands.
"""

from ml_collections import ConfigDict

from studies.recall.configs import mqar_as_measured as measured

RATES = measured.RATES
MORE_RATES = 2
WIDTHS = (32,)
MORE_SEEDS = measured.MORE_SEEDS
_TAPS = "+short_convolution=3"
_HYBRID = next(name for name in measured.MODELS if "pattern" in name)
_OTHERS = ",".join(("linear_transformer",) * 3)
_SOFTMAX_FIRST = _HYBRID.replace(f"{_OTHERS},transformer_plus_plus", f"transformer_plus_plus,{_OTHERS}")
# model -> the key by whose value it starts otherwise today
_STARTS = {
    f"transformer_plus_plus{_TAPS}": "residual_init=depth",
    _HYBRID: "residual_init=depth",
    "mamba2": "residual_init=depth",
    f"flash{_TAPS}": "scale_init=normal",
    f"flash_quad{_TAPS}": "scale_init=normal",
    _SOFTMAX_FIRST: "residual_init=depth",
    f"flash{_TAPS}+divides=scores": "scale_init=normal",
}
MODELS = tuple(name for model, today in _STARTS.items() for name in (model, f"{model}+{today}"))


def get_config() -> ConfigDict:
    config = measured.get_config()
    config.train.steps = 2400
    return config
