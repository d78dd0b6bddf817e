"""The training step: a plain function of explicit state, compiled once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flash_lm.config.train import TrainConfig
from flash_lm.data.tasks import NEXT_TOKEN, Task
from flash_lm.layers.parameter import is_stacked, parameter_name
from flash_lm.models.output_heads import Losses
from flash_lm.training.forward import Batch, Carried, forward, split_microbatches
from flash_lm.training.frozen import stop_frozen_gradients
from flash_lm.training.schedule import learning_rate as schedule
from flash_lm.training.schedule_free import gradient_point
from flash_lm.training.teacher_losses import TEACHER_LOSSES
from flash_lm.training.train_state import ModelFunction, Params, TrainState

Metrics = dict[str, jax.Array]


def make_train_step(
    model: ModelFunction,
    optimizer: optax.GradientTransformationExtraArgs,
    config: TrainConfig,
    seed: jax.typing.ArrayLike,
    task: Task = NEXT_TOKEN,
    teacher: ModelFunction | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Makes the train step: the mean loss over the batch's targets, its gradient, clipping, the optimizer.

    All randomness is fold_in(seed, step), so a resumed run has the same random numbers as an uninterrupted one. A step
    with a non-finite loss, gradient or update changes neither the parameters nor the optimizer's state: Adam's bias
    correction counts the gradients in its moments. Only the step advances, and the learning rate with it.
    The carried state is then reset, as at the beginning of a document.

    Args:
        model: model to train.
        optimizer: from `make_optimizer`.
        config: number of microbatches, tokens in a slice of the loss.
        seed: seed of dropout; it may be traced.
        task: the task, which defines the loss.
        teacher: the teacher of `train.teacher`, whose parameters are a further argument of the step; None: none.

    Returns:
        A function (state, batch, learning_rate) -> (state, metrics); metrics are loss (nats per target), penalties (by
        name; not included in loss), grad_norm (perhaps also by group), learning_rate, tokens (targets in the batch),
        measures of the parameters before the update, and whether the step was finite. The learning rate is a float32
        scalar, see `training.schedule`.
    """
    gradients_of = make_gradients(model, config, seed, task, teacher)

    def step(
        state: TrainState, batch: Batch, learning_rate: jax.Array, teacher_params: Params | None = None
    ) -> tuple[TrainState, Metrics]:
        # The loss and its gradient, as sums over the batch's targets: those of microbatches, which may have different
        # numbers of targets, add up. A schedule-free optimizer takes the gradient at another point.
        point = gradient_point(state.opt_state, state.params)
        (total, penalties), gradients, carried = gradients_of(point, state.step, batch, state.carried, teacher_params)

        # The gradient of the mean: one division, by the targets of all microbatches.
        tokens = jnp.maximum(batch["loss_mask_BxL"].sum(), 1)
        gradients = jax.tree.map(lambda g, p: (g / tokens).astype(p.dtype), gradients, state.params)

        # Clipping, the optimizer's rule, weight decay and the learning rate: all of them are in `optimizer`.
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, learning_rate=learning_rate)

        # The gradient's norm is logged before clipping, and the loss without its penalties, so that runs with different
        # penalties can be compared.
        metrics = {
            "loss": (total - sum(penalties.values())) / tokens,
            **{name: penalty / tokens for name, penalty in penalties.items()},
            "grad_norm": optax.tree.norm(gradients),
            **(_norms_by_group(gradients) if config.log_groups else {}),
            "learning_rate": jnp.asarray(learning_rate, jnp.float32),
            "tokens": tokens,
            **model.bind(state.params).measures(),
        }
        params: Any = optax.apply_updates(state.params, updates)

        # One non-finite number would spoil all parameters, so such a step changes none of them.
        metrics["finite"] = finite = _all_finite((metrics["loss"], metrics["grad_norm"], params, opt_state, carried))
        if_finite = lambda new, old: jnp.where(finite, new, old)
        params, opt_state = jax.tree.map(if_finite, (params, opt_state), (state.params, state.opt_state))
        if carried is not None:  # the old state would belong to other sequences than the next ones
            empty = model.bind(state.params).init_state(carried.positions_B.size, carried.capacity)
            carried = jax.tree.map(if_finite, carried, empty)

        # The average of the parameters after each update; a skipped step is none.
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(if_finite, _update_ema(ema, params, config.ema, state.step), ema)

        return TrainState(state.step + 1, params, opt_state, state.constants, carried, ema), metrics

    return step


