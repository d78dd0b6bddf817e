"""The training step and the evaluation step: plain functions of explicit state, compiled once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flash_lm.config.train import TrainConfig
from flash_lm.data.tasks import NEXT_TOKEN, Task
from flash_lm.layers.parameter import is_stacked, name_of
from flash_lm.models.decode_state import DecodeState
from flash_lm.models.language_model import LanguageModel
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import Losses
from flash_lm.training.frozen import without_gradient
from flash_lm.training.schedule import learning_rate as schedule
from flash_lm.training.schedule_free import gradient_point
from flash_lm.training.sharding import batch_parts
from flash_lm.training.train_state import ModelFunction, Params, TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Carried = DecodeState | None


def make_train_step(
    model: ModelFunction,
    optimizer: optax.GradientTransformationExtraArgs,
    config: TrainConfig,
    seed: int,
    task: Task = NEXT_TOKEN,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """One update: the mean loss over the batch's targets, its gradient, clipping, the optimizer.

    All randomness is fold_in(seed, step), so a resumed run has the same random numbers as an uninterrupted one. A step
    with a non-finite loss, gradient or update changes neither the parameters nor the optimizer's state: Adam's bias
    correction counts the gradients in its moments. Only the step advances, and the learning rate with it.
    A state that is carried from row to row is then forgotten: the next rows begin as documents do.

    Args:
        model: model to train.
        optimizer: from `make_optimizer`.
        config: number of microbatches, tokens in a slice of the loss.
        seed: seed of dropout.
        task: the task, which defines the loss.

    Returns:
        A function (state, batch, learning_rate) -> (state, metrics); metrics are loss (nats a target), penalties (by
        name; not included in loss), grad_norm (perhaps also by group), learning_rate, tokens (targets in the batch),
        measures of the parameters before the update, and whether the step was finite. The learning rate is a float32
        scalar, see `training.schedule`.
    """
    gradients_of = make_gradients(model, config, seed, task)

    def step(state: TrainState, batch: Batch, learning_rate: jax.Array) -> tuple[TrainState, Metrics]:
        at = gradient_point(state.opt_state, state.params)
        (total, penalties), gradients, carried = gradients_of(at, state.step, batch, state.carried)
        tokens = jnp.maximum(batch["loss_mask_BxL"].sum(), 1)
        gradients = jax.tree.map(lambda g, p: (g / tokens).astype(p.dtype), gradients, state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, learning_rate=learning_rate)
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
        metrics["finite"] = finite = _all_finite((metrics["loss"], metrics["grad_norm"], params, opt_state, carried))

        if_finite = lambda new, old: jnp.where(finite, new, old)
        params, opt_state = jax.tree.map(if_finite, (params, opt_state), (state.params, state.opt_state))
        if carried is not None:
            empty = model.bind(state.params).init_state(carried.positions_B.size, carried.capacity)
            carried = jax.tree.map(if_finite, carried, empty)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(if_finite, _averaged(ema, params, config.ema, state.step), ema)
        return TrainState(state.step + 1, params, opt_state, state.constants, carried, ema), metrics

    return step


def make_scheduled_step(
    model: ModelFunction,
    optimizer: optax.GradientTransformationExtraArgs,
    config: TrainConfig,
    seed: int,
    task: Task = NEXT_TOKEN,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`make_train_step` with the config's own schedule in it: a function (state, batch) -> (state, metrics)."""
    step, rate = make_train_step(model, optimizer, config, seed, task), schedule(config)
    return lambda state, batch: step(state, batch, jnp.float32(rate(state.step)))


