"""The words of a verdict, and how many seeds it needs."""

import dataclasses
from collections.abc import Sequence

REPRODUCED, CONTRADICTED, UNDECIDED = (f"{word} at small scale" for word in ("reproduced", "contradicted", "undecided"))
ARITHMETIC, NOT_TESTABLE, NOT_RUN = "by arithmetic", "not testable here", "not run"
WORDS = (REPRODUCED, UNDECIDED, CONTRADICTED, ARITHMETIC, NOT_TESTABLE, NOT_RUN)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result for a claim: a word of WORDS (None: not judged), the figure, and the reasons not to decide."""

    word: str | None
    figure: str
    reasons: tuple[str, ...] = ()


def decided(held: Sequence[bool]) -> str:
    """The word for what held with each seed or run. A single one has no spread, so it decides nothing."""
    if len(held) < 2:
        return UNDECIDED
    if all(held):
        return REPRODUCED
    return UNDECIDED if any(held) else CONTRADICTED
