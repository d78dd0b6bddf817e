"""How a model may read what is given of a row; each way says what it means to rows, configs, decoding and scores.

A way of your own is a subclass of `Given` that overrides what differs; `Task(given=…)` takes an object of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flash_lm.config.experiment import Config, without_prefix

if TYPE_CHECKING:  # numpy, and what imports it, is not for a command's --help
    from collections.abc import Sequence

    import numpy as np

    from flash_lm.data.packing import Packer


class Given:
    """What is given stands before the rest of a row, and is read from left to right as the rest is.

    Attributes:
        whole_texts: whether a whole text can be read and scored from left to right, as if nothing of it were given.
        apart: whether what is given is a text of its own, so that a text cannot be continued.
        scored: what `evaluate` prints after the number of scored tokens.
    """

    whole_texts = True
    apart = False
    scored = ""

    def packer(self, pack: str) -> Packer:
        """Makes the rows of a split, given `data.pack`."""
        from flash_lm.data.splits import ROWS  # noqa: PLC0415 (not for benchmarks)

        return ROWS[pack]

    def problems(self, config: Config) -> list[str]:
        """Sentences on keys that do not go together."""
        if config.model.encoder is None:
            return []
        return [
            f"model.encoder.family={config.model.encoder} needs a source: set --config.task=seq2seq, or leave it open"
        ]

    def filling(self, length: int) -> int:
        """The number in the arrays that the task adds to a row of a benchmark, of `length` tokens."""
        return 1

    def prompt(self, given: np.ndarray) -> np.ndarray:
        """The prompt of a pair, of what stands before its second text: first text and begin-of-text."""
        return given

    def first(self, whole: np.ndarray, kept: np.ndarray, length: int) -> np.ndarray:
        """The prompt of a pair that may be cut: its whole first text, and the prompt of the row that has both."""
        return kept

    def room(self, length: int) -> int:
        """Most tokens of an example for rows of `length` tokens."""
        return length

    def longest(self, row: int | None, source: int | None) -> int | None:
        """Most tokens of a prompt, of two limits: what a row has room for, and what an encoder reads."""
        return row

    def longest_first(self, prompt: int) -> int:
        """Most tokens of the first text of a pair whose texts are equally long; a prompt has at most `prompt`."""
        return (prompt - 1) // 2

    def begun(self, prompt: np.ndarray, begin: np.ndarray) -> np.ndarray:
        """The first tokens of a row, to which new ones are added, given begin-of-text."""
        return prompt

    def sources(self, prompts: Sequence[np.ndarray]) -> Sequence[np.ndarray] | None:
        """What an encoder reads; None: there is none."""
        return None

    def both_ways(self, lengths: Any) -> Any:
        """How many tokens of prompts of these lengths see all others of them; None: those before them alone."""
        return None


class _Prefix(Given):
    """What is given is a prefix that is seen both ways (`prefix_BxL`)."""

    whole_texts = False
    scored = " after a prefix"

    def problems(self, config: Config) -> list[str]:
        return super().problems(config) + without_prefix(config.model.families)

    def filling(self, length: int) -> int:
        """Half of the row is given."""
        return length // 2

    def both_ways(self, lengths: Any) -> Any:
        return lengths


class _Source(Given):
    """What is given is the source of an encoder (`source_BxM`); the row begins with begin-of-text."""

    whole_texts = False
    apart = True
    scored = " after a source"

    def packer(self, pack: str) -> Packer:
        from flash_lm.data.pairs import SourceRows  # noqa: PLC0415 (not for benchmarks)

        return SourceRows

    def problems(self, config: Config) -> list[str]:
        found, task = [], config.task
        if config.model.encoder is None:
            found.append(f"task={task} needs an encoder: set --config.model.encoder.family, such as transformer")
        if config.data.pack != "examples":
            found.append(
                f"task={task} needs pairs: set data.pack=examples and a corpus of them, such as couplets, copy, "
                "or hf with data.pair_column"
            )
        return found

    def prompt(self, given: np.ndarray) -> np.ndarray:
        return given[:-1]

    def first(self, whole: np.ndarray, kept: np.ndarray, length: int) -> np.ndarray:
        return whole[:length]

    def room(self, length: int) -> int:
        """A source may be as long as a row."""
        return 2 * length

    def longest(self, row: int | None, source: int | None) -> int | None:
        return source

    def longest_first(self, prompt: int) -> int:
        return prompt - 1

    def begun(self, prompt: np.ndarray, begin: np.ndarray) -> np.ndarray:
        return begin

    def sources(self, prompts: Sequence[np.ndarray]) -> Sequence[np.ndarray] | None:
        return prompts


BEFORE, PREFIX, SOURCE = Given(), _Prefix(), _Source()
GIVEN: dict[str, Given] = {"before": BEFORE, "prefix": PREFIX, "source": SOURCE}
