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
from flash_lm.training.sharding import batch_sharding


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
    """Fills in with a masked language model of a run; rows are padded to buckets, so that few lengths are compiled."""

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first call.

        Raises:
            InputError: the model is causal.
        """
        if trained.config.task != "masked_lm":
            raise InputError(f"{trained.name} is a causal language model and has no {MASK}: give a prompt to continue")
        self._trained = trained
        never_V = jnp.asarray(~trained.text_ids())

        def probabilities(params, inputs_BxL, segment_ids_BxL):
            logits_BxLxV = trained.model.bind(params)(inputs_BxL, segment_ids_BxL)
            return jax.nn.softmax(jnp.where(never_V[None, None], -jnp.inf, logits_BxLxV), axis=-1)

        self._probabilities = jax.jit(probabilities)

    def __call__(self, prompts: Sequence[str], candidates: int = 5) -> list[FilledIn]:
        """Fills in prompts, each as if it were alone.

        Args:
            prompts: with one [MASK] or more each; a mask stands for one token.
            candidates: a mask.

        Raises:
            InputError: a prompt without a mask, or too long for the positions; or no candidates.
        """
        if candidates < 1:
            raise InputError(f"{candidates} candidates: ask for 1 or more")
        rows = [self._encode(prompt) for prompt in prompts]
        mesh, longest = self._trained.mesh, max(len(row) for row in rows)
        limit = self._trained.model.abstract.longest
        if limit is not None and longest > limit:
            raise InputError(
                f"a prompt of {longest} tokens is over {limit}, where the positions of the model end: shorten it"
            )
        parts = mesh.shape["data"] * mesh.shape["fsdp"]
        shape = (-(-len(rows) // parts) * parts, min(bucket(longest), limit or bucket(longest)))
        inputs_BxL, segment_ids_BxL = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for b, row in enumerate(rows):
            inputs_BxL[b, : len(row)], segment_ids_BxL[b, : len(row)] = row, 1
        with jax.set_mesh(mesh):
            batch = jax.device_put((inputs_BxL, segment_ids_BxL), batch_sharding(mesh))
            found_BxLxV = np.asarray(self._probabilities(self._trained.params, *batch))
        return [
            self._filled(prompt, row, found_BxLxV[b], candidates)
            for b, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]

    def _encode(self, prompt: str) -> np.ndarray:
        if MASK not in prompt:
            raise InputError(
                f"{self._trained.name} is a masked language model and cannot continue a text: put {MASK} where it "
                f"shall fill in"
            )
        ids = [np.array([self._trained.tokenizer.begin], np.int32)]
        for part in re.split(f"({re.escape(MASK)})", prompt):
            if part == MASK:
                ids.append(np.array([self._trained.tokenizer.mask], np.int32))
            elif part:
                ids.append(self._trained.encode(part)[1:])
        return np.concatenate(ids)

    def _filled(self, prompt: str, row: np.ndarray, found_LxV: np.ndarray, candidates: int) -> FilledIn:
        text_of, filled, masks = self._trained.text_of, row.copy(), []
        for place in np.flatnonzero(row == self._trained.tokenizer.mask):
            best = np.argsort(-found_LxV[place], kind="stable")[:candidates]
            filled[place] = best[0]
            masks.append([Candidate(text_of([i]), int(i), float(found_LxV[place, i])) for i in best])
        return FilledIn(prompt, text_of(filled), masks)
