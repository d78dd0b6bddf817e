"""A service's limits, which are flags of its command. Imports nothing slow, so that --help is quick."""

import dataclasses
from typing import TYPE_CHECKING

from flash_lm.errors import InputError

if TYPE_CHECKING:
    from flash_lm.inference.trained_model import TrainedModel


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a service.

    Attributes:
        rows: rows on the device at the same time.
        waiting: rows that may wait in the queue.
        prompt_tokens: tokens per prompt.
        masks: masks per request.
        new_tokens: new tokens per answer.
        seconds: time limit per request, including its wait.
    """

    rows: int = 16
    waiting: int = 256
    prompt_tokens: int = 1024
    masks: int = 64
    new_tokens: int = 512
    seconds: float = 120.0

    def check(self, what: str, count: int, limit: int) -> None:
        """Raises InputError for too many tokens."""
        if count > limit:
            raise InputError(f"{what} of {count} tokens is over the limit of {limit} of this service: shorten it")

    def prompt_of(self, trained: "TrainedModel") -> int:
        """Most tokens of a prompt of a model, which may have fewer positions."""
        longest = trained.longest_prompt
        return min(self.prompt_tokens, longest or self.prompt_tokens)

    def characters(self, trained: "TrainedModel") -> int:
        """Characters of the longest text that can fit into `prompt_tokens`; [MASK] is longer than most tokens."""
        from flash_lm.data.tokenizers import MASK  # noqa: PLC0415 (slow to import)

        return self.prompt_tokens * max(trained.characters_a_token, len(MASK))

    def check_text(self, what: str, text: str, trained: "TrainedModel") -> None:
        """Raises InputError for a text too long for any tokenisation to fit; checked before tokenising."""
        if len(text) > (most := self.characters(trained)):
            raise InputError(
                f"{what} of {len(text)} characters is over the limit of {self.prompt_tokens} tokens of this service, "
                f"into which at most {most} fit: shorten it"
            )
