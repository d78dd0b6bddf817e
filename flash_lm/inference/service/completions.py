"""Answers /v1/completions, in the format of OpenAI's API, with the rows of the text service."""

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
from flash_lm.inference.running_batch import Part
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
from flash_lm.inference.service.stop_strings import UpToAStop
from flash_lm.inference.settings import drawn_seed
from flash_lm.inference.token_scores import TokenScore

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
Reason = Literal["stop", "length"]
_Scores = Mapping[tuple[int, ...], Sequence[TokenScore]]  # of each row


@dataclasses.dataclass
class _Going:
    """A choice while its text is generated.

    Attributes:
        index: of the choice.
        prompt: its text.
        ids: its tokens after begin-of-text.
        first: how many of these stand only for begin-of-text that was put in front: 1 or 0.
        row: that is generated; None: nothing is.
        decode: decodes new tokens.
        up_to: cuts the text at a stop.
        tokens: so far.
        text: so far.
    """

    index: int
    prompt: str
    ids: Ids
    first: int
    row: Row | None
    decode: TextDecoder
    up_to: UpToAStop
    tokens: Ids = dataclasses.field(default_factory=list)
    text: str = ""

    def add(self, part: Part) -> str:
        """Adds new tokens; returns the new piece of text."""
        self.tokens += part.tokens
        text = self.decode(part.tokens) + (self.decode.close() if part.ended else "")
        piece = self.up_to(text, last=part.ended)
        self.text += piece
        return piece

    @property
    def finish_reason(self) -> Reason:
        """Why it has ended."""
        by_model = self.row is not None and self.row.by_model
        return "stop" if by_model or self.up_to.found else "length"


