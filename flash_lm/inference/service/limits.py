"""What a service takes, which are flags of its command: it imports nothing slow, so that --help is quick."""

import dataclasses
from typing import TYPE_CHECKING

from flash_lm.errors import InputError

if TYPE_CHECKING:
    from flash_lm.inference.trained_model import TrainedModel


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of a service.

    Attributes:
        rows: that are on the device at a time.
        waiting: rows that may wait for a place.
        prompt_tokens: of a request.
        masks: of a request.
        new_tokens: of an answer.
        seconds: that a request may take, its wait included.
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
            raise InputError(f"{what} of {count} tokens is over the {limit} that this service takes: shorten it")

    def characters(self, trained: "TrainedModel") -> int:
        """Of the longest text that may have no more tokens than a request; a mask is written longer than most."""
        from flash_lm.data.tokenizers import MASK  # noqa: PLC0415 (slow to import)

        return self.prompt_tokens * max(trained.characters_a_token, len(MASK))

    def check_text(self, what: str, text: str, trained: "TrainedModel") -> None:
        """Raises InputError for a text that is too long for the tokens, whatever they are, before it is tokenised."""
        if len(text) > (most := self.characters(trained)):
            raise InputError(
                f"{what} of {len(text)} characters is over the {self.prompt_tokens} tokens that this service takes, in "
                f"which no more than {most} fit: shorten it"
            )
