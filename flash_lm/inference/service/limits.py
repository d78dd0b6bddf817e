"""A service's limits, which are flags of its command. Imports nothing slow, so that --help is quick."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flash_lm.errors import InputError, TooLongError

if TYPE_CHECKING:
    from flash_lm.inference.model import TrainedModel


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a service.

    Attributes:
        rows: rows on the device at the same time.
        waiting: rows that may wait in the queue.
        prompt_tokens: tokens per prompt.
        masks: masks per request.
        new_tokens: new tokens per answer.
        request_tokens: tokens of all rows of a request, each with its prompt and its answer.
        seconds: time limit per request, including its wait.
    """

    rows: int = 16
    waiting: int = 256
    prompt_tokens: int = 1024
    masks: int = 64
    new_tokens: int = 512
    request_tokens: int = 32768
    seconds: float = 120.0

    def check(self, what: str, count: int, limit: int) -> None:
        """Raises TooLongError for too many tokens."""
        if count > limit:
            raise TooLongError(f"{what} of {count} tokens is over the limit of {limit} of this service: shorten it")

    def check_new(self, count: int) -> None:
        """Raises InputError if more new tokens are asked for than an answer may have."""
        if count > self.new_tokens:
            raise InputError(
                f"max_tokens, an answer of {count} tokens is over the limit of {self.new_tokens} of this service: "
                f"lower it"
            )

    def check_all(self, rows: Iterable[int]) -> None:
        """Raises InputError if the rows of a request, of so many tokens each, have too many together.

        A small request may ask for many rows. One row may always be as long as the other limits allow.
        """
        rows = list(rows)
        most = max(self.request_tokens, self.prompt_tokens + self.new_tokens)
        if len(rows) > 1 and sum(rows) > most:
            raise InputError(
                f"{len(rows)} answers have {sum(rows)} tokens with their prompts, over the limit of {most} per request "
                f"of this service: ask for fewer, or for shorter ones"
            )

    def prompt_of(self, trained: "TrainedModel") -> int:
        """Most tokens of a prompt of a model, which may have fewer positions."""
        longest = trained.longest_prompt
        return min(self.prompt_tokens, longest or self.prompt_tokens)

    def characters(self, trained: "TrainedModel") -> int:
        """Characters of the longest text that can fit into `prompt_tokens`; [MASK] is longer than most tokens."""
        from flash_lm.data.tokenizer import MASK  # noqa: PLC0415 (slow to import)

        return self.prompt_tokens * max(trained.characters_a_token, len(MASK))

    def check_text(self, what: str, text: str, trained: "TrainedModel") -> None:
        """Raises TooLongError for a text too long for any tokenisation to fit; checked before tokenising."""
        if len(text) > (most := self.characters(trained)):
            raise TooLongError(
                f"{what} of {len(text)} characters is over the limit of {self.prompt_tokens} tokens of this service, "
                f"into which at most {most} fit: shorten it"
            )
