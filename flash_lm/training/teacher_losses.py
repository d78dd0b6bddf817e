"""The losses of `train.teacher_loss`: what a model learns from its teacher."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.train import TrainConfig
from flash_lm.models.facts import FORWARD_AND_BACKWARD
from flash_lm.models.language_model import LanguageModel
from flash_lm.models.layer_pairs import mixer_of, walk_layers
from flash_lm.ops.distillation import distillation
from flash_lm.training.forward import Batch, forward, inputs_of
from flash_lm.training.frozen import frozen_mask, stop_frozen_gradients
from flash_lm.training.train_state import ModelFunction, Params

# (params, batch, dropout key, carried state) -> (loss, (penalties, carried state)), gradient
LossAndGradient = Callable[..., tuple[tuple[jax.Array, tuple[dict[str, jax.Array], None]], Params]]


def _distribution(
    model: ModelFunction, teacher: ModelFunction, config: TrainConfig
) -> Callable[[Params], LossAndGradient]:
    """The loss of the next tokens, and the divergence KL(teacher ‖ model) as a penalty (Hinton et al. 2015)."""

    def loss_sum(teacher_params: Params, params: Params, batch: Batch, dropout_key: jax.Array, carried: None):
        del carried  # a teacher has none
        params = stop_frozen_gradients(config.freeze, params)
        bound, inputs, _ = forward(model, params, batch, config.loss_chunk, dropout_key)
        of_teacher, teacher_inputs, _ = forward(
            teacher, jax.lax.stop_gradient(teacher_params), batch, config.loss_chunk
        )
        heads: Any = bound.head(), of_teacher.head()  # of the softmax, both
        head, teacher_head = heads
        sums: Any = distillation(
            inputs.features_BxLxD,
            head.table_VxD,
            teacher_inputs.features_BxLxD,
            teacher_head.table_VxD,
            inputs.targets_BxL,
            inputs.weights_BxL,
            config.teacher_weight,
            inputs.chunk,
            inputs.parts,
            head.cap,
            teacher_head.cap,
            inputs.few_targets,
        )
        total, divergence = sums
        return total, ({"divergence": divergence}, None)

    return lambda teacher_params: jax.value_and_grad(partial(loss_sum, teacher_params), has_aux=True)


def _layers(model: ModelFunction, teacher: ModelFunction, config: TrainConfig) -> Callable[[Params], LossAndGradient]:
    """The relative error ‖ŷ − y‖² / ‖y‖² of the token mixers' outputs, the mean over the layers.

    Each mixer of the model gets the teacher's own input, so layers do not depend on each other, and one pass over the
    teacher trains all of them with the memory of one ("LoLCATs", section 3.2; MOHAWK, arXiv:2408.10189, stage 2).
    """

    def loss_and_gradient(teacher_params: Params, params: Params, batch: Batch, dropout_key: jax.Array, carried: None):
        del dropout_key, carried
        inputs = inputs_of(model, batch)
        student = model.bind(params)
        _, context = student.embed(inputs)
        graph, trained, others = nnx.split(student.layers, nnx.Param, ...)
        frozen = frozen_mask(config.freeze, params)["layers"]
        real_BxLx1 = (batch["segment_ids_BxL"] > 0)[..., None]

        # By row: devices add up their rows once, after the last layer.
        squares = lambda x_BxLxD: jnp.square(jnp.where(real_BxLx1, x_BxLxD, 0)).sum(axis=(1, 2))

        # The gradient of a layer is taken beside its output, so nothing of the other layers is kept for it.
        def mix(apply: Callable[[jax.Array], jax.Array], h_BxLxD: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            out_BxLxD, (parameters, constants) = apply(h_BxLxD), layer
            y_BxLxD, input_BxLxD = out_BxLxD.astype(jnp.float32), h_BxLxD.astype(student.config.dtype)

            def error(values: Params) -> tuple[jax.Array, jax.Array]:
                values = jax.tree.map(lambda x, stop: jax.lax.stop_gradient(x) if stop else x, values, frozen)
                state = jax.tree.map(lambda leaf: leaf, parameters)
                nnx.replace_by_pure_dict(state, values)
                mixer = mixer_of(nnx.merge(graph, state, constants), student.config.family).sublayer
                errors_B = squares(mixer(input_BxLxD, context).astype(jnp.float32) - y_BxLxD)
                return errors_B.sum(), errors_B

            gradient, errors_B = jax.grad(error, has_aux=True)(nnx.to_pure_dict(parameters))
            return out_BxLxD, (gradient, errors_B, squares(y_BxLxD))

        _, (gradients, errors_NxB, squares_NxB) = walk_layers(
            teacher.bind(teacher_params), inputs, mix, (trained, others)
        )
        # Relative errors, times the targets, by which a step divides. A microbatch may have no token at all.
        factor_N = batch["loss_mask_BxL"].sum() / len(errors_NxB)
        factor_N /= jnp.maximum(squares_NxB.sum(axis=1), jnp.finfo(jnp.float32).tiny)
        scale = lambda g_Nx: g_Nx * factor_N.reshape(-1, *[1] * (g_Nx.ndim - 1)).astype(g_Nx.dtype)
        gradient = jax.tree.map(jnp.zeros_like, params)
        gradient["layers"] = jax.tree.map(scale, gradients)
        return ((errors_NxB.sum(axis=1) * factor_N).sum(), ({}, None)), gradient

    return lambda teacher_params: partial(loss_and_gradient, teacher_params)


def _distribution_flops(model: LanguageModel, teacher: LanguageModel, length: int) -> float:
    return FORWARD_AND_BACKWARD * model.flops_per_token(length) + teacher.flops_per_token(length)


def _layers_flops(model: LanguageModel, teacher: LanguageModel, length: int) -> float:
    # All maps count as trained: with frozen ones, and without the gradient of the mixers' input, a step has fewer.
    mixer = mixer_of(model.layers, model.config.family).sublayer
    a_layer = FORWARD_AND_BACKWARD * mixer.flops_per_token(length, causal=True)
    return model.num_blocks * (a_layer + teacher.layers.flops_per_token(length, causal=True))


@dataclasses.dataclass(frozen=True)
class TeacherLoss:
    """A row of the table of losses.

    Attributes:
        gradients: function (model, teacher, config.train) -> teacher's parameters -> loss and gradient.
        flops: function (model, teacher, length) -> model FLOPs of a training step per token.
        counts: what these FLOPs are of.
    """

    gradients: Callable[[ModelFunction, ModelFunction, TrainConfig], Callable[[Params], LossAndGradient]]
    flops: Callable[[LanguageModel, LanguageModel, int], float]
    counts: str


TEACHER_LOSSES: Mapping[str, TeacherLoss] = {
    "distribution": TeacherLoss(
        _distribution, _distribution_flops, "of the model, forward and backward, and of the teacher, forward"
    ),
    "layers": TeacherLoss(
        _layers, _layers_flops, "of the model's token mixers, forward and backward, and the teacher's layers, forward"
    ),
}
