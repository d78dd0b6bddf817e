"""The forward pass of training and evaluation: from a batch to what the model's head takes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.models.decode_state import DecodeState
from flash_lm.models.language_model import LanguageModel
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import HeadInputs
from flash_lm.training.sharding import batch_parts
from flash_lm.training.train_state import ModelFunction, Params

Batch = dict[str, jax.Array]
Carried = DecodeState | None  # the state before each row of a batch, or after it; None: no row continues another


class Forward(NamedTuple):
    """The result of a forward pass.

    Attributes:
        bound: the model with its parameters.
        head_inputs: the arguments of its head's methods.
        carried: the state after the rows.
    """

    bound: LanguageModel
    head_inputs: HeadInputs
    carried: Carried


def forward(
    model: ModelFunction,
    params: Params,
    batch: Batch,
    loss_chunk: int,
    dropout_key: jax.Array | None = None,
    carried: Carried = None,
) -> Forward:
    """Computes the features of a batch, up to the head.

    Args:
        model: the model.
        params: its parameters.
        batch: rows from `data`.
        loss_chunk: tokens whose logits exist at the same time on a device.
        dropout_key: None: deterministic.
        carried: the state before the rows; None: no row continues another.
    """
    bound, segment_ids_BxL = model.bind(params), batch["segment_ids_BxL"]
    if carried is None:
        inputs = ModelInputs.from_batch(batch, packed=model.packed)
        if not model.packed:  # without documents all rows have the same positions
            inputs = dataclasses.replace(inputs, positions_BxL=None)
        features_BxLxD = bound.features(inputs, dropout_key)
    else:
        real_BxL = segment_ids_BxL > 0
        begins_B = real_BxL[:, 0] & (batch["positions_BxL"][:, 0] == 0)
        lengths_B = real_BxL.sum(axis=1, dtype=jnp.int32)
        features_BxLxD, carried = bound.carry(batch["inputs_BxL"], carried, lengths_B, begins_B, dropout_key)
    features_BxLxD = bound.pooled(features_BxLxD, segment_ids_BxL)
    # A row that is one vector has one target, its first.
    targets_BxL, weights_BxL = (batch[name][:, : features_BxLxD.shape[1]] for name in ("targets_BxL", "loss_mask_BxL"))
    parts = batch_parts(features_BxLxD.shape[0])
    return Forward(bound, HeadInputs(features_BxLxD, targets_BxL, weights_BxL, loss_chunk, parts), carried)


def cut(batch: Batch, count: int) -> Batch:
    """Microbatches, stacked: every count-th row goes into the same one, so that each stays spread over the devices."""
    return jax.tree.map(lambda x_BxL: jnp.swapaxes(x_BxL.reshape(-1, count, *x_BxL.shape[1:]), 0, 1), batch)
