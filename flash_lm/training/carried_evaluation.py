"""Perplexity of whole documents: each row is scored with the state of the rows before it."""

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
from flash_lm.runs.hosts import fetched
from flash_lm.training.evaluation import bytes_per_token, perplexity, row_sums, scores_of, target_scores
from flash_lm.training.forward import Batch, cut, forward
from flash_lm.training.sharding import batch_sharding, carried_shardings, place, rows_that_divide, share_of
from flash_lm.training.train_state import ModelFunction, Params

Sums = collections.Counter[str]


class CarriedEvaluator:
    """Evaluates whole documents with the parameters of a model."""

    def __init__(
        self,
        model: ModelFunction,
        tokenizer: Tokenizer,
        mesh: Mesh,
        loss_chunk: int,
        task: Task = NEXT_TOKEN,
        parts: int = 1,
    ):
        """As `Evaluator`.

        Args:
            model: model to score.
            tokenizer: the documents' tokenizer.
            mesh: mesh of the parameters.
            loss_chunk: tokens whose logits exist at the same time on a device.
            task: the task, which defines the scores.
            parts: microbatches into which a batch is cut. The documents that are read together stay the same.

        Raises:
            InputError: the model's state cannot be carried.
        """
        model.abstract.check_carried()
        self._model, self._mesh = model, mesh
        self._step = jax.jit(make_carried_evaluation_step(model, loss_chunk, task, parts))
        self._empty = functools.cache(self._make_empty)
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
            length: L, tokens a row.
            batch_size: documents at a time, a multiple of the parts; rounded up to a multiple of the devices.
            limit: number of batches; 0 = all.
            first: tokens at the beginning of each document that are scored, in whole rows; None: all.
            by_position: score each row also by itself, without the rows before, and return both by position.

        Returns:
            As `Evaluator`. With `by_position` also "by_position", for positions `from` to `to` (not included): number
            of tokens, `perplexity`, and `perplexity_alone`, of rows by themselves.
        """
        sharding = batch_sharding(self._mesh)
        share = share_of(sharding, rows_that_divide(batch_size, self._mesh))
        nothing = carried = self._empty(share.batch_size)(params)

        def score(batch: Any, carried: Any) -> tuple[dict[str, np.ndarray], Any]:
            found, after = self._step(params, place(batch, sharding, share), self._bytes_per_token, carried)
            return {name: fetched(x).astype(float) for name, x in found.items()}, after

        sums, places = collections.Counter(), collections.defaultdict(collections.Counter)
        for batch in carried_once(split, length, share, limit, first):
            here, carried = score(batch, carried)
            starts = here.pop("start")
            sums.update({name: float(x.sum()) for name, x in here.items()})
            if by_position:
                positions_BxL = batch["positions_BxL"]
                alone, _ = score(batch | {"positions_BxL": positions_BxL - positions_BxL[:, :1]}, nothing)
                for start, tokens, nll, nll_alone in zip(
                    starts, here["tokens"], here["nll"], alone["nll"], strict=True
                ):
                    places[int(start)].update(tokens=tokens, nll=nll, nll_alone=nll_alone)
        return scores_of(sums) | ({"by_position": _by_position(places, length)} if by_position else {})

    def _make_empty(self, rows: int) -> Callable[[Params], DecodeState]:
        """A compiled function that makes the state before the first token."""
        empty = lambda params: self._model.bind(params).init_state(rows)
        params = jax.eval_shape(self._model.init)
        return jax.jit(empty, out_shardings=carried_shardings(jax.eval_shape(empty, params), self._mesh))


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
        result = forward(model, params, batch, loss_chunk, carried=carried)
        scores = target_scores(task, result, bytes_per_token_V)
        sums = {name: row_sums(x, result.head_inputs.weights_BxL) for name, x in scores.items()}
        assert result.carried is not None
        return sums | {"start": batch["positions_BxL"][:, 0]}, result.carried

    def step(params: Params, batch: Batch, bytes_per_token_V: jax.Array, carried: DecodeState):
        of_one = lambda part: of_part(params, part[0], bytes_per_token_V, part[1])
        sums, after = jax.lax.map(of_one, (cut(batch, parts), carried.cut(parts)))
        return {name: jnp.swapaxes(x, 0, 1).reshape(-1) for name, x in sums.items()}, after.put_together()

    return of_part if parts == 1 else step


def _by_position(places: dict[int, Sums], length: int) -> list[dict[str, float]]:
    """Sums by the positions where rows begin, in spans that double: the first row, the second, two rows, four."""
    found, begin = [], 0
    while begin <= max(places, default=-1):
        end = max(2 * begin, length)
        sums: Sums = collections.Counter()
        for start, here in places.items():
            if begin <= start < end:
                sums.update(here)
        if sums["tokens"]:  # an example may ask only for its end
            found.append(
                {
                    "from": begin,
                    "to": end,
                    "tokens": sums["tokens"],
                    "perplexity": perplexity(sums["nll"], sums["tokens"]),
                    "perplexity_alone": perplexity(sums["nll_alone"], sums["tokens"]),
                }
            )
        begin = end
    return found
