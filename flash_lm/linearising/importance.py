"""Which layers of a model need their softmax: the divergence when one layer alone has the other token mixer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.data.batches import chosen_rows, stack
from flash_lm.data.packing import Rows
from flash_lm.errors import Stopped
from flash_lm.inference.model import TrainedModel
from flash_lm.models.layer_pairs import mixer_of, walk_layers
from flash_lm.ops.distillation import distillation
from flash_lm.training.forward import Batch, inputs_of
from flash_lm.training.train_state import Params


def layer_divergences(
    teacher: TrainedModel,
    student: TrainedModel,
    rows: Rows,
    batch_size: int = 4,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[float]:
    """KL(teacher ‖ teacher with the student's token mixer in one layer) for each layer, nats per target.

    Args:
        teacher: a model without `model.pattern`.
        student: a model of the same number of layers and the same width, without `model.pattern`.
        rows: packed sequences.
        batch_size: sequences at a time.
        should_stop: called before each layer.

    Raises:
        Stopped: `should_stop` returned true; what was computed is lost.
    """

    @jax.jit
    def features(params: Params, batch: Batch) -> jax.Array:
        return teacher.model.bind(params).features(inputs_of(teacher.model, batch))

    @jax.jit
    def divergence(
        params: Params, student_params: Params, layer: jax.Array, batch: Batch, expected_BxLxD: jax.Array
    ) -> jax.Array:
        """The sum over targets with the student's mixer in one layer."""
        bound, other = teacher.model.bind(params), student.model.bind(student_params)
        inputs = inputs_of(teacher.model, batch)
        _, context = other.embed(inputs)
        graph, stacked = nnx.split(other.layers)

        def mix(apply: Any, h_BxLxD: jax.Array, values: Any) -> tuple[jax.Array, None]:
            number, parameters = values
            mixer = mixer_of(nnx.merge(graph, parameters), other.config.family).sublayer
            return jax.lax.cond(number == layer, lambda h: mixer(h, context), apply, h_BxLxD), None

        x_BxLxD, _ = walk_layers(bound, inputs, mix, (jnp.arange(bound.num_blocks), stacked))
        head: Any = bound.head()
        weights = batch["loss_mask_BxL"]
        both = x_BxLxD, head.table_VxD, expected_BxLxD, head.table_VxD
        sums: Any = distillation(*both, batch["targets_BxL"], weights, 1.0, None, 1, head.cap, head.cap)
        return sums[1]

    totals = np.zeros(teacher.config.model.num_layers)
    targets = 0.0
    with jax.set_mesh(teacher.mesh):
        for numbers in chosen_rows(len(rows), batch_size):
            batch = stack([rows[i] for i in numbers])
            expected = features(teacher.params, batch)
            for layer in range(len(totals)):
                if should_stop():
                    raise Stopped
                totals[layer] += divergence(teacher.params, student.params, jnp.int32(layer), batch, expected)
            targets += float(batch["loss_mask_BxL"].sum())
    return (totals / targets).tolist()


def most_important(divergences: Sequence[float], count: int) -> list[int]:
    """The layers with the largest divergences, in order of the model.

    >>> most_important([0.1, 0.5, 0.2, 0.4], 2)
    [1, 3]
    """
    return sorted(int(layer) for layer in np.argsort(divergences, kind="stable")[::-1][:count])


def pattern_of(softmax: Sequence[int], num_layers: int, families: tuple[str, str]) -> tuple[str, ...]:
    """The shortest `model.pattern` with the first family in the given layers and the second in all others.

    >>> pattern_of([1, 3], 4, ("transformer_plus_plus", "window_linear"))
    ('window_linear', 'transformer_plus_plus')
    """
    kept, other = families
    layers = [kept if layer in softmax else other for layer in range(num_layers)]
    periods = (n for n in range(1, num_layers + 1) if num_layers % n == 0)
    return next(tuple(layers[:n]) for n in periods if layers == layers[:n] * (num_layers // n))
