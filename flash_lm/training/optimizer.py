"""The table of optimizers, and `make_optimizer`: clipping, update rule, weight decay and learning rate, with optax.

Parameters of stacked layers have the layer as their first dimension. Statistics per parameter (norm, root mean square)
are computed for each layer separately, so stacking changes nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flash_lm.config.registry import OPTIMIZERS
from flash_lm.config.train import TrainConfig
from flash_lm.layers.parameter import Traits, is_stacked
from flash_lm.training.frozen import frozen_mask
from flash_lm.training.muon import scale_by_muon
from flash_lm.training.schedule_free import schedule_free

_ADAFACTOR_DECAY = 0.8  # β₂ of step t is 1 − t^−0.8 (Shazeer and Stern 2018, section 7.2)
_ADAFACTOR_EPS = 1e-30  # ε₁ there


def _adamw(config: TrainConfig, traits: Traits) -> list[optax.GradientTransformation]:
    return [optax.scale_by_adam(config.b1, config.b2, config.eps), _weight_decay(config, traits)]


def _radam(config: TrainConfig, traits: Traits) -> list[optax.GradientTransformation]:
    return [optax.scale_by_radam(config.b1, config.b2, config.eps), _weight_decay(config, traits)]


def _lion(config: TrainConfig, traits: Traits) -> list[optax.GradientTransformation]:
    return [optax.scale_by_lion(config.b1, config.b2), _weight_decay(config, traits)]


def _adafactor(config: TrainConfig, traits: Traits) -> list[optax.GradientTransformation]:
    """Without momentum, and with updates relative to the parameter's size; b1, b2 and eps are not used."""
    return [
        optax.scale_by_factored_rms(decay_rate=_ADAFACTOR_DECAY, epsilon=_ADAFACTOR_EPS),
        _apply_per_parameter(optax.clip_by_block_rms(1.0)),
        _apply_per_parameter(optax.scale_by_param_block_rms()),
        _weight_decay(config, traits),
    ]


def _lamb(config: TrainConfig, traits: Traits) -> list[optax.GradientTransformation]:
    return [*_adamw(config, traits), _apply_per_parameter(optax.scale_by_trust_ratio())]


def _muon(config: TrainConfig, traits: Traits) -> list[optax.GradientTransformation]:
    """Muon for the hidden matrices, Adam for all other parameters."""
    rules: Any = {True: scale_by_muon(), False: optax.scale_by_adam(config.b1, config.b2, config.eps)}
    return [optax.partition(rules, traits.hidden), _weight_decay(config, traits)]


def _schedule_free(config: TrainConfig, traits: Traits) -> list[optax.GradientTransformation]:
    """AdamW without a first moment: `schedule_free` averages the iterates instead."""
    rms = optax.scale_by_rms(config.b2, config.eps, eps_in_sqrt=False, bias_correction=True)
    return [rms, _weight_decay(config, traits)]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A row of the table of optimizers.

    Attributes:
        build: function (config.train, traits, *sections) -> the transformations of gradients into updates, without
            clipping and learning rate.
        sections: its sections of keys.
        averages: whether the model is the average of the iterates, see `schedule_free`.
        relative: whether updates are proportional to the size of their parameter.
    """

    build: Callable[..., list[optax.GradientTransformation]]
    sections: tuple[type, ...] = ()
    averages: bool = False
    relative: bool = False


def register_optimizer(name: str, row: Optimizer) -> None:
    """Adds a row to the table of optimizers, for `train.optimizer`.

    >>> register_optimizer("sgd", Optimizer(lambda config, traits: [optax.trace(decay=config.b1)]))
    >>> "sgd" in OPTIMIZERS
    True
    """
    OPTIMIZERS.register(name, row)


register_optimizer("adamw", Optimizer(_adamw))
register_optimizer("radam", Optimizer(_radam))
register_optimizer("lion", Optimizer(_lion))
register_optimizer("adafactor", Optimizer(_adafactor, relative=True))
register_optimizer("lamb", Optimizer(_lamb, relative=True))
register_optimizer("muon", Optimizer(_muon))
register_optimizer("schedule_free_adamw", Optimizer(_schedule_free, averages=True))


def make_optimizer(config: TrainConfig, traits: Traits) -> optax.GradientTransformationExtraArgs:
    """Clipping, then the optimizer config.optimizer; decoupled weight decay of matrices only.

    Its `update` also takes `learning_rate`, that of the step (see `training.schedule`): an input, so that runs that
    differ in their schedules share one compiled program. Gradients of frozen parameters must be zero, as those of the
    step are: they would count in the norm that is clipped.

    Args:
        config: training config.
        traits: the parameters' traits.
    """
    # The chain: clipping, the update rule with weight decay, the learning rate.
    row: Optimizer = OPTIMIZERS[config.optimizer]
    rules = row.build(config, traits, *(config[kind] for kind in row.sections))
    rule = optax.chain(*rules, _scale_by_learning_rate())
    clip = optax.clip_by_global_norm(config.clip)
    clips = {"global": clip, "parameter": _apply_per_parameter(clip)}
    chain = optax.chain(clips[config.clip_mode], rule) if config.clip else rule

    # Frozen parameters: weight decay alone would move them.
    frozen = frozen_mask(config.freeze, traits.matrix)
    # Not 0, because adding it to a parameter of -0 would change it.
    zero_if_frozen = lambda x, is_frozen: jnp.full_like(x, -0.0) if is_frozen else x
    zero_frozen = lambda updates: jax.tree.map(zero_if_frozen, updates, frozen)

    def compute_updates(gradients: Any, state: Any, params: Any, moved: Any, rate: jax.Array) -> tuple[Any, Any]:
        """The updates of the parameters `moved`, from gradients at `params`."""
        updates, state = chain.update(gradients, state, params, learning_rate=rate)
        updates = jax.tree.map(lambda x, factor: x if factor == 1 else x * factor, updates, traits.rate)
        return zero_frozen(jax.tree_util.tree_map_with_path(_project_update, updates, moved, traits.project)), state

    # None of this is part of the chain, which would add to the state: older checkpoints do not have it.
    average = schedule_free(chain.init, compute_updates, config.b1) if row.averages else None

    def update(updates: Any, state: Any, params: Any = None, **inputs: Any) -> tuple[Any, Any]:
        if average is None:
            return compute_updates(updates, state, params, params, inputs["learning_rate"])
        updates, state = average.update(updates, state, params, **inputs)
        return zero_frozen(updates), state

    return optax.GradientTransformationExtraArgs((average or chain).init, update)


def _scale_by_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by −learning_rate. Its state is that of optax's schedules, which checkpoints have."""

    def init(params: Any) -> Any:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **inputs: Any) -> tuple[Any, Any]:
        del params
        return jax.tree.map(lambda x: jnp.asarray(-inputs["learning_rate"], x.dtype) * x, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _project_update(path: Any, update: jax.Array, param: jax.Array, project: Any) -> jax.Array:
    """The update to the projection of the new parameter, such as a span clipped to its range."""
    if not project:
        return update
    return (jax.vmap(project) if is_stacked(path) else project)(param + update) - param


def _weight_decay(config: TrainConfig, traits: Traits) -> optax.GradientTransformation:
    return optax.add_decayed_weights(config.weight_decay, mask=traits.matrix)


def _apply_per_parameter(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a stateless transformation to each parameter separately, and to each layer of a stacked one."""

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        return transform.update(update, optax.EmptyState(), param)[0]  # type: ignore[return-value]

    def apply(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        return (jax.vmap(one) if is_stacked(path) else one)(update, param)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(apply, updates, params))
