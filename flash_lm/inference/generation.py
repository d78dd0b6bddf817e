"""Text in, text out: generated, streamed and scored."""

import codecs
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from flash_lm.data.tokenizers import Tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.engine import Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.inference.trained_model import TrainedModel

_STREAM_EVERY = 8  # tokens between two pieces of streamed text


@dataclasses.dataclass(frozen=True)
class Generation:
    """What followed a prompt.

    Attributes:
        prompt: as given.
        text: that follows it.
        tokens: ids of the text.
        log_probs: log-probability of each token under the model, before temperature and filters.
        finish_reason: "end" (the model ended the text) or "length" (max_tokens).
    """

    prompt: str
    text: str
    tokens: list[int]
    log_probs: list[float]
    finish_reason: str


class Generator:
    """Generates with a causal model of a run."""

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first call.

        Raises:
            InputError: the model is bidirectional.
        """
        if trained.config.task != "causal_lm":
            raise InputError(
                f"{trained.name} is a masked language model and cannot continue a text: put [MASK] where it shall fill "
                f"in, or train one with --config.task=causal_lm"
            )
        self._trained = trained
        allowed_V, end = trained.text_ids(), trained.tokenizer.end
        allowed_V[end] = True
        self._engine = Engine(trained.model, trained.params, trained.mesh, end=end, allowed_V=allowed_V)

    def generate(
        self, prompts: Sequence[str], max_tokens: int, sampling: Sampling | None = None, seed: int = 0
    ) -> list[Generation]:
        """Continues prompts, all at once; each as if it were alone, if the temperature is 0.

        Args:
            prompts: of any lengths, none empty.
            max_tokens: new tokens a prompt.
            sampling: None: temperature 1, no filter.
            seed: of the draws; row b of the same prompts always gets the same.

        Raises:
            InputError: an empty prompt, one that the tokenizer does not know, or one too long for the positions.
        """
        rows = self._encode(prompts, max_tokens)
        carry = self._engine.prefill(rows, max_tokens)
        _, new = self._engine.advance(carry, SamplingArrays.of(sampling or Sampling()), seed, max_tokens)
        found = []
        for b, prompt in enumerate(prompts):
            tokens = new.tokens_BxT[b, : new.lengths_B[b]].tolist()
            log_probs = new.log_probs_BxT[b, : new.lengths_B[b]].tolist()
            reason = "end" if new.finished_B[b] else "length"
            found.append(Generation(prompt, self._trained.text_of(tokens), tokens, log_probs, reason))
        return found

    def stream(self, prompt: str, max_tokens: int, sampling: Sampling | None = None, seed: int = 0) -> Iterator[str]:
        """Yields the text of `generate` as it comes, never a part of a character; raises at once."""
        rows = self._encode([prompt], max_tokens)
        settings = SamplingArrays.of(sampling or Sampling())

        def pieces() -> Iterator[str]:
            decoder, left, finished = TextDecoder(self._trained.tokenizer), max_tokens, False
            carry = self._engine.prefill(rows, max_tokens)
            while left > 0 and not finished:
                carry, new = self._engine.advance(carry, settings, seed, min(_STREAM_EVERY, left))
                left, finished = left - _STREAM_EVERY, bool(new.finished_B[0])
                yield decoder(new.tokens_BxT[0, : new.lengths_B[0]].tolist())
            yield decoder.close()

        return filter(None, pieces())

    def score(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[Generation]:
        """The given continuations with the log-probabilities of their tokens.

        Prompt and continuation are tokenised apart.

        Raises:
            InputError: as `generate`, of either of them.
        """
        after = [self._trained.encode(text)[1:] for text in continuations]
        rows = self._encode(prompts, max(len(ids) for ids in after))
        scored = self._engine.score(rows, after)
        return [
            Generation(prompt, text, ids.tolist(), log_probs.tolist(), "length")
            for prompt, text, ids, log_probs in zip(prompts, continuations, after, scored, strict=True)
        ]

    def _encode(self, prompts: Sequence[str], max_tokens: int) -> list[np.ndarray]:
        if not prompts:
            raise InputError("there is no prompt: give one or more")
        if max_tokens < 1:
            raise InputError(f"max_tokens={max_tokens} must be 1 or more")
        rows, limit = [self._trained.encode(prompt) for prompt in prompts], self._engine.limit
        longest = max(len(row) for row in rows)
        if limit is not None and longest + max_tokens > limit:
            raise InputError(
                f"a prompt of {longest} tokens and {max_tokens} new ones are over {limit}, where the positions of "
                f"{self._trained.name} end: shorten the prompt or lower max_tokens"
            )
        return rows


class TextDecoder:
    """Tokens to text, piece by piece; bytes of a character wait for those that are missing."""

    def __init__(self, tokenizer: Tokenizer):
        """Starts between two characters."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in tokens))

    def close(self) -> str:
        """What stands for a character that has not been completed."""
        return self._decoder.decode(b"", final=True)
