"""Ways to read the unpredicted part of a row: causally, as a prefix or by an encoder; for rows, configs and decoding.

A further way is a subclass of `Given` that overrides what differs; `Task(given=…)` takes an object of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flash_lm.config.experiment import Config, without_prefix

if TYPE_CHECKING:  # numpy, and what imports it, is not for a command's --help
    from collections.abc import Sequence

    import numpy as np

    from flash_lm.data.packing import Packer


class Given:
    """Reads the given part of a row causally, from left to right, as the rest; base class of the other ways.

    Attributes:
        whole_texts: whether a text can be read and scored from left to right, all of it predicted.
        apart: whether the given part is a separate text, so that a text cannot be continued.
        scored: what `evaluate` prints after the number of scored tokens.
    """

    whole_texts = True
    apart = False
    scored = ""

    def packer(self, pack: str) -> Packer:
        """The packer that makes the rows of a split, for `data.pack`."""
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

    def prompt(self, prefix: np.ndarray) -> np.ndarray:
        """The prompt of a pair, of what stands before its second text: first text and begin-of-text."""
        return prefix

    def first(self, source: np.ndarray, kept: np.ndarray, length: int) -> np.ndarray:
        """The prompt of a pair that may be cut: of its uncut first text, and of the prompt of the row that has both."""
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
        """The first tokens of a row, to which new ones are added; `begin` is begin-of-text."""
        return prompt

    def sources(self, prompts: Sequence[np.ndarray]) -> Sequence[np.ndarray] | None:
        """The source tokens that an encoder reads; None: no encoder."""
        return None

    def both_ways(self, lengths: Any) -> Any:
        """The number of tokens with bidirectional attention, of prompts of these lengths; None: all are causal."""
        return None


class _Prefix(Given):
    """Reads the given part as a prefix with bidirectional attention (`prefix_BxL`)."""

    whole_texts = False
    scored = " after a prefix"

    def problems(self, config: Config) -> list[str]:
        return super().problems(config) + without_prefix(config.model.families)

    def filling(self, length: int) -> int:
        """The prefix is half of the row."""
        return length // 2

    def both_ways(self, lengths: Any) -> Any:
        return lengths


class _Source(Given):
    """Reads the given part with an encoder (`source_BxM`); the row begins with begin-of-text."""

    whole_texts = False
    apart = True
    scored = " after a source"

    def packer(self, pack: str) -> Packer:
        from flash_lm.data.pairs import SourceRows  # noqa: PLC0415 (not for benchmarks)

        return SourceRows

    def problems(self, config: Config) -> list[str]:
        sentences, task = [], config.task
        if config.model.encoder is None:
            sentences.append(f"task={task} needs an encoder: set --config.model.encoder.family, such as transformer")
        if config.data.pack != "examples":
            sentences.append(
                f"task={task} needs pairs: set data.pack=examples and a corpus of them, such as couplets, copy, "
                "or hf with data.pair_column"
            )
        return sentences

    def prompt(self, prefix: np.ndarray) -> np.ndarray:
        return prefix[:-1]

    def first(self, source: np.ndarray, kept: np.ndarray, length: int) -> np.ndarray:
        return source[:length]

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
