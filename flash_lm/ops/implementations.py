"""Which implementation each part of a model got: logged once, or recorded for the first lines and results of a run."""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator

_log = logging.getLogger(__name__)
_record: contextvars.ContextVar["Implementations | None"] = contextvars.ContextVar("record", default=None)


class Implementations(dict[str, list[str]]):
    """Sentences on the implementation of each part, by part: several, if its layers differ."""

    def __str__(self) -> str:
        """All on one line, such as "softmax attention: cudnn; decayed sums: compiled by XLA, cpu has no kernels"."""
        return "; ".join(f"{part}: {' and '.join(sentences)}" for part, sentences in sorted(self.items()))

    def line(self) -> dict[str, str]:
        """A field of result lines; none without parts."""
        return {"implementations": str(self)} if self else {}


def report(part: str, sentence: str) -> None:
    """Says which implementation a part of a model has: to the record of `recorded`, else to the log, once.

    Args:
        part: name of the part, such as "softmax attention".
        sentence: name of the implementation, and why it is no other.
    """
    record = _record.get()
    if record is None:
        _say(f"{part}: {sentence}")
    elif sentence not in record.setdefault(part, []):
        record[part].append(sentence)


@contextlib.contextmanager
def recorded() -> Iterator[Implementations]:
    """Records what is reported while functions are traced in the block."""
    record = Implementations()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


@functools.cache
def _say(line: str) -> None:
    _log.info(line)
