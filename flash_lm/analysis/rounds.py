"""Timing in turns: all cells of a comparison once a round, so that a drift of the machine hits all alike."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

ROUNDS = 3
SETTLING, COUNTED = 2, 2  # turns of a cell in a round
PAUSE_S = 0.1  # before a turn, so that what the last one frees, in a thread of its own, is there for the next one
SLOW_MS = 30_000.0  # a turn that takes longer is taken once


@dataclasses.dataclass
class Cell:
    """One thing to time.

    Attributes:
        name: for the progress line.
        turn: does it once and waits for its end; milliseconds.
        warm_ms: of its first turn, which counts for nothing else.
        times_ms: of its turns.
    """

    name: str
    turn: Callable[[], float]
    warm_ms: float
    times_ms: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def warmed(cls, name: str, turn: Callable[[], float]) -> "Cell":
        """After its first turn, in which it may compile, touch its memory, or fail."""
        return cls(name, turn, warm_ms=turn())

    @classmethod
    def compiled(cls, name: str, turn: Callable[[], float]) -> "Cell":
        """After a turn that compiles, and one that tells how long it takes."""
        turn()
        return cls.warmed(name, turn)

    @property
    def median_ms(self) -> float:
        """Of its turns."""
        return statistics.median(self.times_ms)

    @property
    def iqr_ms(self) -> float:
        """Distance of the quartiles; 0 of a single turn."""
        if len(self.times_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return high - low


def take_turns(cells: Sequence[Cell], rounds: int, say: Callable[[str], None] = lambda text: None) -> None:
    """`rounds` rounds of COUNTED turns a cell; a cell whose first turn was slow has one turn, in the first round.

    Before those that count go some that do not: while the others have theirs, caches go cold and a virtual machine may
    give freed memory back to its host, which makes the next steps twice as long. A training run never waits.

    Args:
        cells: their `times_ms` are filled in.
        rounds: 1 or more.
        say: is told what is going on, and for how long still.
    """
    turns = [[cell for cell in cells if i == 0 or cell.warm_ms <= SLOW_MS] for i in range(rounds)]
    for i, turn in enumerate(turns):
        left = (SETTLING + COUNTED) * sum(cell.warm_ms for later in turns[i:] for cell in later) / 1000
        say(f"round {i + 1} of {rounds}, about {left:,.0f} s left")
        for cell in turn:
            settling, counted = (SETTLING, COUNTED) if cell.warm_ms <= SLOW_MS else (0, 1)
            for number in range(settling + counted):
                time.sleep(PAUSE_S)
                took_ms = cell.turn()
                if number >= settling:
                    cell.times_ms.append(took_ms)


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """A turn that does `work`, which waits for its end."""

    def turn() -> float:
        start = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - start)

    return turn
