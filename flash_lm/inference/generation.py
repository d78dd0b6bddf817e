"""Text in, text out: generated, streamed and scored."""

import codecs
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from flash_lm.data.tokenizers import MASK, Tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.engine import Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.inference.trained_model import TrainedModel
from flash_lm.tables import CORPORA, TASKS

_STREAM_EVERY = 8  # tokens between two pieces of streamed text
_MOST_TOKENS, _SEEDS = 2**20, 2**32


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


@dataclasses.dataclass(frozen=True)
class Score:
    """What a model thinks of a given text after a prompt; `log_probs`: of each of its tokens."""

    prompt: str
    text: str
    tokens: list[int]
    log_probs: list[float]


class Generator:
    """Generates with a causal model of a run.

    Attributes:
        engine: that ends at end-of-text.
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first call.

        Raises:
            InputError: the model is bidirectional.
        """
        if (answers := TASKS[trained.config.task].answers) != "continue":
            fill_in = f"let it fill in {MASK}s, or " if answers == "fill_in" else ""
            raise InputError(
                f"{trained.name} was trained with task={trained.config.task} and cannot continue a text: {fill_in}"
                f"train a causal language model, with --config.task=causal_lm"
            )
        corpus = trained.config.data.corpus
        if (answers := CORPORA[corpus].answers) in (None, "images"):
            advice = ": use scripts/generate_images.py" if answers == "images" else ""
            raise InputError(f"{trained.name} was trained on {corpus}, and continues no text{advice}")
        self._trained = trained
        allowed_V, end = trained.text_ids(), trained.tokenizer.end
        allowed_V[end] = True
        self.engine = Engine(trained.held, trained.mesh, end=end, allowed_V=allowed_V)

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
            InputError: a prompt that is empty, that the tokenizer does not know or that is too long for the positions;
                or a number out of range.
        """
        rows = self.check(prompts, max_tokens, seed)
        carry = self.engine.prefill(rows, max_tokens)
        _, new = self.engine.advance(carry, SamplingArrays.of(sampling or Sampling()), seed, max_tokens)
        found = []
        for b, prompt in enumerate(prompts):
            tokens = new.tokens_BxT[b, : new.lengths_B[b]].tolist()
            log_probs = new.log_probs_BxT[b, : new.lengths_B[b]].tolist()
            reason = "end" if new.finished_B[b] else "length"
            found.append(Generation(prompt, self._trained.text_of(tokens), tokens, log_probs, reason))
        return found

    def stream(self, prompt: str, max_tokens: int, sampling: Sampling | None = None, seed: int = 0) -> Iterator[str]:
        """Yields the text of `generate` as it comes, never a part of a character; raises at once."""
        rows = self.check([prompt], max_tokens, seed)
        settings = SamplingArrays.of(sampling or Sampling())

        def pieces() -> Iterator[str]:
            decoder, left, finished = TextDecoder(self._trained.tokenizer), max_tokens, False
            carry = self.engine.prefill(rows, max_tokens)
            while left > 0 and not finished:
                carry, new = self.engine.advance(carry, settings, seed, min(_STREAM_EVERY, left))
                left, finished = left - _STREAM_EVERY, bool(new.finished_B[0])
                yield decoder(new.tokens_BxT[0, : new.lengths_B[0]].tolist())
            yield decoder.close()

        return filter(None, pieces())

    def score(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[Score]:
        """The log-probabilities of given continuations; each is tokenised apart from its prompt.

        Raises:
            InputError: a text that is empty or that the tokenizer does not know, or two too long for the positions.
        """
        rows = self._encode(prompts)
        after = [self._trained.encode(text, "continuation")[1:] for text in continuations]
        for row, ids in zip(rows, after, strict=True):
            self._check_length(len(row), len(ids), "shorten one of them")
        scored = self.engine.score(rows, after)
        return [
            Score(prompt, text, ids.tolist(), log_probs.tolist())
            for prompt, text, ids, log_probs in zip(prompts, continuations, after, scored, strict=True)
        ]

    def check(self, prompts: Sequence[str], max_tokens: int, seed: int) -> list[np.ndarray]:
        """The prompts' tokens, when all is in range; raises as `generate` does."""
        if not 1 <= max_tokens <= _MOST_TOKENS:
            raise InputError(f"max_tokens={max_tokens} must be from 1 to {_MOST_TOKENS}")
        if not 0 <= seed < _SEEDS:
            raise InputError(f"seed={seed} must be from 0 to {_SEEDS - 1}")
        rows = self._encode(prompts)
        self._check_length(max(len(row) for row in rows), max_tokens, "shorten the prompt or lower max_tokens")
        return rows

    def _encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        if not prompts:
            raise InputError("there is no prompt: give one or more")
        return [self._trained.encode(prompt) for prompt in prompts]

    def _check_length(self, prompt: int, after: int, advice: str) -> None:
        limit = self.engine.limit
        if limit is not None and prompt + after > limit:
            raise InputError(
                f"a prompt of {prompt} tokens and {after} after it are over {limit}, where the positions of "
                f"{self._trained.name} end: {advice}"
            )


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
