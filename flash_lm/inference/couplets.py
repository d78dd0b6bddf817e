"""Samples second lines of couplets, as long as the first line, and ranks them."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from flash_lm.data.couplets import question
from flash_lm.data.tokenizer import CharacterTokenizer
from flash_lm.errors import InputError
from flash_lm.inference.engine import Engine
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.sampling import Sampling, SamplingArrays, resolve_seed
from flash_lm.inference.settings import BeamSearch

_MOST_CANDIDATES = 1024


@dataclasses.dataclass(frozen=True)
class SecondLine:
    """A candidate; `log_prob` is the log-probability of the full line, before temperature and filters."""

    first: str
    text: str
    log_prob: float


class CoupletWriter:
    """Writes second lines with a causal model trained on couplets.

    Attributes:
        engine: the decode loop; it cannot generate end-of-text.
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first call.

        Raises:
            InputError: the model was trained on something else.
        """
        tokenizer = trained.tokenizer
        if trained.writes != "couplets":
            raise InputError(
                f"{trained.name} was not trained to continue couplets: train a model with configs/couplets.py"
            )
        assert isinstance(tokenizer, CharacterTokenizer)
        self._trained, self._tokenizer = trained, tokenizer
        # A second line ends when it is as long as the first, so no token marks its end.
        allowed_V = trained.text_ids()
        params, end = trained.decode_params, tokenizer.end
        self.engine = Engine(params, trained.mesh, end=end, allowed_V=allowed_V, **trained.engine_options)

    def __call__(
        self, first: str, candidates: int = 8, sampling: Sampling | None = None, seed: int = 0
    ) -> list[SecondLine]:
        """Samples second lines, all in one batch.

        Args:
            first: a line of characters that occur in the training split.
            candidates: number of samples; duplicates are returned once.
            sampling: sampling settings; None: temperature 1, no filter.
            seed: random seed, of 64 bits; -1: another one each time.

        Returns:
            Different candidates, the most likely first.

        Raises:
            InputError: the line is empty, unknown or too long, or a number is out of range.
        """
        if not 1 <= candidates <= _MOST_CANDIDATES:
            raise InputError(f"samples={candidates} must be from 1 to {_MOST_CANDIDATES}")
        # The same prompt in each batch entry; the random numbers differ.
        (prompt, length), seed = self.question(first), resolve_seed(seed)
        carry = self.engine.prefill([prompt] * candidates, length)
        _, new = self.engine.advance(carry, SamplingArrays.from_sampling(sampling or Sampling()), seed, length)
        answer_slice = np.s_[:candidates, :length]  # without the padding of the batch
        return self.rank(first, new.tokens_BxT[answer_slice], new.log_probs_BxT[answer_slice])

    def search(self, first: str, settings: BeamSearch) -> list[SecondLine]:
        """Second lines from a beam search, the likeliest first; raises as the call does."""
        prompt, length = self.question(first)
        (hypotheses,) = self.engine.search([prompt], settings, length)
        return self.rank(
            first, [hypothesis.tokens for hypothesis in hypotheses], [hypothesis.log_probs for hypothesis in hypotheses]
        )

    def question(self, first: str) -> tuple[np.ndarray, int]:
        """The prompt for a first line, and the length of its answer in tokens; raises as the call does."""
        # A second line is as long as the first, so the limit of positions is one of the first line.
        ids = self._trained.encode(first, "first line")[1:]
        conditioning, limit = self._trained.conditioning, self._trained.longest_prompt
        prompt, length = conditioning.make_prompt(question(ids, self._tokenizer)), len(ids)
        longest = length if limit is None else conditioning.max_first_length(limit)
        if length > longest:
            raise InputError(
                f"a first line of {length} characters is over the limit of {longest} of {self._trained.name}"
            )
        return prompt, length

    def rank(
        self, first: str, tokens: Iterable[Sequence[int]], log_probs: Iterable[Sequence[float]]
    ) -> list[SecondLine]:
        """Ranks second lines by log-probability, without duplicates."""
        by_text = {
            self._trained.decode_text(ids): float(sum(token_log_probs))
            for ids, token_log_probs in zip(tokens, log_probs, strict=True)
        }
        return [SecondLine(first, text, by_text[text]) for text in sorted(by_text, key=lambda text: -by_text[text])]
