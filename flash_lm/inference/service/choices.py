"""The choices of a request of OpenAI's API: sequences that continue token ids in the batch of the text service."""

import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from flash_lm.errors import InputError
from flash_lm.inference.generation import TextDecoder
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.running_batch import NewTokens
from flash_lm.inference.service.completion_format import GeneratedAsked, Ids, Usage
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.scheduler import Row
from flash_lm.inference.service.services import TextService
from flash_lm.inference.service.stop_strings import StopStringFilter
from flash_lm.inference.settings import draw_seed

Reason = Literal["stop", "length"]


class EncodedPrompt(NamedTuple):
    """A prompt as tokens.

    Attributes:
        ids: all tokens before the answer.
        text: its text, for answers that repeat it.
        first: number of tokens that were put in front of those of the request: 1 for begin-of-text, or 0.
    """

    ids: Ids
    text: str = ""
    first: int = 0


@dataclasses.dataclass
class ChoiceState:
    """A choice while its text is generated.

    Attributes:
        index: index of the choice.
        prompt: its prompt.
        row: the sequence to generate; None: nothing is generated.
        decode: decodes new tokens.
        stop_filter: cuts the text off at a stop text.
        tokens: new tokens so far.
        text: new text so far.
    """

    index: int
    prompt: EncodedPrompt
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


class Choices:
    """Makes and generates the choices of requests."""

    def __init__(self, trained: TrainedModel, service: TextService, limits: Limits):
        """Compiles nothing."""
        self._trained, self._service, self._limits = trained, service, limits

    def check_count(self, count: int, *, scored: bool = False) -> None:
        """Raises InputError if a request has too many sequences; those to be scored all wait in a separate queue."""
        limit = self._limits.waiting + (0 if scored else self._limits.rows)
        if count > limit:
            raise InputError(f"{count} sequences are over the limit of {limit} of this service: ask for fewer")

    def make(
        self, prompts: Sequence[EncodedPrompt], asked: GeneratedAsked, max_tokens: int | None
    ) -> list[ChoiceState]:
        """The choices of a request: n samples of each prompt, with the random numbers of their index.

        Args:
            prompts: the prompts.
            asked: the request.
            max_tokens: new tokens; None: as many as the service allows.

        Raises:
            InputError: a limit is exceeded, and as `Scheduler.check`.
        """
        # The tokens of each prompt and of its answer must be within the limits.
        new = self._service.new_tokens(max(len(prompt.ids) for prompt in prompts), max_tokens)
        self._limits.check_all(len(prompt.ids) + new for prompt in prompts for _ in range(asked.n))
        sampling, tokenizer = asked.sampling(), self._trained.tokenizer
        seed = draw_seed(-1 if asked.seed is None else asked.seed)
        choices = list[ChoiceState]()
        for prompt in prompts:
            for number in range(asked.n):
                row = Row(np.array(prompt.ids, np.int32), sampling, seed, number, new) if new else None
                stop_filter = StopStringFilter(asked.stops)
                choices.append(ChoiceState(len(choices), prompt, row, TextDecoder(tokenizer), stop_filter))
        self._service.rows.scheduler.check([one.row for one in choices if one.row])
        return choices

    async def generate(self, choices: Sequence[ChoiceState]) -> AsyncIterator[tuple[ChoiceState, str, bool]]:
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

    def kept_tokens(self, choice: ChoiceState) -> Ids:
        """The tokens that begin in the text, and end-of-text if the model has ended it."""
        # A stop text may cut off tokens that have been generated.
        if choice.stop_filter.stopped:
            return [
                i
                for i, offset in zip(choice.tokens, self.offsets(choice.tokens), strict=True)
                if offset < len(choice.text)
            ]
        ended_by_model = choice.row is not None and choice.row.ended_by_model
        return [*choice.tokens, *([self._trained.tokenizer.end] if ended_by_model else [])]

    def offsets(self, ids: Ids) -> list[int]:
        """The offset of each token's text, in characters."""
        decode, offset, offsets = TextDecoder(self._trained.tokenizer), 0, []
        for i in ids:
            offsets.append(offset)
            offset += len(decode([i]))
        return offsets

    def usage(self, asked: GeneratedAsked, choices: Sequence[ChoiceState], kept: Iterable[Ids]) -> Usage:
        """The numbers of tokens of a request, from the tokens that each choice keeps."""
        end = self._trained.tokenizer.end
        # Samples of the same prompt count its tokens once.
        prompts = sum(len(choice.prompt.ids) - choice.prompt.first for choice in choices[:: asked.n])
        new = sum(i != end for tokens in kept for i in tokens)
        return Usage(prompt_tokens=prompts, completion_tokens=new, total_tokens=prompts + new)
