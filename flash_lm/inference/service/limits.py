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
        rows: sequences on the device at the same time.
        waiting: sequences that may wait in the queue.
        prompt_tokens: tokens per prompt.
        masks: masks per request.
        new_tokens: new tokens per answer.
        request_tokens: tokens of all sequences of a request, prompts and answers together.
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
        """Raises InputError if the sequences of a request, of these numbers of tokens, have too many tokens in sum.

        A small request may ask for many sequences. A single one may be as long as the other limits allow.
        """
        # The cost of a request grows with the sum over its sequences.
        rows = list(rows)
        most = max(self.request_tokens, self.prompt_tokens + self.new_tokens)
        if len(rows) > 1 and sum(rows) > most:
            raise InputError(
                f"{len(rows)} answers have {sum(rows)} tokens with their prompts, over the limit of {most} per request "
                f"of this service: ask for fewer, or for shorter ones"
            )

    def max_prompt_tokens(self, trained: "TrainedModel") -> int:
        """Largest prompt in tokens, from the limit and the positions of the model."""
        longest = trained.longest_prompt
        return min(self.prompt_tokens, longest or self.prompt_tokens)

    def characters(self, trained: "TrainedModel") -> int:
        """Largest number of characters that can fit into `prompt_tokens`; [MASK] is longer than most tokens."""
        from flash_lm.data.tokenizer import MASK  # noqa: PLC0415 (slow to import)

        return self.prompt_tokens * max(trained.max_token_characters, len(MASK))

    def check_text(self, what: str, text: str, trained: "TrainedModel") -> None:
        """Raises TooLongError for a text too long for any tokenisation to fit; checked before tokenising."""
        if len(text) > (most := self.characters(trained)):
            raise TooLongError(
                f"{what} of {len(text)} characters is over the limit of {self.prompt_tokens} tokens of this service, "
                f"into which at most {most} fit: shorten it"
            )
