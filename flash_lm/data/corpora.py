"""The table of corpora: what each is and how to load it. A corpus's dependencies are imported when it is loaded."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal

from flash_lm.config.data import DataConfig
from flash_lm.config.keys import key, section
from flash_lm.config.registry import CORPORA


@dataclasses.dataclass(frozen=True)
class CorpusKind:
    """A row.

    Attributes:
        load: for text: a function of `config.data` and each section that returns a `data.corpus.Corpus`. For examples:
            a function of `config.data`, what a run knows of its corpus and each section; returns an ExampleCorpus.
        examples: whether each row is an example with its own tokens; otherwise it is text, to be tokenised and packed.
        answers: what generate and serve can do with a causal model of this corpus; None: nothing.
        mixes: whether data.mixture may name several places of it.
        reads_path: whether the corpus reads data.path.
        labelled: given `config.data`, whether its examples or documents have labels.
        paired: given `config.data`, whether its documents are pairs, each of which is an example.
        ends_in_values: whether the last 256 words of its vocabulary are the values of a byte.
        sections: its sections of keys in `config.data`.
        problems: sentences on what is wrong with a config that uses it.
    """

    load: Callable[..., Any]
    examples: bool = False
    answers: Literal["text", "couplets", "images"] | None = "text"
    mixes: bool = False
    reads_path: bool = True
    labelled: Callable[[DataConfig], bool] = lambda config: False
    paired: Callable[[DataConfig], bool] = lambda config: False
    ends_in_values: bool = False
    sections: tuple[type, ...] = ()
    problems: Callable[[DataConfig], list[str]] = lambda config: []


def register_corpus(name: str, row: CorpusKind) -> None:
    """Adds a row to the table of corpora, for `data.corpus`."""
    CORPORA.register(name, row)


@section("data.images")
class ImageOptions:
    """Options of data.corpus=images."""

    gray: bool = key(False, "one value a pixel, its luma, instead of its channels; not of idx files, which have one")


def _stdlib(config: DataConfig) -> Any:
    from flash_lm.data.text_files import stdlib  # noqa: PLC0415 (as all of these: slow to import)

    return stdlib(config)


def _text_files(config: DataConfig) -> Any:
    from flash_lm.data.text_files import text_files  # noqa: PLC0415

    return text_files(config)


def _hugging_face(config: DataConfig) -> Any:
    from flash_lm.data.hugging_face import hugging_face  # noqa: PLC0415

    return hugging_face(config)


def _couplets(config: DataConfig, own: Any) -> Any:
    from flash_lm.data.couplets import couplets  # noqa: PLC0415

    return couplets(config, own.tokenizer if own else None)


def _images(config: DataConfig, own: Any, options: ImageOptions) -> Any:
    from flash_lm.data.images import images  # noqa: PLC0415

    return images(config, options)


def _needs_path(what: str) -> Callable[[DataConfig], list[str]]:
    def problems(config: DataConfig) -> list[str]:
        return [] if config.path else [f"data.corpus={config.corpus} needs data.path ({what}): set --config.data.path"]

    return problems


def _of_hugging_face(config: DataConfig) -> list[str]:
    found = _needs_one_place(config)
    columns = {name: getattr(config, name) for name in ("text_column", "label_column", "pair_column")}
    for (one, a), (other, b) in itertools.combinations(columns.items(), 2):
        if a and a == b:
            found.append(f"data.{other} and data.{one} are both {a}: name two columns")
    if not config.label_column and config.label_share < 1:
        found.append("data.label_share is of texts with labels: set data.label_column")
    for name in ("label_column", "pair_column"):
        if columns[name] and config.streaming:
            found.append(f"data.{name} needs data.streaming=False: it is read at the start")
    return found


def _needs_one_place(config: DataConfig) -> list[str]:
    if bool(config.path) != bool(config.name):
        return []
    return [
        f"data.corpus={config.corpus} needs either data.name (a data set on the hub) or data.path (local files); "
        f"got data.name={config.name} and data.path={config.path}: set one and leave the other empty"
    ]


register_corpus("stdlib", CorpusKind(_stdlib, reads_path=False))
register_corpus("text", CorpusKind(_text_files, mixes=True, problems=_needs_path("a file, a folder or a glob")))
register_corpus(
    "hf",
    CorpusKind(
        _hugging_face,
        mixes=True,
        problems=_of_hugging_face,
        labelled=lambda config: config.label_column is not None,
        paired=lambda config: config.pair_column is not None and config.label_column is None,
    ),
)
register_corpus("couplets", CorpusKind(_couplets, examples=True, answers="couplets", problems=_needs_path("a folder")))
register_corpus(
    "images",
    CorpusKind(
        _images,
        examples=True,
        answers="images",
        labelled=lambda config: True,
        ends_in_values=True,
        sections=(ImageOptions,),
        problems=_needs_one_place,
    ),
)
