"""Perplexity of documents of any length: the decode state is carried from one segment of a document to the next."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from flash_lm.data.carried import carried_once
from flash_lm.data.examples import Examples
from flash_lm.data.tasks import NEXT_TOKEN, Task
from flash_lm.data.tokenized_text import TokenizedText
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.models.decode_state import DecodeState
from flash_lm.runs.hosts import fetch_array
from flash_lm.training.evaluation import bytes_per_token, compute_scores, perplexity, row_sums, target_scores
from flash_lm.training.forward import Batch, forward, split_microbatches
from flash_lm.training.sharding import batch_sharding, carried_shardings, host_share, round_up_rows, shard_batch
from flash_lm.training.train_state import ModelFunction, Params

Sums = collections.Counter[str]


class CarriedEvaluator:
    """Scores each document from its beginning to its end, in segments of L tokens."""

    def __init__(
        self,
        model: ModelFunction,
        tokenizer: Tokenizer,
        mesh: Mesh,
        loss_chunk: int | None,
        task: Task = NEXT_TOKEN,
        parts: int = 1,
    ):
        """Compiles nothing before the first call.

        Args:
            model: model to score.
            tokenizer: the documents' tokenizer.
            mesh: mesh of the parameters.
            loss_chunk: tokens whose logits exist at the same time on a device; None: as many as suit it.
            task: the task, which defines the scores.
            parts: number of microbatches per batch. The documents that are read together stay the same.

        Raises:
            InputError: the model's state cannot be carried.
        """
        model.abstract.check_carried()
        self._model, self._mesh = model, mesh
        self._step = jax.jit(make_carried_evaluation_step(model, loss_chunk, task, parts))
        self._init_state = functools.cache(self._compile_init_state)
        self._bytes_per_token = bytes_per_token(model, tokenizer)

    def __call__(
        self,
        params: Params,
        split: TokenizedText | Examples,
        length: int,
        batch_size: int,
        limit: int = 0,
        first: int | None = None,
        by_position: bool = False,
    ) -> dict[str, Any]:
        """Scores each document once, from its beginning; call it inside `jax.set_mesh`.

        Args:
            params: the model's parameters.
            split: the tokens of a split, or examples that all have a `size`.
            length: L, tokens per segment.
            batch_size: documents at a time, a multiple of `parts`; rounded up to a multiple of the devices.
            limit: number of batches; 0 = all.
            first: number of tokens of each document to score, in complete segments; None: all.
            by_position: also score each segment without the segments before it, and return both by position.

        Returns:
            The scores of `Evaluator`. With `by_position` also "by_position", for positions `from` to `to` (not
            included): number of tokens, `perplexity`, and `perplexity_alone`, without the segments before.
        """
        sharding = batch_sharding(self._mesh)
        share = host_share(sharding, round_up_rows(batch_size, self._mesh))
        empty = carried = self._init_state(share.batch_size)(params)

        def score(batch: Any, carried: Any) -> tuple[dict[str, np.ndarray], Any]:
            sums, carried_after = self._step(
                params, shard_batch(batch, sharding, share), self._bytes_per_token, carried
            )
            return {name: fetch_array(x).astype(float) for name, x in sums.items()}, carried_after

        # Each batch continues the documents of the batch before, so the state goes on with them.
        sums, by_start = collections.Counter(), collections.defaultdict(collections.Counter)
        for batch in carried_once(split, length, share, limit, first):
            batch_sums, carried = score(batch, carried)
            starts = batch_sums.pop("start")
            sums.update({name: float(x.sum()) for name, x in batch_sums.items()})
            if by_position:
                # The same segments again, as if each began a document.
                positions_BxL = batch["positions_BxL"]
                alone, _ = score(batch | {"positions_BxL": positions_BxL - positions_BxL[:, :1]}, empty)
                for start, tokens, nll, nll_alone in zip(
                    starts, batch_sums["tokens"], batch_sums["nll"], alone["nll"], strict=True
                ):
                    by_start[int(start)].update(tokens=tokens, nll=nll, nll_alone=nll_alone)
        return compute_scores(sums) | (
            {"by_position": _perplexity_by_position(by_start, length)} if by_position else {}
        )

    def _compile_init_state(self, rows: int) -> Callable[[Params], DecodeState]:
        """Compiles the function that makes the state before the first token."""
        init_state = lambda params: self._model.bind(params).init_state(rows)
        params = jax.eval_shape(self._model.init)
        return jax.jit(init_state, out_shardings=carried_shardings(jax.eval_shape(init_state, params), self._mesh))


def make_carried_evaluation_step(
    model: ModelFunction, loss_chunk: int | None, task: Task = NEXT_TOKEN, parts: int = 1
) -> Callable[[Params, Batch, jax.Array, DecodeState], tuple[dict[str, jax.Array], DecodeState]]:
    """Makes the evaluation step for batches that continue the documents of the batch before.

    Returns:
        A function (params, batch, bytes_per_token_V, carried) -> sums of the task's scores, tokens and bytes per
        sequence, and the position where it begins, B each; and the state after the batch. It computes `parts`
        microbatches one after another.
    """

    def part_step(params: Params, batch: Batch, bytes_per_token_V: jax.Array, carried: DecodeState):
        result = forward(model, params, batch, loss_chunk, carried=carried)
        scores = target_scores(task, result, bytes_per_token_V)
        sums = {name: row_sums(x, result.head_inputs.weights_BxL) for name, x in scores.items()}
        assert result.carried is not None
        return sums | {"start": batch["positions_BxL"][:, 0]}, result.carried

    def step(params: Params, batch: Batch, bytes_per_token_V: jax.Array, carried: DecodeState):
        call = lambda microbatch: part_step(params, microbatch[0], bytes_per_token_V, microbatch[1])
        # One microbatch at a time, so that memory holds the activations of only one.
        sums, carried_after = jax.lax.map(call, (split_microbatches(batch, parts), carried.split_microbatches(parts)))
        return {name: jnp.swapaxes(x, 0, 1).reshape(-1) for name, x in sums.items()}, carried_after.merge_microbatches()

    return part_step if parts == 1 else step


def _perplexity_by_position(by_start: dict[int, Sums], length: int) -> list[dict[str, float]]:
    """Perplexity by position of the segments, in spans that double: the first segment, the second, two, four."""
    spans, begin = [], 0
    while begin <= max(by_start, default=-1):
        end = max(2 * begin, length)
        sums: Sums = collections.Counter()
        for start, row in by_start.items():
            if begin <= start < end:
                sums.update(row)
        if sums["tokens"]:  # an example may ask only for its end
            spans.append(
                {
                    "from": begin,
                    "to": end,
                    "tokens": sums["tokens"],
                    "perplexity": perplexity(sums["nll"], sums["tokens"]),
                    "perplexity_alone": perplexity(sums["nll_alone"], sums["tokens"]),
                }
            )
        begin = end
    return spans
