"""The words of a verdict, how many seeds it needs, and at which size it was found."""

import dataclasses
from collections.abc import Sequence

from flash_lm.runs.jsonl import Line

REPRODUCED, CONTRADICTED, UNDECIDED = (f"{word} at small scale" for word in ("reproduced", "contradicted", "undecided"))
ARITHMETIC, NOT_TESTABLE, NOT_RUN = "by arithmetic", "not testable here", "not run"
WORDS = (REPRODUCED, UNDECIDED, CONTRADICTED, ARITHMETIC, NOT_TESTABLE, NOT_RUN)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result for a claim.

    Attributes:
        word: of WORDS; None: not judged.
        figure: what was found.
        reasons: not to decide.
        lines: of results, from which the figure is.
    """

    word: str | None
    figure: str
    reasons: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()

    @property
    def size(self) -> str:
        """The sizes of the models, and how long they were trained, in words; empty if the lines do not have them."""
        tokens = [line["step"] * line["batch_tokens"] for line in self.lines if {"step", "batch_tokens"} <= line.keys()]
        named = {
            "parameters": [line[key] for line in self.lines for key in ("parameters", "params") if key in line],
            "steps": [line["step"] for line in self.lines if "step" in line],
            "tokens of training": tokens,
        }
        return ", ".join(f"{_span(found)} {what}" for what, found in named.items() if found)


def decided(held: Sequence[bool]) -> str:
    """The word for what held with each seed or run. A single one has no spread, so it decides nothing."""
    if len(held) < 2:
        return UNDECIDED
    if all(held):
        return REPRODUCED
    return UNDECIDED if any(held) else CONTRADICTED


def _span(numbers: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{x / 1e6:.3g}M" if x >= 1e5 else f"{x:,}" for x in (min(numbers), max(numbers))))
