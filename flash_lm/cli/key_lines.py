"""What is known of each key: its type, its default, its meaning, and who reads it."""

from collections.abc import Iterable, Sequence

from flash_lm.config.experiment import Config
from flash_lm.config.keys import SECTIONS, Key, key_names, keys
from flash_lm.config.registry import CORPORA, FAMILIES, HEADS, OPTIMIZERS, TASKS
from flash_lm.config.renamed_keys import FOREIGN
from flash_lm.errors import nearest

_LONGEST = 60  # characters of a default


def readers() -> dict[str, list[str]]:
    """Maps each key that not all rows read to the rows that read it."""
    readers_by_key: dict[str, list[str]] = {}
    for family, row in FAMILIES.items():
        for name in row.reads():
            readers_by_key.setdefault(name, []).append(family)
    others = [(name, row) for table in (HEADS, TASKS, CORPORA, OPTIMIZERS) for name, row in table.items()]
    for name, kind in ((name, kind) for name, row in others for kind in row.sections):
        for key in key_names(kind):
            readers_by_key.setdefault(key, []).append(name)
    for name, kind in ((name, SECTIONS[one]) for name, row in TASKS.items() for one in row.of_model):
        for key in key_names(kind):
            readers_by_key.setdefault(key, []).append(name)
    return readers_by_key


def default_text(one: Key) -> str:
    """A key's default: open, if it is filled in later, and … if it is long."""
    text = f"{one.default}"
    return "open" if one.default is None else "…" if len(text) > _LONGEST else text


def find_keys(words: Sequence[str]) -> list[Key]:
    """The keys whose names contain one of the words, or have it as a synonym such as lr; all, if there is no word."""
    named = {FOREIGN[word] for word in words if word in FOREIGN}
    return [one for one in keys(Config) if not words or one.name in named or any(word in one.name for word in words)]


def nearest_key(word: str) -> str | None:
    """The key or synonym whose last part is most like a word; None: none is like it."""
    return nearest(word, [*(one.name.rpartition(".")[2] for one in keys(Config)), *FOREIGN])


def key_lines(found: Iterable[Key]) -> list[str]:
    """Two lines for each key: its name, type and default; and its meaning with who reads it, if not all do."""
    who, lines = readers(), []
    for one in found:
        of = f" ({', '.join(who[one.name])})" if one.name in who else ""
        lines += [f"{one.name}: {one.kind.__name__} = {default_text(one)}", f"    {one.about['unit']}{of}"]
    return lines
