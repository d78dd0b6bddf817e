"""How a model reads the text that it is conditioned on: causally, as a bidirectional prefix, or with an encoder.

A subclass of `Conditioning` that overrides some methods defines another way; `Task(conditioning=…)` takes its object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flash_lm.config.experiment import Config, without_prefix

if TYPE_CHECKING:  # numpy, and what imports it, is not for a command's --help
    from collections.abc import Sequence

    import numpy as np

    from flash_lm.data.packing import Packer


class Conditioning:
    """Reads the prompt causally, from left to right, like the tokens to predict; base class of the other ways.

    Attributes:
        scores_full_text: whether all tokens of a text can be predicted and scored from left to right.
        separate_source: whether the prompt is a separate text, so that a text cannot be continued.
        scored: the words that `evaluate` prints after the number of scored tokens.
    """

    scores_full_text = True
    separate_source = False
    scored = ""

    def packer(self, pack: str) -> Packer:
        """The packer that makes the sequences of a split, for `data.pack`."""
        from flash_lm.data.splits import ROWS  # noqa: PLC0415 (not for benchmarks)

        return ROWS[pack]

    def problems(self, config: Config) -> list[str]:
        """Sentences on keys that do not fit together."""
        if config.model.encoder is None:
            return []
        return [
            f"model.encoder.family={config.model.encoder} needs a source: set --config.task=seq2seq, or leave it open"
        ]

    def fill_value(self, length: int) -> int:
        """The value of the arrays that the task adds to a benchmark's sequence of `length` tokens."""
        return 1

    def make_prompt(self, prefix: np.ndarray) -> np.ndarray:
        """The prompt of a pair, from the tokens before its second text: the first text and begin-of-text."""
        return prefix

    def cut_prompt(self, source: np.ndarray, kept: np.ndarray, length: int) -> np.ndarray:
        """The prompt of a pair that may be cut, from its uncut first text and the prompt of the cut pair."""
        return kept

    def max_example_length(self, length: int) -> int:
        """Largest number of tokens of an example for sequence length `length`."""
        return length

    def max_prompt_length(self, row: int | None, source: int | None) -> int | None:
        """Largest number of tokens of a prompt, from the limits of a sequence and of an encoder's source."""
        return row

    def max_first_length(self, prompt: int) -> int:
        """Largest first text of a pair of equally long texts, in tokens; a prompt has at most `prompt`."""
        return (prompt - 1) // 2

    def row_start(self, prompt: np.ndarray, begin: np.ndarray) -> np.ndarray:
        """The first tokens of a decoded sequence, before the generated ones; `begin` is begin-of-text."""
        return prompt

    def sources(self, prompts: Sequence[np.ndarray]) -> Sequence[np.ndarray] | None:
        """The source tokens for an encoder; None: no encoder."""
        return None

    def prefix_length(self, lengths: Any) -> Any:
        """Number of tokens with bidirectional attention, from the lengths of prompts; None: all are causal."""
        return None


class _Prefix(Conditioning):
    """Reads the prompt as a prefix with bidirectional attention (`prefix_BxL`)."""

    scores_full_text = False
    scored = " after a prefix"

    def problems(self, config: Config) -> list[str]:
        return super().problems(config) + without_prefix(config.model.families)

    def fill_value(self, length: int) -> int:
        """The prefix is half of the sequence."""
        return length // 2

    def prefix_length(self, lengths: Any) -> Any:
        return lengths


class _Source(Conditioning):
    """Reads the prompt with an encoder (`source_BxM`); the decoder's sequence starts with begin-of-text."""

    scores_full_text = False
    separate_source = True
    scored = " after a source"

    def packer(self, pack: str) -> Packer:
        from flash_lm.data.pairs import SourceRows  # noqa: PLC0415 (not for benchmarks)

        return SourceRows

    def problems(self, config: Config) -> list[str]:
        # A source needs an encoder to read it, and examples that say where it ends.
        sentences, task = [], config.task
        if config.model.encoder is None:
            sentences.append(f"task={task} needs an encoder: set --config.model.encoder.family, such as transformer")
        if config.data.pack != "examples":
            sentences.append(
                f"task={task} needs pairs: set data.pack=examples and a corpus of them, such as couplets, copy, "
                "or hf with data.pair_column"
            )
        return sentences

    def make_prompt(self, prefix: np.ndarray) -> np.ndarray:
        return prefix[:-1]

    def cut_prompt(self, source: np.ndarray, kept: np.ndarray, length: int) -> np.ndarray:
        return source[:length]

    def max_example_length(self, length: int) -> int:
        """A source may be as long as a sequence."""
        return 2 * length

    def max_prompt_length(self, row: int | None, source: int | None) -> int | None:
        return source

    def max_first_length(self, prompt: int) -> int:
        return prompt - 1

    def row_start(self, prompt: np.ndarray, begin: np.ndarray) -> np.ndarray:
        return begin

    def sources(self, prompts: Sequence[np.ndarray]) -> Sequence[np.ndarray] | None:
        return prompts


BEFORE, PREFIX, SOURCE = Conditioning(), _Prefix(), _Source()
CONDITIONINGS: dict[str, Conditioning] = {"before": BEFORE, "prefix": PREFIX, "source": SOURCE}
