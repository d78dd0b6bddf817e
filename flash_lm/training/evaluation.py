"""Perplexity of a split: sums weighted by tokens, so that no result depends on the batch size."""

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
from flash_lm.training.label_scores import scores_of_confusion
from flash_lm.training.sharding import batch_sharding, place, rows_that_divide, share_of
from flash_lm.training.train_state import ModelFunction, Params

_LARGEST_EXPONENT = 709  # exp overflows above it


class Evaluator:
    """Evaluates the parameters of a model; used by the evaluate command and during training."""

    def __init__(
        self, model: ModelFunction, tokenizer: Tokenizer, mesh: Mesh, loss_chunk: int, task: Task = NEXT_TOKEN
    ):
        """Compiles nothing before the first call.

        Args:
            model: model to score.
            tokenizer: the rows' tokenizer.
            mesh: mesh of the parameters.
            loss_chunk: tokens whose logits exist at the same time on a device.
            task: the task, which defines the scores.
        """
        self._mesh = mesh
        self._step = jax.jit(make_evaluation_step(model, loss_chunk, task))
        self._bytes_per_token = bytes_per_token(model, tokenizer)

    def __call__(
        self, params: Params, rows: Rows, batch_size: int, limit: int = 0, blocks: int = 0, parts: int = 1
    ) -> dict[str, Any]:
        """Scores each row once; call it inside `jax.set_mesh`.

        Args:
            params: the model's parameters.
            rows: rows of a split.
            batch_size: B; rounded up to a multiple of the devices.
            limit: number of batches, of `parts` × B rows each; 0 = all.
            blocks: number of blocks of consecutive batches whose sums are returned, too; fewer if there are fewer
                batches; 0: none.
            parts: batches of B that are counted as one, see `evaluation_batches`.

        Returns:
            loss (nats a token), perplexity (a token), accuracy (share of the targets that are the likeliest token; not
            for images), bits_per_byte; and nll (nats), tokens and bytes, the sums over all targets. If targets are
            labels, "tokens" counts them, the scores of `scores_of_confusion` are there, and no bytes. With `blocks`,
            also nll_blocks and tokens_blocks, which tell how much a difference of two models varies over the text.
        """
        return scores_of(self.sums(params, rows, batch_size, limit, blocks, parts))

    def of_slices(self, params: Params, rows: SlicedRows, batch_size: int, blocks: int = 0) -> list[dict[str, Any]]:
        """As a call, for each slice."""
        sums: Any = self.sums(params, rows, batch_size, blocks=blocks)
        return [scores_of({key: x[k] for key, x in sums.items()}) for k in range(len(rows.names))]

    def sums(
        self, params: Params, rows: Rows, batch_size: int, limit: int = 0, blocks: int = 0, parts: int = 1
    ) -> collections.Counter[str]:
        """What scores are made of, see `make_evaluation_step`, for the same arguments. Blocks are a last axis."""
        sharding, sums = batch_sharding(self._mesh), collections.Counter()
        of_batches: dict[str, list[np.ndarray]] = {name: [] for name in ("nll", "tokens")}
        share = share_of(sharding, rows_that_divide(batch_size, self._mesh))
        for batch in evaluation_batches(rows, share, limit, parts):
            here = jax.device_get(self._step(params, place(batch, sharding, share), self._bytes_per_token))
            # Python floats: a float32 sum over a long split would lose the last tokens.
            sums.update({name: x.astype(float) if x.ndim else float(x) for name, x in here.items()})
            for name, found in of_batches.items():
                found.append(here[name].astype(float))
        if blocks:
            sums.update({f"{name}_blocks": in_blocks(found, blocks) for name, found in of_batches.items()})
        return sums


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
        result = forward(model, params, batch, loss_chunk)
        weights = result.head_inputs.weights_BxL
        if "slices_BxKxL" in batch:
            weights = weights * jnp.moveaxis(batch["slices_BxKxL"][..., : weights.shape[1]], 1, 0)
        scores = target_scores(task, result, bytes_per_token_V)
        return {name: row_sums(x, weights).sum(axis=weights.ndim - 2) for name, x in scores.items()}

    return step


def target_scores(task: Task, result: Forward, bytes_per_token_V: jax.Array) -> dict[str, jax.Array]:
    """Of each target, B×T×…: the task's scores, and what its sums count, tokens and bytes."""
    targets_BxT = result.head_inputs.targets_BxL
    bytes_BxT = bytes_per_token_V[targets_BxT].astype(jnp.float32)
    counts = {"tokens": jnp.ones(targets_BxT.shape, jnp.float32), "bytes": bytes_BxT}
    return task.scores(result.bound.head(), result.head_inputs) | counts


def row_sums(x_BxTx: jax.Array, weights_xBxT: jax.Array) -> jax.Array:
    """The weighted sum over each row's targets, …×B×…; where the weight is 0 there may be anything."""
    weights = weights_xBxT.reshape(*weights_xBxT.shape, *(1,) * (x_BxTx.ndim - 2))
    return jnp.where(weights > 0, x_BxTx * weights, 0).sum(axis=weights_xBxT.ndim - 1)


def in_blocks(of_batches: list[np.ndarray], blocks: int) -> np.ndarray:
    """Sums of at most so many blocks of consecutive batches, as the last axis.

    Args:
        of_batches: a sum of each batch, scalars or arrays of one shape.
        blocks: how many, at most.
    """
    parts = np.array_split(np.stack(of_batches), min(blocks, len(of_batches)))
    return np.stack([part.sum(axis=0) for part in parts], axis=-1)


def bytes_per_token(model: ModelFunction, tokenizer: Tokenizer) -> np.ndarray:
    """The bytes of text of each word of the model's vocabulary, V int32."""
    found = np.zeros(model.config.vocab_size, np.int32)
    known = tokenizer.bytes_per_token()
    found[: len(known)] = known
    return found


def scores_of(sums: Mapping[str, Any]) -> dict[str, Any]:
    """What `Evaluator` returns, from the sums over all targets; labels are targets whose predictions were counted."""
    of = lambda what, each: sums[what] / sums[each] if sums[each] else math.nan
    scores = {
        "loss": of("nll", "tokens"),
        "perplexity": perplexity(sums["nll"], sums["tokens"]),
        **({"accuracy": of("hits", "tokens")} if "hits" in sums else {}),
        "bits_per_byte": of("nll", "bytes") / math.log(2),
        **{name: sums[name] for name in ("nll", "tokens", "bytes")},
        **{name: np.asarray(x).round(3).tolist() for name, x in sums.items() if name.endswith("_blocks")},
    }
    if "confusion" not in sums:
        return scores
    of_labels = {name: x for name, x in scores.items() if name not in ("bits_per_byte", "bytes")}
    return of_labels | scores_of_confusion(sums["confusion"])


def perplexity(nll: float, count: float) -> float:
    """exp(nll / count); infinite on overflow, NaN if count is 0."""
    if not count:
        return math.nan
    return math.exp(nll / count) if nll / count < _LARGEST_EXPONENT else math.inf
