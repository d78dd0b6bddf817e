"""Perplexity and other scores of a split: sums over all tokens, so that no result depends on the batch size."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from flash_lm.data.batches import evaluation_batches
from flash_lm.data.packing import Rows
from flash_lm.data.slices import SlicedRows
from flash_lm.data.tasks import NEXT_TOKEN, Task
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.training.forward import Batch, Forward, forward
from flash_lm.training.label_scores import confusion_scores
from flash_lm.training.sharding import batch_sharding, host_share, round_up_rows, shard_batch
from flash_lm.training.train_state import ModelFunction, Params

_LARGEST_EXPONENT = 709  # exp overflows above it


class Evaluator:
    """Scores the parameters of a model on a split; used by the evaluate command and during training."""

    def __init__(
        self, model: ModelFunction, tokenizer: Tokenizer, mesh: Mesh, loss_chunk: int | None, task: Task = NEXT_TOKEN
    ):
        """Compiles nothing before the first call.

        Args:
            model: model to score.
            tokenizer: tokenizer of the text.
            mesh: mesh of the parameters.
            loss_chunk: tokens whose logits exist at the same time on a device; None: as many as suit it.
            task: the task, which defines the scores.
        """
        self._mesh = mesh
        self._step = jax.jit(make_evaluation_step(model, loss_chunk, task))
        self._bytes_per_token = bytes_per_token(model, tokenizer)

    def __call__(
        self, params: Params, rows: Rows, batch_size: int, limit: int = 0, blocks: int = 0, parts: int = 1
    ) -> dict[str, Any]:
        """Scores each sequence once; call it inside `jax.set_mesh`.

        Args:
            params: the model's parameters.
            rows: sequences of a split.
            batch_size: B; rounded up to a multiple of the devices.
            limit: number of batches, of `parts` × B sequences each; 0 = all.
            blocks: number of blocks of consecutive batches whose sums are returned, too; at most one per batch; 0:
                none.
            parts: number of batches of B that count as one, see `evaluation_batches`.

        Returns:
            loss (nats per token), perplexity (per token), accuracy (share of the targets that are the likeliest token;
            not for images), bits_per_byte; and nll (nats), tokens and bytes, the sums over all targets. If targets are
            labels, "tokens" counts them, and the scores of `confusion_scores` replace those of bytes. With `blocks`
            also nll_blocks and tokens_blocks, which tell how much a difference of two models varies over the text.
        """
        return compute_scores(self.sums(params, rows, batch_size, limit, blocks, parts))

    def evaluate_slices(
        self, params: Params, rows: SlicedRows, batch_size: int, blocks: int = 0
    ) -> list[dict[str, Any]]:
        """Scores each slice of the sequences; returns one dict per slice, as a call does."""
        sums: Any = self.sums(params, rows, batch_size, blocks=blocks)
        return [compute_scores({key: x[k] for key, x in sums.items()}) for k in range(len(rows.names))]

    def sums(
        self, params: Params, rows: Rows, batch_size: int, limit: int = 0, blocks: int = 0, parts: int = 1
    ) -> collections.Counter[str]:
        """The sums of `make_evaluation_step` over all batches, for the arguments of a call; blocks are a last axis."""
        sharding, sums = batch_sharding(self._mesh), collections.Counter()
        by_batch: dict[str, list[np.ndarray]] = {name: [] for name in ("nll", "tokens")}
        share = host_share(sharding, round_up_rows(batch_size, self._mesh))
        for batch in evaluation_batches(rows, share, limit, parts):
            batch_sums = jax.device_get(self._step(params, shard_batch(batch, sharding, share), self._bytes_per_token))
            # Python floats: a float32 sum over a long split would lose the last tokens.
            sums.update({name: x.astype(float) if x.ndim else float(x) for name, x in batch_sums.items()})
            for name, values in by_batch.items():
                values.append(batch_sums[name].astype(float))
        if blocks:
            sums.update({f"{name}_blocks": block_sums(values, blocks) for name, values in by_batch.items()})
        return sums


def make_evaluation_step(
    model: ModelFunction, loss_chunk: int | None, task: Task = NEXT_TOKEN
) -> Callable[[Params, Batch, jax.Array], dict[str, jax.Array]]:
    """Makes the evaluation step, which sums over one batch; the sums are then added over batches.

    Returns:
        A function (params, batch, bytes_per_token_V) -> the task's scores, nll (nats) and perhaps hits (targets that
        are the likeliest token), and the numbers of tokens and bytes of the batch's targets. If the batch has
        slices_BxKxL, each sum is an array whose first axis is K, over the targets in each slice.
    """

    def step(params: Params, batch: Batch, bytes_per_token_V: jax.Array) -> dict[str, jax.Array]:
        result = forward(model, params, batch, loss_chunk)
        weights = result.head_inputs.weights_BxL
        # A slice is a mask over the targets: one forward pass scores them all.
        if "slices_BxKxL" in batch:
            weights = weights * jnp.moveaxis(batch["slices_BxKxL"][..., : weights.shape[1]], 1, 0)
        scores = target_scores(task, result, bytes_per_token_V)
        return {name: row_sums(x, weights).sum(axis=weights.ndim - 2) for name, x in scores.items()}

    return step


def target_scores(task: Task, result: Forward, bytes_per_token_V: jax.Array) -> dict[str, jax.Array]:
    """The task's scores of each target, and the tokens and bytes that it counts for, B×T×… each."""
    targets_BxT = result.head_inputs.targets_BxL
    bytes_BxT = bytes_per_token_V[targets_BxT].astype(jnp.float32)
    counts = {"tokens": jnp.ones(targets_BxT.shape, jnp.float32), "bytes": bytes_BxT}
    return task.scores(result.bound.head(), result.head_inputs) | counts


