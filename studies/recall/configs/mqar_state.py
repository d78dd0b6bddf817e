"""Does recall grow with the state, if nothing else differs? The Linear Transformer with 8, 4, 2 and 1 heads.

    flash-lm recall --config=studies/recall/configs/mqar_state.py --workdir=runs/state \
        --out=studies/recall/results/state

In the first study (mqar_as_measured.py) the models with the largest states are not those that recall most. So that
study cannot separate the capacity of a state from how fast a model learns. Here width, parameters, steps and rates are
those of the first study, and a model whose best rate is the lowest or the highest is trained at up to two further
rates. A head of width E keeps E² sums, so half as many heads have twice the state.

Set before the first run: recall grows with the state if the rank correlation of state bytes and accuracy is at least
0.7 with every seed, as in the first study.
"""

from ml_collections import ConfigDict

from studies.recall.configs import mqar_as_measured as measured

RATES = measured.RATES
MORE_RATES = 2
WIDTHS = (32,)
MORE_SEEDS = measured.MORE_SEEDS
MODELS = tuple(f"linear_transformer+short_convolution=3+num_heads={heads}" for heads in (8, 4, 2, 1))


def get_config() -> ConfigDict:
    return measured.get_config()
