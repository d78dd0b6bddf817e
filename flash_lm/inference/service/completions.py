"""Answers /v1/completions in the format of OpenAI's API, with the batch of the text service."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from flash_lm.errors import InputError
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.service.choices import Choices, ChoiceState, EncodedPrompt
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
)
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.services import TextService
from flash_lm.inference.token_scores import TokenScore

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
_Scores = Mapping[tuple[int, ...], Sequence[TokenScore]]  # by the tokens of a sequence


class Completions:
    """Continues prompts, and scores them."""

    def __init__(self, trained: TrainedModel, service: TextService, limits: Limits):
        """Compiles nothing."""
        self._trained, self._service, self._limits = trained, service, limits
        self._choices = Choices(trained, service, limits)
        self._known_V = trained.text_ids()
        self._known_V[[trained.tokenizer.begin, trained.tokenizer.end]] = True

    def check(self, asked: CompletionAsked) -> list[ChoiceState]:
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
        self._choices.check_count(len(asked.prompts) * asked.n, scored=asked.logprobs is not None)
        return self._choices.make([self._encode(prompt) for prompt in asked.prompts], asked, asked.max_tokens)

    async def answer(self, asked: CompletionAsked, choices: Sequence[ChoiceState]) -> bytes:
        """Generates the choices from `check`, and returns the complete answer as JSON.

        With log-probabilities it may be megabytes, so it is built in a thread, while others are answered.
        """
        async for _ in self._choices.generate(choices):
            pass
        kept = await asyncio.to_thread(lambda: [self._choices.kept_tokens(choice) for choice in choices])
        scores = None if asked.logprobs is None else await self._scores(choices, kept)
        return await asyncio.to_thread(self._build_response, asked, choices, kept, scores)

    def _build_response(
        self, asked: CompletionAsked, choices: Sequence[ChoiceState], kept: Sequence[Ids], scores: _Scores | None
    ) -> bytes:
        """Builds the JSON answer from the tokens of each choice and the scores."""
        # One choice per sample, in the order of the request.
        logprobs: list[Logprobs | None] = [None] * len(kept)
        if scores is not None:
            logprobs = [self._logprobs(asked, *one, scores) for one in zip(choices, kept, strict=True)]
        formatted = [
            Choice(
                index=choice.index,
                text=(choice.prompt.text if asked.echo else "") + choice.text,
                logprobs=token_logprobs,
                finish_reason=choice.finish_reason,
            )
            for choice, token_logprobs in zip(choices, logprobs, strict=True)
        ]
        return self._completion()(formatted, self._choices.usage(asked, choices, kept)).model_dump_json().encode()

    async def stream(self, asked: CompletionAsked, choices: Sequence[ChoiceState]) -> AsyncIterator[Completion]:
        """Generates the choices from `check`, and yields events with new pieces of text."""
        # First the echoed prompts, and choices without anything to generate.
        completion = self._completion()
        make_event = lambda choice, text, why=None: completion(
            [Choice(index=choice.index, text=text, finish_reason=why)]
        )
        for choice in choices:
            if asked.echo or not choice.row:
                yield make_event(
                    choice, choice.prompt.text if asked.echo else "", None if choice.row else choice.finish_reason
                )
        async for choice, piece, ended in self._choices.generate(choices):
            if piece or ended:
                yield make_event(choice, piece, choice.finish_reason if ended else None)
        # At the end the numbers of tokens, if the client wants them.
        if asked.wants_usage:
            kept = await asyncio.to_thread(lambda: [self._choices.kept_tokens(choice) for choice in choices])
            yield completion([], self._choices.usage(asked, choices, kept))

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

    def _encode(self, prompt: str | Ids) -> EncodedPrompt:
        """The tokens of a prompt, with begin-of-text."""
        if isinstance(prompt, str):
            self._limits.check_text("a prompt", prompt, self._trained)
            return EncodedPrompt(self._trained.encode_prompt(prompt).tolist(), prompt, 1)
        self._check_known(prompt)
        begins = prompt[0] == self._trained.tokenizer.begin
        ids = prompt if begins else [self._trained.tokenizer.begin, *prompt]
        self._limits.check("a prompt", len(ids), self._limits.prompt_tokens)
        return EncodedPrompt(ids, self._trained.decode_text(prompt), int(not begins))

    def _check_known(self, ids: Ids) -> None:
        if wrong := [i for i in ids if not 0 <= i < len(self._known_V) or not self._known_V[i]]:
            raise InputError(f"token {wrong[0]} is none of {self._trained.name}: /tokenize gives the tokens of a text")

    async def _scores(self, choices: Sequence[ChoiceState], kept: Sequence[Ids]) -> _Scores:
        """Scores the full text of each choice once more; equal texts are scored once."""
        rows = {(*choice.prompt.ids, *tokens) for choice, tokens in zip(choices, kept, strict=True)}
        longer = [row for row in rows if len(row) > 1]
        return dict(zip(longer, await self._service.score(longer), strict=True))

    def _logprobs(self, asked: CompletionAsked, choice: ChoiceState, kept: Ids, scores: _Scores) -> Logprobs:
        """The log-probabilities of a choice."""
        # With echo those of the prompt, too; the first token of a text has no score.
        row = (*choice.prompt.ids, *kept)
        row_scores = [None, *scores.get(row, [])]
        begin = choice.prompt.first if asked.echo else len(choice.prompt.ids)
        offsets = self._choices.offsets(kept)
        if asked.echo:
            offsets = self._offsets_of_prompt(choice) + [len(choice.prompt.text) + offset for offset in offsets]
        return self._format_logprobs(row[begin:], row_scores[begin:], offsets, asked.logprobs or 0)

    def _offsets_of_prompt(self, choice: ChoiceState) -> list[int]:
        """The offset of each token in the text of the prompt; a tokenizer may put a space before the text."""
        ids = choice.prompt.ids[choice.prompt.first :]
        *offsets, end = self._choices.offsets([*ids, self._trained.tokenizer.end])
        return [max(0, offset - (end - len(choice.prompt.text))) for offset in offsets]

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

    def _completion(self) -> Callable[..., Completion]:
        """Returns a function that makes answers or events with the id of one request."""
        about = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._trained.name}
        return lambda choices, usage=None: Completion(**about, choices=choices, usage=usage)