class Completions:
    """Continues prompts, and scores them."""

    def __init__(self, trained: TrainedModel, service: TextService, limits: Limits):
        """Compiles nothing."""
        self._trained, self._service, self._limits = trained, service, limits
        self._known_V = trained.text_ids()
        self._known_V[[trained.tokenizer.begin, trained.tokenizer.end]] = True

    def check(self, asked: CompletionAsked) -> list[_Going]:
        """What is to be generated; raises InputError if it cannot be, and as `Scheduler.check` does."""
        if asked.best_of not in (None, asked.n):
            raise InputError(f"best_of={asked.best_of} is not supported: leave it out, or give the value of n")
        if asked.logprobs is not None and not self._trained.conditioning.scores_full_text:
            raise InputError(
                f"task={self._trained.config.task} does not read a prompt from left to right: leave out logprobs"
            )
        if asked.stream and asked.logprobs is not None:
            raise InputError("logprobs are not streamed: leave out stream or logprobs")
        # What is scored waits in a queue of its own, and all of a request waits there at once.
        count, most = len(asked.prompts) * asked.n, self._limits.waiting
        most += self._limits.rows if asked.logprobs is None else 0
        if count > most:
            raise InputError(f"{count} rows are over the limit of {most} of this service: ask for fewer")
        given = [self._ids(prompt) for prompt in asked.prompts]
        new = self._service.new_tokens(max(len(ids) for ids, _ in given), asked.max_tokens)
        self._limits.check_all(len(ids) + new for ids, _ in given for _ in range(asked.n))
        sampling, tokenizer = asked.sampling(), self._trained.tokenizer
        seed = drawn_seed(-1 if asked.seed is None else asked.seed)
        found = []
        for prompt, (ids, first) in zip(asked.prompts, given, strict=True):
            text = prompt if isinstance(prompt, str) else self._trained.text_of(prompt)
            for number in range(asked.n):
                row = Row(np.array(ids, np.int32), sampling, seed, number, new) if new else None
                up_to = UpToAStop(asked.stops)
                found.append(_Going(len(found), text, ids, first, row, TextDecoder(tokenizer), up_to))
        self._service.rows.scheduler.check([one.row for one in found if one.row])
        return found

    async def answer(self, asked: CompletionAsked, all_going: Sequence[_Going]) -> bytes:
        """The whole answer to what `check` has made, as JSON.

        With log-probabilities it may be megabytes. A thread makes it, so that others are answered meanwhile.
        """
        async for _ in self._generated(all_going):
            pass
        kept = await asyncio.to_thread(lambda: [self._kept(going) for going in all_going])
        scores = None if asked.logprobs is None else await self._scores(all_going, kept)
        return await asyncio.to_thread(self._built, asked, all_going, kept, scores)

    def _built(
        self, asked: CompletionAsked, all_going: Sequence[_Going], kept: Sequence[Ids], scores: _Scores | None
    ) -> bytes:
        """The answer with these tokens of each choice, and these scores of each row that was scored."""
        logprobs: list[Logprobs | None] = [None] * len(kept)
        if scores is not None:
            logprobs = [self._logprobs(asked, *one, scores) for one in zip(all_going, kept, strict=True)]
        choices = [
            Choice(
                index=going.index,
                text=(going.prompt if asked.echo else "") + going.text,
                logprobs=of_tokens,
                finish_reason=going.finish_reason,
            )
            for going, of_tokens in zip(all_going, logprobs, strict=True)
        ]
        return self._completion()(choices, self._usage(asked, all_going, kept)).model_dump_json().encode()

    async def stream(self, asked: CompletionAsked, all_going: Sequence[_Going]) -> AsyncIterator[Completion]:
        """The answer to what `check` has made, piece by piece."""
        completion = self._completion()
        one = lambda going, text, why=None: completion([Choice(index=going.index, text=text, finish_reason=why)])
        for going in all_going:
            if asked.echo or not going.row:
                yield one(going, going.prompt if asked.echo else "", None if going.row else going.finish_reason)
        async for going, piece, ended in self._generated(all_going):
            if piece or ended:
                yield one(going, piece, going.finish_reason if ended else None)
        if asked.stream_options and asked.stream_options.include_usage:
            kept = await asyncio.to_thread(lambda: [self._kept(going) for going in all_going])
            yield completion([], self._usage(asked, all_going, kept))

    def tokenize(self, asked: TokenizeAsked) -> Tokens:
        """The tokens of a text, or the special token that `tokenizer_info` names; raises InputError."""
        tokenizer = self._trained.tokenizer
        special = {BEGIN: [tokenizer.begin], END: [tokenizer.end], "": []}
        if (ids := special.get(asked.prompt)) is None:
            self._limits.check_text("a text", asked.prompt, self._trained)
            ids = self._trained.encode(asked.prompt, "text").tolist()[1:]
        if asked.add_special_tokens and asked.prompt != BEGIN:
            ids = [tokenizer.begin, *ids]
        return Tokens(tokens=ids, count=len(ids), max_model_len=self._limits.prompt_of(self._trained))

    def detokenize(self, ids: Ids) -> Detokenized:
        """The text of tokens, without special ones; raises InputError."""
        self._check_known(ids)
        return Detokenized(prompt=self._trained.text_of(ids))

    def tokenizer_info(self) -> TokenizerInfo:
        """The names of the special tokens."""
        return TokenizerInfo(bos_token=BEGIN, eos_token=END)

    def _ids(self, prompt: str | Ids) -> tuple[Ids, int]:
        """A prompt's tokens with begin-of-text, and how many of these it does not have itself."""
        if isinstance(prompt, str):
            self._limits.check_text("a prompt", prompt, self._trained)
            return self._trained.encode_given(prompt).tolist(), 1
        self._check_known(prompt)
        begins = prompt[0] == self._trained.tokenizer.begin
        ids = prompt if begins else [self._trained.tokenizer.begin, *prompt]
        self._limits.check("a prompt", len(ids), self._limits.prompt_tokens)
        return ids, int(not begins)

    def _check_known(self, ids: Ids) -> None:
        if wrong := [i for i in ids if not 0 <= i < len(self._known_V) or not self._known_V[i]]:
            raise InputError(f"token {wrong[0]} is none of {self._trained.name}: /tokenize gives the tokens of a text")

    async def _generated(self, all_going: Sequence[_Going]) -> AsyncIterator[tuple[_Going, str, bool]]:
        """Each new piece of text of a choice, and whether it is the last."""
        running = [(going, going.row) for going in all_going if going.row]
        async for number, part in self._service.rows.parts([row for _, row in running]):
            going, row = running[number]
            piece = going.add(part)
            ended = part.ended or going.up_to.found
            if ended and not part.ended:
                self._service.rows.scheduler.cancel([row])
            yield going, piece, ended

    def _kept(self, going: _Going) -> Ids:
        """The tokens that begin in the text, and end-of-text if the model has ended it."""
        if going.up_to.found:
            return [
                i for i, place in zip(going.tokens, self._offsets(going.tokens), strict=True) if place < len(going.text)
            ]
        by_model = going.row is not None and going.row.by_model
        return [*going.tokens, *([self._trained.tokenizer.end] if by_model else [])]

    def _offsets(self, ids: Ids) -> list[int]:
        """Where each token's text begins."""
        decode, place, found = TextDecoder(self._trained.tokenizer), 0, []
        for i in ids:
            found.append(place)
            place += len(decode([i]))
        return found

    async def _scores(self, all_going: Sequence[_Going], kept: Sequence[Ids]) -> _Scores:
        """Of the whole text of each choice, scored once more; choices of the same text are scored once."""
        rows = {(*going.ids, *tokens) for going, tokens in zip(all_going, kept, strict=True)}
        longer = [row for row in rows if len(row) > 1]
        return dict(zip(longer, await self._service.score(longer), strict=True))

    def _logprobs(self, asked: CompletionAsked, going: _Going, kept: Ids, scores: _Scores) -> Logprobs:
        """Of one choice."""
        row = (*going.ids, *kept)
        of_row = [None, *scores.get(row, [])]
        begin = going.first if asked.echo else len(going.ids)
        offsets = self._offsets(kept)
        if asked.echo:
            offsets = self._offsets_of_prompt(going) + [len(going.prompt) + place for place in offsets]
        return self._logprobs_of(row[begin:], of_row[begin:], offsets, asked.logprobs or 0)

    def _offsets_of_prompt(self, going: _Going) -> list[int]:
        """Where the text of each token of a prompt begins in the prompt; a tokenizer may put a space before it."""
        ids = going.ids[going.first :]
        *places, end = self._offsets([*ids, self._trained.tokenizer.end])
        return [max(0, place - (end - len(going.prompt))) for place in places]

    def _logprobs_of(
        self, ids: Sequence[int], scores: Sequence[TokenScore | None], offsets: list[int], top: int
    ) -> Logprobs:
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
        special = {self._trained.tokenizer.begin: BEGIN, self._trained.tokenizer.end: END}
        if i in special:
            return special[i]
        text = self._trained.tokenizer.token_bytes(i)
        try:
            return text.decode() or f"<|{i}|>"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)

    def _usage(self, asked: CompletionAsked, all_going: Sequence[_Going], kept: Iterable[Ids]) -> Usage:
        end = self._trained.tokenizer.end
        prompts = sum(len(going.ids) - going.first for going in all_going[:: asked.n])
        new = sum(i != end for tokens in kept for i in tokens)
        return Usage(prompt_tokens=prompts, completion_tokens=new, total_tokens=prompts + new)

    def _completion(self) -> Callable[..., Completion]:
        """Makes answers or events of one request."""
        about = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._trained.name}
        return lambda choices, usage=None: Completion(**about, choices=choices, usage=usage)
