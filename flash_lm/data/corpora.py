"""The registry of corpora: what an entry declares, how it is loaded, and the entries of text corpora."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal

from flash_lm.config.data import DataConfig
from flash_lm.config.registry import CORPORA
from flash_lm.data.text_files import stdlib, text_files
from flash_lm.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class CorpusKind:
    """A registry entry: how a corpus is loaded, and which keys and commands it takes.

    Attributes:
        load: for text: a function of `config.data` and each section that returns a `data.corpus.Corpus`. For examples:
            a function of `config.data`, what a run knows of its corpus and each section; returns an ExampleCorpus.
        examples: whether each row is an example that has tokens already; otherwise text, to be tokenised and packed.
        tokenizer: of examples that are read from files: their tokenizer; None: it depends on the files.
        uses_parent_tokenizer: of examples: whether they are written with the tokenizer of train.init_from or
            data.tokenizer_path; without either, with `tokenizer`, if there is one.
        answers: what generate and serve can do with a causal model of this corpus; None: nothing.
        mixes: whether data.mixture may name several sources of it.
        reads_path: whether the corpus reads data.path.
        endings: of files that only this corpus reads: a data.path to them needs no data.corpus.
        labelled: whether its examples or documents have labels, by `config.data`.
        paired: whether its documents are pairs, each of which is an example, by `config.data`.
        ends_in_values: whether the last 256 words of its vocabulary are the values of a byte.
        sections: its sections of keys in `config.data`.
        problems: sentences on what is wrong with a config that uses it.
    """

    load: Callable[..., Any]
    examples: bool = False
    tokenizer: Tokenizer | None = None
    uses_parent_tokenizer: bool = False
    answers: Literal["text", "couplets", "images"] | None = "text"
    mixes: bool = False
    reads_path: bool = True
    endings: tuple[str, ...] = ()
    labelled: Callable[[DataConfig], bool] = lambda config: False
    paired: Callable[[DataConfig], bool] = lambda config: False
    ends_in_values: bool = False
    sections: tuple[type, ...] = ()
    problems: Callable[[DataConfig], list[str]] = lambda config: []


def register_corpus(name: str, row: CorpusKind) -> None:
    """Adds an entry to the registry of corpora, for `data.corpus`."""
    CORPORA.register(name, row)


_DATA_SETS = (
    ".parquet",
    ".arrow",
    *(f"{kind}{gz}" for kind in (".json", ".jsonl", ".ndjson", ".csv") for gz in ("", ".gz")),
)


def _hugging_face(config: DataConfig) -> Any:
    from flash_lm.data.hugging_face import hugging_face  # noqa: PLC0415 (it imports pyarrow)

    return hugging_face(config)


def _chats(config: DataConfig, known: Any) -> Any:
    from flash_lm.data.chat_corpus import chats  # noqa: PLC0415 (it imports Jinja and the tokenizers)

    return chats(config, known)


def needs_path(what: str) -> Callable[[DataConfig], list[str]]:
    """Makes the check of a corpus that must have data.path: `what` it names."""

    def problems(config: DataConfig) -> list[str]:
        return [] if config.path else [f"data.corpus={config.corpus} needs data.path ({what}): set --config.data.path"]

    return problems


def _hugging_face_problems(config: DataConfig) -> list[str]:
    problems = needs_one_source(config)
    # Each of the columns must be a different one.
    columns = {name: getattr(config, name) for name in ("text_column", "label_column", "pair_column")}
    for (one, a), (other, b) in itertools.combinations(columns.items(), 2):
        if a and a == b:
            problems.append(f"data.{other} and data.{one} are both {a}: name two columns")
    if not config.label_column and config.label_share < 1:
        problems.append("data.label_share is of texts with labels: set data.label_column")
    for name in ("label_column", "pair_column"):
        if columns[name] and config.streaming:
            problems.append(f"data.{name} needs data.streaming=False: it is read at the start")
    return problems


def _chat_problems(config: DataConfig) -> list[str]:
    problems = needs_path("a .jsonl file, a folder of them, or a glob")(config)
    if config.tokenizer != "hf":
        problems.append(
            f"data.corpus=chat needs the tokenizer of a model with a chat template, not {config.tokenizer}: set "
            "data.tokenizer=hf and --config.train.init_from to an imported model, such as one named Instruct"
        )
    return problems


def needs_one_source(config: DataConfig) -> list[str]:
    """A sentence if not just one of data.path and data.name is set."""
    if bool(config.path) != bool(config.name):
        return []
    return [
        f"data.corpus={config.corpus} needs either data.name (a data set on the hub) or data.path (local files); "
        f"got data.name={config.name} and data.path={config.path}: set one and leave the other empty"
    ]


STDLIB = CorpusKind(stdlib, reads_path=False)
TEXT = CorpusKind(
    text_files, mixes=True, endings=(".txt", ".txt.gz"), problems=needs_path("a file, a folder or a glob")
)
HUGGING_FACE = CorpusKind(
    _hugging_face,
    mixes=True,
    endings=_DATA_SETS,
    problems=_hugging_face_problems,
    labelled=lambda config: config.label_column is not None,
    paired=lambda config: config.pair_column is not None and config.label_column is None,
)
CHAT = CorpusKind(_chats, examples=True, uses_parent_tokenizer=True, problems=_chat_problems)
