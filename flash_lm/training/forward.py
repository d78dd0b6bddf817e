"""The forward pass of training and evaluation: from a batch to the inputs of the model's head."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.models.decode_state import DecodeState
from flash_lm.models.language_model import LanguageModel
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import HeadInputs
from flash_lm.ops.on_mesh import batch_parts
from flash_lm.training.train_state import ModelFunction, Params

Batch = dict[str, jax.Array]
Carried = DecodeState | None  # the state before or after each sequence of a batch; None: each starts afresh


class Forward(NamedTuple):
    """The result of a forward pass.

    Attributes:
        bound: the model with its parameters.
        head_inputs: the arguments of its head's methods.
        carried: the state after the batch.
    """

    bound: LanguageModel
    head_inputs: HeadInputs
    carried: Carried


def forward(
    model: ModelFunction,
    params: Params,
    batch: Batch,
    loss_chunk: int | None,
    dropout_key: jax.Array | None = None,
    carried: Carried = None,
) -> Forward:
    """Computes the features of a batch, up to the head.

    Args:
        model: the model.
        params: its parameters.
        batch: a batch from `data`.
        loss_chunk: tokens whose logits exist at the same time on a device; None: as many as suit it.
        dropout_key: None: deterministic.
        carried: the state before each sequence; None: each starts afresh.
    """
    bound, segment_ids_BxL = model.bind(params), batch["segment_ids_BxL"]
    if carried is None:
        features_BxLxD = bound.features(inputs_of(model, batch), dropout_key)
    else:
        # Sequences that continue a document: the model gets their state, and which ones begin a new document.
        real_BxL = segment_ids_BxL > 0
        begins_B = real_BxL[:, 0] & (batch["positions_BxL"][:, 0] == 0)
        lengths_B = real_BxL.sum(axis=1, dtype=jnp.int32)
        features_BxLxD, carried = bound.carry(batch["inputs_BxL"], carried, lengths_B, begins_B, dropout_key)
    features_BxLxD = bound.pool(features_BxLxD, segment_ids_BxL)
    # A head that pools has one vector per sequence, and so one target: the first.
    targets_BxL, weights_BxL = (batch[name][:, : features_BxLxD.shape[1]] for name in ("targets_BxL", "loss_mask_BxL"))
    parts = batch_parts(features_BxLxD.shape[0])
    head_inputs = HeadInputs(features_BxLxD, targets_BxL, weights_BxL, loss_chunk, parts, model.few_targets)
    return Forward(bound, head_inputs, carried)


def inputs_of(model: ModelFunction, batch: Batch) -> ModelInputs:
    """The inputs of a model in a batch."""
    inputs = ModelInputs.from_batch(batch, packed=model.packed)
    # With one document per sequence all have the same positions.
    return inputs if model.packed else dataclasses.replace(inputs, positions_BxL=None)


def split_microbatches(batch: Batch, count: int) -> Batch:
    """Splits a batch into stacked microbatches: row r goes into r mod count, so each stays sharded over the devices."""
    return jax.tree.map(lambda x_BxL: jnp.swapaxes(x_BxL.reshape(-1, count, *x_BxL.shape[1:]), 0, 1), batch)