def row_sums(x_BxTx: jax.Array, weights_xBxT: jax.Array) -> jax.Array:
    """Weighted sum over the targets of each sequence, …×B×…; x may be anything, even NaN, where the weight is 0."""
    weights = weights_xBxT.reshape(*weights_xBxT.shape, *(1,) * (x_BxTx.ndim - 2))
    return jnp.where(weights > 0, x_BxTx * weights, 0).sum(axis=weights_xBxT.ndim - 1)


def block_sums(by_batch: list[np.ndarray], blocks: int) -> np.ndarray:
    """Sums over blocks of consecutive batches; the blocks are the last axis.

    >>> block_sums([np.array(1.0), np.array(2.0), np.array(3.0)], blocks=2).tolist()
    [3.0, 3.0]

    Args:
        by_batch: the sum of each batch, scalars or arrays of one shape.
        blocks: largest number of blocks.
    """
    parts = np.array_split(np.stack(by_batch), min(blocks, len(by_batch)))
    return np.stack([part.sum(axis=0) for part in parts], axis=-1)


def bytes_per_token(model: ModelFunction, tokenizer: Tokenizer) -> np.ndarray:
    """Number of bytes of each word of the model's vocabulary, V int32; 0 beyond the tokenizer's words."""
    bytes_V = np.zeros(model.config.vocab_size, np.int32)
    known_bytes = tokenizer.bytes_per_token()
    bytes_V[: len(known_bytes)] = known_bytes
    return bytes_V


def compute_scores(sums: Mapping[str, Any]) -> dict[str, Any]:
    """The scores that `Evaluator` returns, from the sums over all targets; a "confusion" means targets are labels."""
    mean = lambda total, count: sums[total] / sums[count] if sums[count] else math.nan
    scores = {
        "loss": mean("nll", "tokens"),
        "perplexity": perplexity(sums["nll"], sums["tokens"]),
        **({"accuracy": mean("hits", "tokens")} if "hits" in sums else {}),
        "bits_per_byte": mean("nll", "bytes") / math.log(2),
        **{name: sums[name] for name in ("nll", "tokens", "bytes")},
        **{name: np.asarray(x).round(3).tolist() for name, x in sums.items() if name.endswith("_blocks")},
    }
    if "confusion" not in sums:
        return scores
    label_scores = {name: x for name, x in scores.items() if name not in ("bits_per_byte", "bytes")}
    return label_scores | confusion_scores(sums["confusion"])


def perplexity(nll: float, count: float) -> float:
    """exp(nll / count); infinite on overflow, NaN if count is 0.

    >>> perplexity(math.log(8), 3)
    2.0
    """
    if not count:
        return math.nan
    return math.exp(nll / count) if nll / count < _LARGEST_EXPONENT else math.inf