def make_gradients(
    model: ModelFunction, config: TrainConfig, seed: int, task: Task = NEXT_TOKEN
) -> Callable[..., tuple[Losses, Params, Carried]]:
    """A function (params, step, batch, carried=None) -> the loss and the penalties in it, the gradient, and `carried`.

    The first two are sums over the batch's targets, in nats. `carried` is the state before each row, or after it; no
    gradient flows through it. None: no row continues another.
    """
    factors = {name: getattr(config, name) for name in ("z_loss", "label_smoothing") if getattr(config, name)}

    def loss_sum(params: Params, batch: Batch, key: jax.Array, carried: Carried) -> tuple[jax.Array, Any]:
        params = without_gradient(config.freeze, params)
        bound, predictions, carried = _predictions(model, params, batch, config.loss_chunk, key, carried)
        total, penalties = task.loss(bound.head(), *predictions, **factors)
        if (penalty := bound.penalty()) is not None:
            penalties = penalties | {"penalty": penalty * batch["loss_mask_BxL"].sum()}
            total += penalties["penalty"]
        return total, (penalties, carried)

    def summed(params: Params, batch: Batch, key: jax.Array, carried: Carried) -> tuple[Any, Carried]:
        (total, (penalties, carried)), gradient = jax.value_and_grad(loss_sum, has_aux=True)(
            params, batch, key, carried
        )
        return ((total, penalties), gradient), carried

    def gradients_of(
        params: Params, step: jax.Array, batch: Batch, carried: Carried = None
    ) -> tuple[Losses, Params, Carried]:
        if config.accumulate == 1:
            found, carried = summed(params, batch, _key(seed, step), carried)
            return *found, carried

        def add(total, part):
            here, after = summed(params, *part)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, here), after

        parts = (*microbatches(batch, config.accumulate, seed, step), carried and carried.cut(config.accumulate))
        first = jax.tree.map(lambda x: x[0], parts)
        shapes, _ = jax.eval_shape(lambda: summed(params, *first))
        found, after = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes), parts)
        return *found, after and after.put_together()

    return gradients_of


def microbatches(batch: Batch, count: int, seed: int, step: jax.Array) -> tuple[Batch, jax.Array]:
    """The microbatches of a step, stacked, and the dropout key of each."""
    key = _key(seed, step)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count)) if count > 1 else key[None]
    return _cut(batch, count), keys


def _cut(batch: Batch, count: int) -> Batch:
    """Microbatches, stacked: every count-th row goes into the same one, so that each stays spread over the devices."""
    return jax.tree.map(lambda x_BxL: jnp.swapaxes(x_BxL.reshape(-1, count, *x_BxL.shape[1:]), 0, 1), batch)


def make_evaluation_step(
    model: ModelFunction, loss_chunk: int, task: Task = NEXT_TOKEN
) -> Callable[[Params, Batch, jax.Array], dict[str, jax.Array]]:
    """Sums over one batch, to add up over batches, so that no result depends on the batch size.

    Returns:
        A function (params, batch, bytes_per_token_V) -> the task's scores, nll (nats) and perhaps hits (targets that
        are the likeliest token), and tokens and bytes of the batch's targets. If the batch has slices_BxKxL, each is an
        array whose first axis is K: of the targets in each slice.
    """

    def step(params: Params, batch: Batch, bytes_per_token_V: jax.Array) -> dict[str, jax.Array]:
        bound, predictions, _ = _predictions(model, params, batch, loss_chunk, None, None)
        weights = predictions[2]
        if "slices_BxKxL" in batch:
            weights = weights * jnp.moveaxis(batch["slices_BxKxL"][..., : weights.shape[1]], 1, 0)
        scores = _scores(task, bound, predictions, bytes_per_token_V)
        return {name: _of_rows(x, weights).sum(axis=weights.ndim - 2) for name, x in scores.items()}

    return step


def make_carried_evaluation_step(
    model: ModelFunction, loss_chunk: int, task: Task = NEXT_TOKEN, parts: int = 1
) -> Callable[[Params, Batch, jax.Array, DecodeState], tuple[dict[str, jax.Array], DecodeState]]:
    """Sums over each row of a batch whose rows continue those of the batch before.

    Returns:
        A function (params, batch, bytes_per_token_V, carried) -> the task's scores, tokens and bytes of each row, and
        the position where it begins, B each; and the state after the rows. It computes `parts` microbatches one after
        another.
    """

    def of_part(params: Params, batch: Batch, bytes_per_token_V: jax.Array, carried: DecodeState):
        bound, predictions, after = _predictions(model, params, batch, loss_chunk, None, carried)
        scores = _scores(task, bound, predictions, bytes_per_token_V)
        sums = {name: _of_rows(x, predictions[2]) for name, x in scores.items()}
        assert after is not None
        return sums | {"start": batch["positions_BxL"][:, 0]}, after

    def step(params: Params, batch: Batch, bytes_per_token_V: jax.Array, carried: DecodeState):
        of_one = lambda part: of_part(params, part[0], bytes_per_token_V, part[1])
        sums, after = jax.lax.map(of_one, (_cut(batch, parts), carried.cut(parts)))
        return {name: jnp.swapaxes(x, 0, 1).reshape(-1) for name, x in sums.items()}, after.put_together()

    return of_part if parts == 1 else step


