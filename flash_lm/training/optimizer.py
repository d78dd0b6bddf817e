"""Learning-rate schedule, clipping and optimizer, from optax."""

import jax
import optax

from flash_lm.config import TrainConfig

_DECAYED = ("kernel", "embedding", "output_embedding", "table")  # names of the matrices among the parameters


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from zero to the peak, then the decay that config.schedule names, over the steps that are left."""
    left = max(config.steps - config.warmup_steps, 1)
    peak, end = config.learning_rate, config.end_learning_rate
    decays = {
        "linear": lambda: optax.linear_schedule(peak, end, left),
        "cosine": lambda: optax.cosine_decay_schedule(peak, left, alpha=end / peak),
        "constant": lambda: optax.constant_schedule(peak),
    }
    decay = decays[config.schedule]()
    if not config.warmup_steps:
        return decay
    # The first step is number 0; a rate of zero there would waste it.
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def _decayed(params) -> object:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in _DECAYED, params)


def _adamw(config: TrainConfig) -> optax.GradientTransformation:
    return optax.adamw(
        learning_rate(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )


OPTIMIZERS = {"adamw": _adamw}


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, then the optimizer of config.optimizer; weight decay is of matrices alone."""
    optimizer = OPTIMIZERS[config.optimizer](config)
    return optax.chain(optax.clip_by_global_norm(config.clip), optimizer) if config.clip else optimizer
