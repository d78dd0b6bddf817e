"""Timing in turns: all cells of a comparison in each round, so that a drift of the machine affects all equally."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

ROUNDS = 3
SETTLING, COUNTED = 2, 2  # turns of a cell per round
PAUSE_S = 0.1  # before a turn, so that memory that the last turn frees in another thread is available
SLOW_MS = 30_000.0  # a slower cell gets only one turn


@dataclasses.dataclass
class Cell:
    """One thing to time.

    Attributes:
        name: name for the progress line.
        turn: does the work once, waits for its end, and returns the milliseconds.
        warm_ms: time of its first turn, which is not counted.
        times_ms: times of the counted turns.
    """

    name: str
    turn: Callable[[], float]
    warm_ms: float
    times_ms: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def warm_up(cls, name: str, turn: Callable[[], float]) -> "Cell":
        """Makes a cell and takes its first turn, in which it may compile, touch its memory, or fail."""
        return cls(name, turn, warm_ms=turn())

    @classmethod
    def compile(cls, name: str, turn: Callable[[], float]) -> "Cell":
        """Makes a cell, with one turn that compiles and one that is timed."""
        turn()
        return cls.warm_up(name, turn)

    @property
    def median_ms(self) -> float:
        """The median of its turns."""
        return statistics.median(self.times_ms)

    @property
    def rounds_ms(self) -> list[float]:
        """The mean of the counted turns of each round."""
        rounds = [self.times_ms[i : i + COUNTED] for i in range(0, len(self.times_ms), COUNTED)]
        return [statistics.fmean(turns) for turns in rounds]

    @property
    def iqr_ms(self) -> float:
        """The interquartile range; 0 for a single turn."""
        if len(self.times_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return high - low


def take_turns(
    cells: Sequence[Cell],
    rounds: int,
    log: Callable[[str], None] = lambda text: None,
    keep: Callable[[], object] = lambda: None,
    settling: int = SETTLING,
) -> None:
    """Runs `rounds` rounds of COUNTED turns per cell; a cell with a slow first turn gets one turn, in the first round.

    Uncounted turns come first: while other cells take their turns, caches go cold and a virtual machine may return
    freed memory to its host, which makes the next steps take twice as long. A training run never waits like that.

    Args:
        cells: the cells, whose `times_ms` are filled in.
        rounds: 1 or more.
        log: called with the progress and the time left.
        keep: called after each cell's turns in a round, to write what is known by then.
        settling: uncounted turns of a cell per round.
    """
    turns = [[cell for cell in cells if i == 0 or cell.warm_ms <= SLOW_MS] for i in range(rounds)]
    for i, turn in enumerate(turns):
        left = (settling + COUNTED) * sum(cell.warm_ms for later in turns[i:] for cell in later) / 1000
        log(f"round {i + 1} of {rounds}, about {left:,.0f} s left")
        for cell in turn:
            uncounted, counted = (settling, COUNTED) if cell.warm_ms <= SLOW_MS else (0, 1)
            for number in range(uncounted + counted):
                time.sleep(PAUSE_S)
                took_ms = cell.turn()
                if number >= uncounted:
                    cell.times_ms.append(took_ms)
            keep()


def make_turn(work: Callable[[], object]) -> Callable[[], float]:
    """Returns a turn that does `work` and returns the milliseconds; `work` must wait for its end.

    >>> make_turn(lambda: None)() >= 0
    True
    """

    def turn() -> float:
        start = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - start)

    return turn
