"""Answers /v1/completions in the format of OpenAI's API, with the batch of the text service."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from flash_lm.errors import InputError
from flash_lm.inference.generation import TextDecoder
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.running_batch import NewTokens
from flash_lm.inference.service.completion_format import (
    Choice,
    Completion,
    CompletionAsked,
    Detokenized,
    Ids,
    Logprobs,
    TokenizeAsked,
    TokenizerInfo,
    Tokens,
    Usage,
)
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.scheduler import Row
from flash_lm.inference.service.services import TextService
from flash_lm.inference.service.stop_strings import StopStringFilter
from flash_lm.inference.settings import draw_seed
from flash_lm.inference.token_scores import TokenScore

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
Reason = Literal["stop", "length"]
_Scores = Mapping[tuple[int, ...], Sequence[TokenScore]]  # by the tokens of a sequence


@dataclasses.dataclass
class _ChoiceState:
    """A choice while its text is generated.

    Attributes:
        index: index of the choice.
        prompt: text of the prompt.
        ids: tokens of the prompt with begin-of-text.
        first: number of tokens that were put in front of the prompt: 1 for begin-of-text, or 0.
        row: the sequence to generate; None: nothing is generated.
        decode: decodes new tokens.
        stop_filter: cuts the text off at a stop text.
        tokens: new tokens so far.
        text: new text so far.
    """

    index: int
    prompt: str
    ids: Ids
    first: int
    row: Row | None
    decode: TextDecoder
    stop_filter: StopStringFilter
    tokens: Ids = dataclasses.field(default_factory=list)
    text: str = ""

    def add(self, part: NewTokens) -> str:
        """Adds new tokens; returns the new piece of text."""
        self.tokens += part.tokens
        text = self.decode(part.tokens) + (self.decode.close() if part.ended else "")
        piece = self.stop_filter(text, last=part.ended)
        self.text += piece
        return piece

    @property
    def finish_reason(self) -> Reason:
        """Why it has ended."""
        ended_by_model = self.row is not None and self.row.ended_by_model
        return "stop" if ended_by_model or self.stop_filter.stopped else "length"


class Completions:
    """Continues prompts, and scores them."""

    def __init__(self, trained: TrainedModel, service: TextService, limits: Limits):
        """Compiles nothing."""
        self._trained, self._service, self._limits = trained, service, limits
        self._known_V = trained.text_ids()
        self._known_V[[trained.tokenizer.begin, trained.tokenizer.end]] = True

    def check(self, asked: CompletionAsked) -> list[_ChoiceState]:
        """Makes the choices of a request; raises InputError if it is refused, and as `Scheduler.check` does."""
        # Combinations that are not supported.
        if asked.best_of not in (None, asked.n):
            raise InputError(f"best_of={asked.best_of} is not supported: leave it out, or give the value of n")
        if asked.logprobs is not None and not self._trained.conditioning.scores_full_text:
            raise InputError(
                f"task={self._trained.config.task} does not read a prompt from left to right: leave out logprobs"
            )
        if asked.stream and asked.logprobs is not None:
            raise InputError("logprobs are not streamed: leave out stream or logprobs")
        # The number of sequences. Those to be scored wait in a separate queue, all of a request at once.
        count, limit = len(asked.prompts) * asked.n, self._limits.waiting
        limit += self._limits.rows if asked.logprobs is None else 0
        if count > limit:
            raise InputError(f"{count} sequences are over the limit of {limit} of this service: ask for fewer")

        # The tokens of each prompt and of its answer must be within the limits.
        encoded = [self._ids(prompt) for prompt in asked.prompts]
        new = self._service.new_tokens(max(len(ids) for ids, _ in encoded), asked.max_tokens)
        self._limits.check_all(len(ids) + new for ids, _ in encoded for _ in range(asked.n))
        sampling, tokenizer = asked.sampling(), self._trained.tokenizer
        seed = draw_seed(-1 if asked.seed is None else asked.seed)

        # n samples of each prompt, with the random numbers of their index.
        choices = []
        for prompt, (ids, first) in zip(asked.prompts, encoded, strict=True):
            text = prompt if isinstance(prompt, str) else self._trained.decode_text(prompt)
            for number in range(asked.n):
                row = Row(np.array(ids, np.int32), sampling, seed, number, new) if new else None
                stop_filter = StopStringFilter(asked.stops)
                choices.append(_ChoiceState(len(choices), text, ids, first, row, TextDecoder(tokenizer), stop_filter))
        self._service.rows.scheduler.check([one.row for one in choices if one.row])
        return choices

    async def answer(self, asked: CompletionAsked, choices: Sequence[_ChoiceState]) -> bytes:
        """Generates the choices from `check`, and returns the complete answer as JSON.

        With log-probabilities it may be megabytes, so it is built in a thread, while others are answered.
        """
        async for _ in self._generate(choices):
            pass
        kept = await asyncio.to_thread(lambda: [self._kept_tokens(choice) for choice in choices])
        scores = None if asked.logprobs is None else await self._scores(choices, kept)
        return await asyncio.to_thread(self._build_response, asked, choices, kept, scores)

    def _build_response(
        self, asked: CompletionAsked, choices: Sequence[_ChoiceState], kept: Sequence[Ids], scores: _Scores | None
    ) -> bytes:
        """Builds the JSON answer from the tokens of each choice and the scores."""
        # One choice per sample, in the order of the request.
        logprobs: list[Logprobs | None] = [None] * len(kept)
        if scores is not None:
            logprobs = [self._logprobs(asked, *one, scores) for one in zip(choices, kept, strict=True)]
        formatted = [
            Choice(
                index=choice.index,
                text=(choice.prompt if asked.echo else "") + choice.text,
                logprobs=token_logprobs,
                finish_reason=choice.finish_reason,
            )
            for choice, token_logprobs in zip(choices, logprobs, strict=True)
        ]
        return self._completion()(formatted, self._usage(asked, choices, kept)).model_dump_json().encode()

    async def stream(self, asked: CompletionAsked, choices: Sequence[_ChoiceState]) -> AsyncIterator[Completion]:
        """Generates the choices from `check`, and yields events with new pieces of text."""
        # First the echoed prompts, and choices without anything to generate.
        completion = self._completion()
        make_event = lambda choice, text, why=None: completion(
            [Choice(index=choice.index, text=text, finish_reason=why)]
        )
        for choice in choices:
            if asked.echo or not choice.row:
                yield make_event(
                    choice, choice.prompt if asked.echo else "", None if choice.row else choice.finish_reason
                )
        async for choice, piece, ended in self._generate(choices):
            if piece or ended:
                yield make_event(choice, piece, choice.finish_reason if ended else None)
        # At the end the numbers of tokens, if the client wants them.
        if asked.stream_options and asked.stream_options.include_usage:
            kept = await asyncio.to_thread(lambda: [self._kept_tokens(choice) for choice in choices])
            yield completion([], self._usage(asked, choices, kept))

    def tokenize(self, asked: TokenizeAsked) -> Tokens:
        """The tokens of a text, or the special token that `tokenizer_info` names; raises InputError."""
        # The text of a special token alone means that token.
        tokenizer = self._trained.tokenizer
        special = {BEGIN: [tokenizer.begin], END: [tokenizer.end], "": []}
        if (ids := special.get(asked.prompt)) is None:
            self._limits.check_text("a text", asked.prompt, self._trained)
            ids = self._trained.encode(asked.prompt, "text").tolist()[1:]
        if asked.add_special_tokens and asked.prompt != BEGIN:
            ids = [tokenizer.begin, *ids]
        return Tokens(tokens=ids, count=len(ids), max_model_len=self._limits.max_prompt_tokens(self._trained))

    def detokenize(self, ids: Ids) -> Detokenized:
        """The text of tokens, without special ones; raises InputError."""
        self._check_known(ids)
        return Detokenized(prompt=self._trained.decode_text(ids))

    def tokenizer_info(self) -> TokenizerInfo:
        """The names of the special tokens."""
        return TokenizerInfo(bos_token=BEGIN, eos_token=END)

    def _ids(self, prompt: str | Ids) -> tuple[Ids, int]:
        """The tokens of a prompt with begin-of-text, and the number of tokens that were put in front: 0 or 1."""
        if isinstance(prompt, str):
            self._limits.check_text("a prompt", prompt, self._trained)
            return self._trained.encode_prompt(prompt).tolist(), 1
        self._check_known(prompt)
        begins = prompt[0] == self._trained.tokenizer.begin
        ids = prompt if begins else [self._trained.tokenizer.begin, *prompt]
        self._limits.check("a prompt", len(ids), self._limits.prompt_tokens)
        return ids, int(not begins)

    def _check_known(self, ids: Ids) -> None:
        if wrong := [i for i in ids if not 0 <= i < len(self._known_V) or not self._known_V[i]]:
            raise InputError(f"token {wrong[0]} is none of {self._trained.name}: /tokenize gives the tokens of a text")

    async def _generate(self, choices: Sequence[_ChoiceState]) -> AsyncIterator[tuple[_ChoiceState, str, bool]]:
        """Yields each new piece of text with its choice, and whether it is the last."""
        running = [(choice, choice.row) for choice in choices if choice.row]
        async for number, part in self._service.rows.parts([row for _, row in running]):
            choice, row = running[number]
            piece = choice.add(part)
            ended = part.ended or choice.stop_filter.stopped
            # A stop text ends the choice, so its slot becomes free.
            if ended and not part.ended:
                self._service.rows.scheduler.cancel([row])
            yield choice, piece, ended

    def _kept_tokens(self, choice: _ChoiceState) -> Ids:
        """The tokens that begin in the text, and end-of-text if the model has ended it."""
        # A stop text may cut off tokens that have been generated.
        if choice.stop_filter.stopped:
            return [
                i
                for i, offset in zip(choice.tokens, self._offsets(choice.tokens), strict=True)
                if offset < len(choice.text)
            ]
        ended_by_model = choice.row is not None and choice.row.ended_by_model
        return [*choice.tokens, *([self._trained.tokenizer.end] if ended_by_model else [])]

    def _offsets(self, ids: Ids) -> list[int]:
        """The offset of each token's text, in characters."""
        decode, offset, offsets = TextDecoder(self._trained.tokenizer), 0, []
        for i in ids:
            offsets.append(offset)
            offset += len(decode([i]))
        return offsets

    async def _scores(self, choices: Sequence[_ChoiceState], kept: Sequence[Ids]) -> _Scores:
        """Scores the full text of each choice once more; equal texts are scored once."""
        rows = {(*choice.ids, *tokens) for choice, tokens in zip(choices, kept, strict=True)}
        longer = [row for row in rows if len(row) > 1]
        return dict(zip(longer, await self._service.score(longer), strict=True))

    def _logprobs(self, asked: CompletionAsked, choice: _ChoiceState, kept: Ids, scores: _Scores) -> Logprobs:
        """The log-probabilities of a choice."""
        # With echo those of the prompt, too; the first token of a text has no score.
        row = (*choice.ids, *kept)
        row_scores = [None, *scores.get(row, [])]
        begin = choice.first if asked.echo else len(choice.ids)
        offsets = self._offsets(kept)
        if asked.echo:
            offsets = self._offsets_of_prompt(choice) + [len(choice.prompt) + offset for offset in offsets]
        return self._format_logprobs(row[begin:], row_scores[begin:], offsets, asked.logprobs or 0)

    def _offsets_of_prompt(self, choice: _ChoiceState) -> list[int]:
        """The offset of each token in the text of the prompt; a tokenizer may put a space before the text."""
        ids = choice.ids[choice.first :]
        *offsets, end = self._offsets([*ids, self._trained.tokenizer.end])
        return [max(0, offset - (end - len(choice.prompt))) for offset in offsets]

    def _format_logprobs(
        self, ids: Sequence[int], scores: Sequence[TokenScore | None], offsets: list[int], top: int
    ) -> Logprobs:
        """Formats the scores of tokens; the token itself is always among the likeliest ones."""
        # Scores of the full distribution: the token itself may be outside of the likeliest ones.
        values, tops = [], []
        for i, score in zip(ids, scores, strict=True):
            if score is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(score.top.get(i, score.log_prob))
            likeliest: dict[str, float] = {}
            for other, log_prob in [*[*score.top.items()][:top], (i, values[-1])]:
                likeliest.setdefault(self._text(other), log_prob)
            tops.append(likeliest)
        return Logprobs(
            tokens=[self._text(i) for i in ids],
            token_logprobs=values,
            top_logprobs=tops if top else None,
            text_offset=offsets,
        )

    def _text(self, i: int) -> str:
        """The text of a token; the bytes of a part of a character are written as in OpenAI's API."""
        special = {self._trained.tokenizer.begin: BEGIN, self._trained.tokenizer.end: END}
        if i in special:
            return special[i]
        text = self._trained.tokenizer.token_bytes(i)
        try:
            return text.decode() or f"<|{i}|>"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)

    def _usage(self, asked: CompletionAsked, choices: Sequence[_ChoiceState], kept: Iterable[Ids]) -> Usage:
        end = self._trained.tokenizer.end
        # Samples of the same prompt count its tokens once.
        prompts = sum(len(choice.ids) - choice.first for choice in choices[:: asked.n])
        new = sum(i != end for tokens in kept for i in tokens)
        return Usage(prompt_tokens=prompts, completion_tokens=new, total_tokens=prompts + new)

    def _completion(self) -> Callable[..., Completion]:
        """Returns a function that makes answers or events with the id of one request."""
        about = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._trained.name}
        return lambda choices, usage=None: Completion(**about, choices=choices, usage=usage)
