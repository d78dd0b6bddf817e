"""Generates, streams and scores text with a causal model."""

import codecs
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError, TooLongError
from flash_lm.inference.engine import Engine
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.sampling import Sampling, SamplingArrays, resolve_seed
from flash_lm.inference.settings import BeamSearch

Prompt = str | np.ndarray  # a text, or all ids that stand before the answer, (n,) int32
_STREAM_EVERY = 8  # tokens between two pieces of streamed text
_MOST_TOKENS = 2**20


@dataclasses.dataclass(frozen=True)
class Generation:
    """The continuation of a prompt.

    Attributes:
        prompt: the prompt; if it was given as ids, their text.
        text: the generated text.
        tokens: token ids of the text.
        log_probs: log-probability of each token under the model, before temperature and filters.
        finish_reason: "end" (the model ended the text) or "length" (max_tokens).
    """

    prompt: str
    text: str
    tokens: list[int]
    log_probs: list[float]
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class Answer(Generation):
    """A continuation from a beam search, with the score by which it is ranked, see `inference.beams`."""

    score: float


@dataclasses.dataclass(frozen=True)
class Score:
    """The log-probability of each token of a text after a prompt."""

    prompt: str
    text: str
    tokens: list[int]
    log_probs: list[float]


class Generator:
    """Generates with a run's causal model.

    Attributes:
        engine: the decode loop; sequences end at end-of-text.
        of_pairs: whether prompts are first texts of pairs, and answers second ones.
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first call.

        Raises:
            InputError: the model is bidirectional.
        """
        # Masked models and classifiers do not continue text; image models do, but of pixels.
        if not trained.task.answers.continues:
            instead = trained.task.answers.instead
            raise InputError(
                f"{trained.name} was trained with task={trained.config.task} and cannot continue a text: {instead}"
                f"train a causal language model, with --config.task=causal_lm"
            )
        if trained.writes in (None, "images"):
            corpus, advice = trained.config.data.corpus, ": use flash-lm generate-images" if trained.writes else ""
            raise InputError(f"{trained.name} was trained on {corpus} and cannot continue text{advice}")

        # Text may be generated, and end-of-text, which ends it.
        self._trained, self.of_pairs = trained, trained.config.data.pairs
        allowed_V, end = trained.text_ids(), trained.tokenizer.end
        allowed_V[end] = True
        self.engine = Engine(
            trained.decode_params, trained.mesh, end=end, allowed_V=allowed_V, **trained.engine_options
        )

    def generate(
        self, prompts: Sequence[Prompt], max_tokens: int, sampling: Sampling | None = None, seed: int = 0
    ) -> list[Generation]:
        """Continues prompts in one batch; at temperature 0 they do not depend on each other.

        Args:
            prompts: texts or ids, of any lengths, none empty.
            max_tokens: largest number of new tokens per prompt.
            sampling: sampling settings; None: temperature 1, no filter.
            seed: random seed, of 64 bits; the same seed and number of the prompt always give the same random numbers.
                -1: another seed each time.

        Raises:
            InputError: a prompt is empty, unknown to the tokenizer or too long for the positions, or a number is out
                of range.
        """
        # All prompts in one batch, and all new tokens in one call.
        rows, seed = self.check(prompts, max_tokens), resolve_seed(seed)
        carry = self.engine.prefill(rows, max_tokens)
        _, new = self.engine.advance(carry, SamplingArrays.from_sampling(sampling or Sampling()), seed, max_tokens)
        generations = []
        for b, prompt in enumerate(prompts):
            tokens = new.tokens_BxT[b, : new.lengths_B[b]].tolist()
            log_probs = new.log_probs_BxT[b, : new.lengths_B[b]].tolist()
            reason = "end" if new.finished_B[b] else "length"
            text = self._trained.decode_text(tokens)
            generations.append(Generation(self._text(prompt), text, tokens, log_probs, reason))
        return generations

    def search(self, prompts: Sequence[Prompt], max_tokens: int, settings: BeamSearch) -> list[list[Answer]]:
        """The best continuations of each prompt by beam search, the best first; raises as `generate` does."""
        rows = self.check(prompts, max_tokens)
        text, reason = self._trained.decode_text, {True: "end", False: "length"}
        return [
            [
                Answer(self._text(prompt), text(ids), ids, log_probs, reason[finished], score)
                for ids, log_probs, score, finished in hypotheses
            ]
            for prompt, hypotheses in zip(prompts, self.engine.search(rows, settings, max_tokens), strict=True)
        ]

    def stream(self, prompt: Prompt, max_tokens: int, sampling: Sampling | None = None, seed: int = 0) -> Iterator[str]:
        """Streams the text of `generate` in complete characters; raises at once, before the first piece."""
        # Checked here and not in the generator below, which would raise only when it is read.
        rows, seed = self.check([prompt], max_tokens), resolve_seed(seed)
        settings = SamplingArrays.from_sampling(sampling or Sampling())

        def pieces() -> Iterator[str]:
            # A few tokens at a time; the bytes of a character may come in two pieces.
            decoder, left, finished = TextDecoder(self._trained.tokenizer), max_tokens, False
            carry = self.engine.prefill(rows, max_tokens)
            while left > 0 and not finished:
                carry, new = self.engine.advance(carry, settings, seed, min(_STREAM_EVERY, left))
                left, finished = left - _STREAM_EVERY, bool(new.finished_B[0])
                yield decoder(new.tokens_BxT[0, : new.lengths_B[0]].tolist())
            yield decoder.close()

        return filter(None, pieces())

    def score(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[Score]:
        """Scores continuations of prompts; each is tokenised separately from its prompt.

        Raises:
            InputError: a text is empty or unknown to the tokenizer, or both together are too long for the positions.
        """
        # The tokens of prompt and continuation together must not exceed the positions.
        rows = self._encode(prompts)
        encoded = [self._trained.encode(text, "continuation")[1:] for text in continuations]
        for row, ids in zip(rows, encoded, strict=True):
            self.check_length(len(row), len(ids), "shorten one of them")
        scored = self.engine.score(rows, encoded)
        return [
            Score(prompt, text, ids.tolist(), scores.log_probs.tolist())
            for prompt, text, ids, scores in zip(prompts, continuations, encoded, scored, strict=True)
        ]

    def check(self, prompts: Sequence[Prompt], max_tokens: int) -> list[np.ndarray]:
        """Checks the arguments and returns the prompts' tokens; raises as `generate` does."""
        if not 1 <= max_tokens <= _MOST_TOKENS:
            raise InputError(f"max_tokens={max_tokens} must be from 1 to {_MOST_TOKENS}")
        rows = self._encode(prompts)
        self.check_length(max(len(row) for row in rows), max_tokens)
        return rows

    def _encode(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        if not prompts:
            raise InputError("there is no prompt: give one or more")
        return [self._trained.encode_prompt(x) if isinstance(x, str) else x for x in prompts]

    def _text(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self._trained.decode_text(prompt)

    def _check_source(self, tokens: int) -> None:
        most = self._trained.conditioning.max_prompt_length(None, self._trained.config.model.max_length)
        if most is not None and tokens > most:
            raise TooLongError(
                f"a prompt of {tokens} tokens is over the limit of {most} of the encoder of {self._trained.name}: "
                "shorten it"
            )

    def check_length(self, prompt: int, after: int, advice: str = "shorten the prompt or lower max_tokens") -> None:
        """Raises TooLongError if a prompt of so many tokens and the tokens after it exceed the positions."""
        limit = self.engine.limit
        self._check_source(prompt)
        if limit is not None and self.engine.prompt_positions(prompt) + after > limit:
            raise TooLongError(
                f"a prompt of {prompt} tokens and {after} after it are over the limit of {limit} positions of "
                f"{self._trained.name}: {advice}"
            )


class TextDecoder:
    """Decodes tokens piece by piece; the bytes of an incomplete character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer):
        """Starts between two characters."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in tokens))

    def close(self) -> str:
        """The replacement for an incomplete last character, if there is one."""
        return self._decoder.decode(b"", final=True)
