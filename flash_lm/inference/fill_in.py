"""Fills in each [MASK] of a text with a masked language model."""

import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.data.tokenizer import MASK
from flash_lm.errors import InputError
from flash_lm.inference.engine import bucket
from flash_lm.inference.model import TrainedModel
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.ops.normalizer import needs_whole_row
from flash_lm.runs.hosts import fetch_array
from flash_lm.training.sharding import batch_sharding, round_up_rows
from flash_lm.training.train_state import Params

ROWS = 4  # batch size on the device; a single sequence is a batch of one
MASKS = 64  # masks whose logits exist at the same time


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A candidate token for a mask, and its probability."""

    text: str
    token: int
    probability: float


@dataclasses.dataclass(frozen=True)
class FilledIn:
    """A prompt, its text with the most likely tokens, and the candidates for each mask, the most likely first."""

    prompt: str
    text: str
    masks: list[list[Candidate]]


class Filler:
    """Fills in masks with a run's masked language model.

    Sequences and batches are padded, so that little is compiled. Tokens are chosen on the device, a few masks at a
    time, so that neither many masks nor a large vocabulary need much memory.

    Attributes:
        exact: whether sequences must not be padded, since N is the sequence length; then each length is compiled.
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first call.

        Raises:
            InputError: the model is causal.
        """
        if trained.writes != "fill_in":
            raise InputError(
                f"{trained.name} was trained with task={trained.config.task} and has no {MASK}: give a prompt to "
                f"continue, or train a model with --config.task=masked_lm"
            )
        # Padding changes a score if N is the sequence length, so such a model gets exact lengths.
        self._trained = trained
        self._text_ids = trained.text_ids()
        self.exact = needs_whole_row(trained.config.model.normalizer)
        self._features = jax.jit(self._compute_features)
        self._best = jax.jit(self._top_candidates, static_argnums=4)

    def __call__(self, prompts: Sequence[str], candidates: int = 5) -> list[FilledIn]:
        """Fills in prompts; the results do not depend on each other.

        Args:
            prompts: texts with at least one [MASK] each; a mask stands for one token.
            candidates: candidates per mask; at most the size of the vocabulary.

        Raises:
            InputError: a prompt has no mask or is too long for the positions, or `candidates` is less than 1.
        """
        if candidates < 1:
            raise InputError(f"{candidates} candidates: ask for 1 or more")
        return self.fill(prompts, [candidates] * len(prompts), candidates)

    def fill(self, prompts: Sequence[str], counts: Sequence[int], most: int) -> list[FilledIn]:
        """Fills in prompts with a number of candidates for each; the device always computes `most`."""
        # Batches of prompts with the same padded length; results go back to their numbers.
        rows = [self.encode(prompt) for prompt in prompts]
        candidates = min(most, int(self._text_ids.sum()))
        top: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for length, numbers in self._batches(rows).items():
            for i in range(0, len(numbers), ROWS):
                batch = numbers[i : i + ROWS]
                top |= dict(zip(batch, self._fill([rows[n] for n in batch], length, candidates), strict=True))
        return [self._make_result(prompt, rows[n], *top[n], counts[n]) for n, prompt in enumerate(prompts)]

    def compile(self, longest: int, candidates: int) -> None:
        """Compiles all shapes for prompts of up to `longest` tokens."""
        lengths = sorted({self._length(n) for n in range(1, longest + 1)})
        for length in lengths:
            for count in (1, ROWS):
                row = np.full(min(length, longest), self._trained.tokenizer.mask, np.int32)
                self._fill([row[:1]] * count, length, candidates)

    def _batches(self, rows: list[np.ndarray]) -> dict[int, list[int]]:
        """Numbers of the prompts by padded length, so that a long prompt does not make others longer."""
        by_length: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_length.setdefault(self._length(len(row)), []).append(number)
        return by_length

    def _length(self, tokens: int) -> int:
        limit = self._trained.model.abstract.longest
        return tokens if self.exact else min(bucket(tokens), limit or bucket(tokens))

    def _fill(self, rows: list[np.ndarray], length: int, candidates: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and probabilities at the masks of each prompt, M×K with K ≥ `candidates`, the most likely first."""
        # The batch, padded in length and size; the masks of all prompts are one list of (batch, position).
        mesh, mask = self._trained.mesh, self._trained.tokenizer.mask
        mask_positions = [(b, position) for b, row in enumerate(rows) for position in np.flatnonzero(row == mask)]
        count = round_up_rows(1 if len(rows) == 1 else ROWS, mesh)
        inputs_BxL, segment_ids_BxL = np.zeros((count, length), np.int32), np.zeros((count, length), np.int32)
        for b, row in enumerate(rows):
            inputs_BxL[b, : len(row)], segment_ids_BxL[b, : len(row)] = row, 1
        params, size, results = self._trained.params, min(bucket(candidates), int(self._text_ids.sum())), []

        # One forward pass for the features, then logits for a few masks at a time.
        with jax.set_mesh(mesh):
            batch = jax.device_put((inputs_BxL, segment_ids_BxL), batch_sharding(mesh))
            features_BxLxD = self._features(params, *batch)
            for i in range(0, len(mask_positions), MASKS):
                batch_Mx2 = np.zeros((MASKS, 2), np.int32)
                batch_Mx2[: len(mask_positions[i : i + MASKS])] = mask_positions[i : i + MASKS]
                results.append([fetch_array(x) for x in self._best(params, features_BxLxD, *batch_Mx2.T, size)])

        # Back to one array per prompt.
        ids_MxK, probabilities_MxK = (np.concatenate(x)[: len(mask_positions)] for x in zip(*results, strict=True))
        row_of_mask = np.array([b for b, _ in mask_positions])
        return [(ids_MxK[row_of_mask == b], probabilities_MxK[row_of_mask == b]) for b in range(len(rows))]

    def _compute_features(self, params: Params, inputs_BxL, segment_ids_BxL) -> jax.Array:
        inputs = ModelInputs(inputs_BxL, segment_ids_BxL, packed=False)
        return self._trained.model.bind(params).features(inputs)

    def _top_candidates(
        self, params: Params, features_BxLxD, rows_M, positions_M, size: int
    ) -> tuple[jax.Array, jax.Array]:
        # Special tokens are no candidates, and get no probability.
        logits_MxV = self._trained.model.bind(params).logits(features_BxLxD[rows_M, positions_M][None])[0]
        probabilities_MxV = jax.nn.softmax(jnp.where(self._text_ids, logits_MxV, -jnp.inf), axis=-1)
        probabilities_MxK, ids_MxK = jax.lax.top_k(probabilities_MxV, size)
        return ids_MxK, probabilities_MxK

    def encode(self, prompt: str) -> np.ndarray:
        """Tokenises a prompt; raises as the call does."""
        if MASK not in prompt:
            raise InputError(
                f"the prompt has no {MASK}: {self._trained.name} is a masked language model, which cannot continue a "
                f"text; put {MASK} where it should fill in"
            )
        # The texts between masks are tokenised separately, since a tokenizer does not know the text [MASK].
        ids = [np.array([self._trained.tokenizer.begin], np.int32)]
        for part in re.split(f"({re.escape(MASK)})", prompt):
            if part == MASK:
                ids.append(np.array([self._trained.tokenizer.mask], np.int32))
            elif part:
                ids.append(self._trained.encode(part)[1:])
        row, limit = np.concatenate(ids), self._trained.model.abstract.longest
        if limit is not None and len(row) > limit:
            raise InputError(f"a prompt of {len(row)} tokens is over the limit of {limit} positions: shorten it")
        return row

    def _make_result(
        self, prompt: str, row: np.ndarray, ids_MxK: np.ndarray, probabilities_MxK: np.ndarray, candidates: int
    ) -> FilledIn:
        text_of, filled, masks = self._trained.decode_text, row.copy(), []
        filled[row == self._trained.tokenizer.mask] = ids_MxK[:, 0]
        for ids_K, probabilities_K in zip(ids_MxK.tolist(), probabilities_MxK.tolist(), strict=True):
            best = zip(ids_K[:candidates], probabilities_K[:candidates], strict=True)
            masks.append([Candidate(text_of([i]), i, probability) for i, probability in best])
        return FilledIn(prompt, text_of(filled), masks)