def make_scheduled_step(
    model: ModelFunction,
    optimizer: optax.GradientTransformationExtraArgs,
    config: TrainConfig,
    seed: int,
    task: Task = NEXT_TOKEN,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`make_train_step` with the config's schedule built in: a function (state, batch) -> (state, metrics)."""
    step, rate = make_train_step(model, optimizer, config, seed, task), schedule(config)
    return lambda state, batch: step(state, batch, jnp.float32(rate(state.step)))


def make_gradients(
    model: ModelFunction,
    config: TrainConfig,
    seed: jax.typing.ArrayLike,
    task: Task = NEXT_TOKEN,
    teacher: ModelFunction | None = None,
) -> Callable[..., tuple[Losses, Params, Carried]]:
    """Makes a function (params, step, batch, carried, teacher_params) -> (loss, penalties), gradient, carried.

    Loss, penalties (which the loss includes) and gradient are sums over the batch's targets, in nats. `carried` is the
    state before or after each sequence; no gradient flows through it. None: each sequence starts afresh.
    """
    of_teacher = teacher and TEACHER_LOSSES[config.teacher_loss].gradients(model, teacher, config)
    of_task = jax.value_and_grad(partial(_loss_sum, model, config, task), has_aux=True)

    def gradients_of(
        params: Params, step: jax.Array, batch: Batch, carried: Carried = None, teacher_params: Any = None
    ) -> tuple[Losses, Params, Carried]:
        loss_and_gradient = of_teacher(teacher_params) if of_teacher else of_task
        if config.microbatches == 1:
            (total, (penalties, carried)), gradient = loss_and_gradient(params, batch, _key(seed, step), carried)
            return (total, penalties), gradient, carried
        batches, keys = microbatches(batch, config.microbatches, seed, step)
        states = carried and carried.split_microbatches(config.microbatches)
        return _accumulate(loss_and_gradient, params, batches, keys, states)

    return gradients_of


def _loss_sum(
    model: ModelFunction,
    config: TrainConfig,
    task: Task,
    params: Params,
    batch: Batch,
    dropout_key: jax.Array,
    carried: Carried,
) -> tuple[jax.Array, tuple[dict[str, jax.Array], Carried]]:
    """The loss that is minimised, a sum over targets in nats; the penalties in it; and the state after the batch."""
    params = stop_frozen_gradients(config.freeze, params)
    bound, head_inputs, carried = forward(model, params, batch, config.loss_chunk, dropout_key, carried)
    factors = {name: getattr(config, name) for name in ("z_loss", "label_smoothing") if getattr(config, name)}
    total, penalties = task.loss(bound.head(), head_inputs, **factors)
    if (penalty := bound.penalty()) is not None:
        # The sublayers' penalty is per target, and the loss is a sum over the targets.
        penalties = penalties | {"penalty": penalty * batch["loss_mask_BxL"].sum()}
        total += penalties["penalty"]
    return total, (penalties, carried)


def _accumulate(
    loss_and_gradient: Callable[..., Any], params: Params, batches: Batch, keys: jax.Array, states: Carried
) -> tuple[Losses, Params, Carried]:
    """Accumulates losses and gradients over microbatches, one after another, in float32."""

    def compute_sums(batch: Batch, key: jax.Array, state: Carried) -> tuple[Any, Carried]:
        (total, (penalties, state)), gradient = loss_and_gradient(params, batch, key, state)
        return ((total, penalties), gradient), state

    def add(totals: Any, inputs: Any) -> tuple[Any, Carried]:
        sums_of_one, state = compute_sums(*inputs)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), totals, sums_of_one), state

    # Float32 zeros in the shapes of one microbatch's sums, then a scan that adds to them.
    inputs = batches, keys, states
    first = jax.tree.map(lambda x: x[0], inputs)
    shapes, _ = jax.eval_shape(lambda: compute_sums(*first))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    (losses, gradient), states = jax.lax.scan(add, zeros, inputs)
    return losses, gradient, states and states.merge_microbatches()


def microbatches(batch: Batch, count: int, seed: jax.typing.ArrayLike, step: jax.Array) -> tuple[Batch, jax.Array]:
    """The microbatches of a step, stacked, and the dropout key of each."""
    key = _key(seed, step)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count)) if count > 1 else key[None]
    return split_microbatches(batch, count), keys


def _norms_by_group(gradients: Params) -> Metrics:
    """Gradient norms per sublayer, over all layers, and of each parameter outside the layers."""
    squares: dict[str, Any] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(gradients):
        parts = parameter_name(path).split("/")
        name = "/".join(parts[: parts.index("layers") + 2 if is_stacked(path) else 1])
        squares[name] = squares.get(name, 0) + jnp.square(x.astype(jnp.float32)).sum()
    return {f"grad_norm/{name}": jnp.sqrt(square) for name, square in squares.items()}


def _update_ema(ema: Params, params: Params, decay: float, step: jax.Array) -> Params:
    """Updates the average, ema ← d ema + (1 − d) params, d = min(decay, (1 + step) / (10 + step))."""
    # The first steps have a smaller decay, so that the random initialisation is forgotten soon.
    decay_now = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda a, p: a + ((1 - decay_now) * (p - a)).astype(a.dtype), ema, params)


def _all_finite(tree: Any) -> jax.Array:
    """Whether all floats of a tree are finite; a small denominator in the optimizer can overflow by itself."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


def _key(seed: jax.typing.ArrayLike, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), step)