def _predictions(
    model: ModelFunction, params: Params, batch: Batch, loss_chunk: int, key: jax.Array | None, carried: Carried
) -> tuple[LanguageModel, tuple[jax.Array, jax.Array, jax.Array, int, int], Carried]:
    """The model, the arguments of its head's methods, and the state after the rows."""
    bound, segment_ids_BxL, positions_BxL = model.bind(params), batch["segment_ids_BxL"], batch["positions_BxL"]
    if carried is None:
        inputs = ModelInputs.from_batch(batch, packed=model.packed)
        if not model.packed:  # without documents all rows have the same positions
            inputs = dataclasses.replace(inputs, positions_BxL=None)
        features_BxLxD = bound.features(inputs, key)
    else:
        real_BxL = segment_ids_BxL > 0
        begins_B = real_BxL[:, 0] & (positions_BxL[:, 0] == 0)
        features_BxLxD, carried = bound.carry(
            batch["inputs_BxL"], carried, real_BxL.sum(axis=1, dtype=jnp.int32), begins_B, key
        )
    features_BxLxD = bound.pooled(features_BxLxD, segment_ids_BxL)
    # A row that is one vector has one target, its first.
    targets_BxL, weights_BxL = (batch[name][:, : features_BxLxD.shape[1]] for name in ("targets_BxL", "loss_mask_BxL"))
    parts = batch_parts(features_BxLxD.shape[0])
    return bound, (features_BxLxD, targets_BxL, weights_BxL, loss_chunk, parts), carried


def _scores(
    task: Task, bound: LanguageModel, predictions: tuple[Any, ...], bytes_per_token_V: jax.Array
) -> dict[str, jax.Array]:
    """Of each target, B×T×…: the task's scores, and what its sums count, tokens and bytes."""
    _, targets_BxT, *_ = predictions
    bytes_BxT = bytes_per_token_V[targets_BxT].astype(jnp.float32)
    counts = {"tokens": jnp.ones(targets_BxT.shape, jnp.float32), "bytes": bytes_BxT}
    return task.scores(bound.head(), *predictions) | counts


def _of_rows(x_BxTx: jax.Array, weights_xBxT: jax.Array) -> jax.Array:
    """The weighted sum over each row's targets, …×B×…; where the weight is 0 there may be anything."""
    weights = weights_xBxT.reshape(*weights_xBxT.shape, *(1,) * (x_BxTx.ndim - 2))
    return jnp.where(weights > 0, x_BxTx * weights, 0).sum(axis=weights_xBxT.ndim - 1)


def _norms_by_group(gradients: Params) -> Metrics:
    """The norm of each sublayer's gradient, over all layers, and of what is around the layers."""
    squares: dict[str, Any] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(gradients):
        parts = name_of(path).split("/")
        name = "/".join(parts[: parts.index("layers") + 2 if is_stacked(path) else 1])
        squares[name] = squares.get(name, 0) + jnp.square(x.astype(jnp.float32)).sum()
    return {f"grad_norm/{name}": jnp.sqrt(square) for name, square in squares.items()}


def _averaged(ema: Params, params: Params, decay: float, step: jax.Array) -> Params:
    """The exponential moving average after a step; the first ones count more, or it would be of random parameters."""
    decay_now = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda a, p: a + ((1 - decay_now) * (p - a)).astype(a.dtype), ema, params)


def _all_finite(tree: Any) -> jax.Array:
    """Checks everything a step makes: a tiny denominator in the optimizer can overflow with a finite gradient."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


def _key(seed: int, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), step)
