"""What a masked language model puts in the place of each [MASK]."""

import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.data.tokenizers import MASK
from flash_lm.errors import InputError
from flash_lm.inference.engine import bucket
from flash_lm.inference.trained_model import TrainedModel
from flash_lm.layers.normalizer import NOT_DECODABLE
from flash_lm.training.hosts import fetched
from flash_lm.training.sharding import batch_sharding, rows_that_divide
from flash_lm.training.state import Params


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A token for one mask, and its probability."""

    text: str
    token: int
    probability: float


@dataclasses.dataclass(frozen=True)
class FilledIn:
    """A prompt, the candidates for each of its masks, the likeliest first, and the prompt with the likeliest."""

    prompt: str
    text: str
    masks: list[list[Candidate]]


class Filler:
    """Fills in with a masked language model of a run; rows and their number are padded, so that little is compiled."""

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first call.

        Raises:
            InputError: the model is causal.
        """
        if trained.config.task != "masked_lm":
            raise InputError(f"{trained.name} is a causal language model and has no {MASK}: give a prompt to continue")
        self._trained = trained
        self._text_ids = trained.text_ids()
        # Where N is the row's length, no row may be padded.
        self._exact = trained.config.model.normalizer in NOT_DECODABLE
        self._probabilities = jax.jit(self._at_masks)

    def __call__(self, prompts: Sequence[str], candidates: int = 5) -> list[FilledIn]:
        """Fills in prompts, each as if it were alone.

        Args:
            prompts: with one [MASK] or more each; a mask stands for one token.
            candidates: a mask; at most as many as there are tokens.

        Raises:
            InputError: a prompt without a mask, or too long for the positions; or no candidates.
        """
        if candidates < 1:
            raise InputError(f"{candidates} candidates: ask for 1 or more")
        rows, limit = [self.encode(prompt) for prompt in prompts], self._trained.model.abstract.longest
        batches = [[row] for row in rows] if self._exact else [rows]
        found = [probabilities for batch in batches for probabilities in self._fill(batch, limit)]
        candidates = min(candidates, int(self._text_ids.sum()))
        return [
            self._filled(prompt, row, found_MxV, candidates)
            for prompt, row, found_MxV in zip(prompts, rows, found, strict=True)
        ]

    def _fill(self, rows: list[np.ndarray], limit: int | None) -> list[np.ndarray]:
        """The probabilities at each row's masks, M×V."""
        mesh, mask = self._trained.mesh, self._trained.tokenizer.mask
        longest = max(len(row) for row in rows)
        length = longest if self._exact else min(bucket(longest), limit or bucket(longest))
        places = [np.flatnonzero(row == mask) for row in rows]
        count = rows_that_divide(1 << (len(rows) - 1).bit_length(), mesh)
        inputs_BxL, segment_ids_BxL = np.zeros((count, length), np.int32), np.zeros((count, length), np.int32)
        places_BxM = np.zeros((count, bucket(max(len(x) for x in places))), np.int32)
        for b, (row, masks) in enumerate(zip(rows, places, strict=True)):
            inputs_BxL[b, : len(row)], segment_ids_BxL[b, : len(row)] = row, 1
            places_BxM[b, : len(masks)] = masks
        with jax.set_mesh(mesh):
            batch = jax.device_put((inputs_BxL, segment_ids_BxL, places_BxM), batch_sharding(mesh))
            found_BxMxV = fetched(self._probabilities(self._trained.params, *batch))
        return [found_BxMxV[b, : len(masks)] for b, masks in enumerate(places)]

    def _at_masks(self, params: Params, inputs_BxL, segment_ids_BxL, places_BxM) -> jax.Array:
        bound = self._trained.model.bind(params)
        features_BxLxD = bound.features(inputs_BxL, segment_ids_BxL, packed=False)
        logits_BxMxV = bound.logits(jnp.take_along_axis(features_BxLxD, places_BxM[..., None], axis=1))
        return jax.nn.softmax(jnp.where(self._text_ids, logits_BxMxV, -jnp.inf), axis=-1)

    def encode(self, prompt: str) -> np.ndarray:
        """The prompt's tokens; raises as the call does."""
        if MASK not in prompt:
            raise InputError(
                f"the prompt has no {MASK}: {self._trained.name} is a masked language model, which cannot continue a "
                f"text; put {MASK} where it shall fill in"
            )
        ids = [np.array([self._trained.tokenizer.begin], np.int32)]
        for part in re.split(f"({re.escape(MASK)})", prompt):
            if part == MASK:
                ids.append(np.array([self._trained.tokenizer.mask], np.int32))
            elif part:
                ids.append(self._trained.encode(part)[1:])
        row, limit = np.concatenate(ids), self._trained.model.abstract.longest
        if limit is not None and len(row) > limit:
            raise InputError(f"a prompt of {len(row)} tokens is over {limit}, where the positions end: shorten it")
        return row

    def _filled(self, prompt: str, row: np.ndarray, found_MxV: np.ndarray, candidates: int) -> FilledIn:
        text_of, filled, masks = self._trained.text_of, row.copy(), []
        for place, found_V in zip(np.flatnonzero(row == self._trained.tokenizer.mask), found_MxV, strict=True):
            best = np.argsort(-found_V, kind="stable")[:candidates]
            filled[place] = best[0]
            masks.append([Candidate(text_of([i]), int(i), float(found_V[i])) for i in best])
        return FilledIn(prompt, text_of(filled), masks)
