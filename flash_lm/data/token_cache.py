"""The token cache: a corpus as one memory-mapped array of tokens per split, keyed by content and written atomically."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from flash_lm.config.data import DataConfig
from flash_lm.config.registry import CORPORA
from flash_lm.data.cache_folder import COMPLETE, DAMAGED, load_or_make, load_or_make_on_hosts
from flash_lm.data.corpus import SPLITS, UNSPLIT, Corpus, DocumentStream, Piece
from flash_lm.data.files import with_local_files
from flash_lm.data.foreign_tokenizer import read_tokenizer
from flash_lm.data.mixture import MixedCorpus, configs_of_parts
from flash_lm.data.shared_tokenising import Parts, encode_shared
from flash_lm.data.tokenising_progress import Progress, in_bytes, in_time
from flash_lm.data.tokenized_text import TokenizedText, encode
from flash_lm.data.tokenizer import ByteTokenizer, Tokenizer
from flash_lm.data.tokenizers import SentencePieceTokenizer, load_tokenizer, save_tokenizer, train_sentencepiece
from flash_lm.errors import InputError
from flash_lm.runs.hosts import check_same, gather_from_hosts, is_first, on_all_hosts, several
from flash_lm.runs.local_copy import fetch
from flash_lm.runs.storage import is_complete, reach

_log = logging.getLogger(__name__)
_FORMAT = "4"  # increase it when the meaning of the files changes
_BATCH_BYTES = 4 << 20  # of text, tokenised at a time
_LARGE = 1 << 30  # bytes of text, whose tokenising takes minutes
_TRAINING_BYTES = 32 << 20  # of text, to train a tokenizer on
_LONGEST_LINE = 4096  # characters of a line, to train a tokenizer on


@dataclasses.dataclass(frozen=True)
class TokenizedCorpus:
    """A corpus of text as tokens: all splits with their tokenizer.

    Attributes:
        name: name of the corpus.
        fingerprint: hash of the corpus's content.
        tokenizer: trained on the corpus, or named by the config.
        splits: splits by name; for a streamed corpus, all but the training split.
        stream: the documents of a streamed training split.
        labels: names of the documents' labels; empty: no labels.
        parts: names of the parts of a mixture; empty: it is none.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: dict[str, TokenizedText]
    stream: DocumentStream | None
    labels: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class KnownCorpus:
    """The tokenizer and the fingerprint that a run has saved of its corpus.

    Attributes:
        tokenizer: the run's tokenizer, which must be used.
        fingerprint: hash of the corpus whose cached tokens may be used if the corpus has changed or is gone; None: they
            may not be used.
    """

    tokenizer: Any
    fingerprint: str | None = None


def load_tokenized(config: DataConfig, known: KnownCorpus | None = None, *, unsplit: bool = False) -> TokenizedCorpus:
    """Loads the corpus of `config.data` as tokens, from the cache or tokenised now.

    Args:
        config: names the corpus.
        known: what a run knows of its corpus; None: outside of a run.
        unsplit: only one split, WHOLE, with all documents.

    Raises:
        InputError: the corpus or the tokenizer cannot be loaded, or a split has no text.
    """
    cache = reach(os.path.expanduser(config.cache_dir))
    # A run keeps its tokens if its corpus has changed or is gone.
    kept = _load_kept(config, cache, known) if known and not config.streaming and not unsplit else None
    corpus = on_all_hosts(lambda: _load_unless_kept(config, cache, kept))
    shares_work = several() and all(gather_from_hosts(corpus is not None))
    if corpus is None:
        assert kept
        return kept
    # Tokens are keyed by the content of the corpus and by the tokenizer. Hosts that differ would mix theirs.
    names = (UNSPLIT,) if unsplit else SPLITS if corpus.stream is None else SPLITS[1:]
    if shares_work:
        check_same(corpus=corpus.fingerprint)
    tokenizer = known.tokenizer if known else _tokenizer(config, corpus, cache, shares_work)
    if shares_work:
        check_same(tokenizer=tokenizer.fingerprint)
    key = _key(corpus.fingerprint, tokenizer)
    folder = cache / (f"{corpus.name}-{key}-{UNSPLIT}" if unsplit else f"{corpus.name}-{key}")

    def finish(folder: pathlib.Path, counts: dict[str, Any]) -> None:
        info = {"corpus": corpus.fingerprint, "tokenizer": tokenizer.fingerprint, "counts": counts}
        (folder / "info.json").write_text(json.dumps(info) + "\n")
        if load_corpus(config).fingerprint != corpus.fingerprint:
            raise InputError(
                f"corpus {corpus.name} changed while it was tokenised: start again when no process writes to it"
            )

    def make(folder: pathlib.Path) -> None:
        finish(folder, {split: _tokenize(corpus, split, tokenizer, folder) for split in names})

    def make_on_hosts(folder: pathlib.Path, shared: pathlib.Path) -> None:
        counts = {split: _tokenize_on_hosts(corpus, split, tokenizer, folder, shared) for split in names}
        if is_first():
            finish(folder, counts)

    load = lambda folder: _read_splits(folder, names, _dtype(tokenizer))
    if shares_work:
        splits = load_or_make_on_hosts(folder, make, make_on_hosts, load)
    else:
        splits = load_or_make(folder, make, load)
    parts = tuple(configs_of_parts(config))
    return TokenizedCorpus(corpus.name, corpus.fingerprint, tokenizer, splits, corpus.stream, parts=parts)


def _load_unless_kept(config: DataConfig, cache: pathlib.Path, kept: TokenizedCorpus | None) -> Corpus | None:
    """The corpus; None: it is gone or has changed, and the kept tokens are to be used."""
    try:
        corpus = load_corpus(config)
    except InputError as error:
        if kept is None:
            raise
        _log.warning("%s: using its tokens in %s", error, cache)
        return None
    if kept and kept.fingerprint != corpus.fingerprint:
        _log.warning("corpus %s has changed: using the tokens of the earlier one, in %s", corpus.name, cache)
        return None
    return corpus


def load_corpus(config: DataConfig) -> Corpus:
    """The corpus of text that `config.data` names, or the mixture of several.

    Raises:
        InputError: it cannot be loaded, or it has no text.
    """
    if config.mixture:
        return MixedCorpus({name: load_corpus(part) for name, part in configs_of_parts(config).items()})
    kind = CORPORA[config.corpus]
    return kind.load(with_local_files(config), *(config[section] for section in kind.sections))


def _key(fingerprint: str, tokenizer: Tokenizer) -> str:
    # Such a tokenizer used to write another character instead of a space.
    form = f"{_FORMAT} spaces" if getattr(tokenizer, "spells_spaces", False) else _FORMAT
    return hashlib.sha256(f"{form} {fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()[:16]


def _load_kept(config: DataConfig, cache: pathlib.Path, known: KnownCorpus) -> TokenizedCorpus | None:
    """The tokens of a run's corpus, if they are in the cache and complete; the corpus itself may be gone."""
    if known.fingerprint is None:
        return None
    # The corpus itself may be gone: its tokens are named by fingerprint and tokenizer.
    key = _key(known.fingerprint, known.tokenizer)
    for folder in cache.iterdir() if cache.exists() else ():
        if not folder.name.endswith(f"-{key}") or not is_complete(folder, COMPLETE):
            continue
        with contextlib.suppress(*DAMAGED):
            splits = _read_splits(fetch(folder), SPLITS, _dtype(known.tokenizer))
            name = folder.name.removesuffix(f"-{key}")
            parts = tuple(configs_of_parts(config))
            return TokenizedCorpus(name, known.fingerprint, known.tokenizer, splits, None, parts=parts)
    return None


def _read_splits(
    folder: pathlib.Path, names: Sequence[str], dtype: type[np.unsignedinteger]
) -> dict[str, TokenizedText]:
    """Memory-mapped splits; raises ValueError if a file has lost or gained tokens."""
    counts, splits = json.loads((folder / "info.json").read_text())["counts"], {}
    for split in names:
        tokens, starts = np.memmap(folder / f"{split}.tokens", dtype, "r"), np.load(folder / f"{split}.starts.npy")
        if len(tokens) != starts[-1]:
            raise ValueError(f"{split}.tokens has {len(tokens)} tokens, expected {starts[-1]}")
        splits[split] = TokenizedText(tokens, starts, **counts[split])
    return splits


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def existing_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer of a text that needs no training; None: SentencePiece is to be trained on the corpus.

    Raises:
        InputError: there is no such file, or it holds no tokenizer of that kind.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer == "hf" and not config.tokenizer_path:
        raise InputError(
            "data.tokenizer=hf needs an existing tokenizer: name its folder with --config.data.tokenizer_path, or a "
            "model with --config.train.init_from"
        )
    if not config.tokenizer_path:
        return None
    path = fetch(os.path.expanduser(config.tokenizer_path))
    if config.tokenizer == "hf":
        return read_tokenizer(path)
    try:
        return SentencePieceTokenizer(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read data.tokenizer_path={path}: {error.strerror}: give a .model file") from None


def _tokenizer(config: DataConfig, corpus: Corpus, cache: pathlib.Path, shares_work: bool) -> Tokenizer:
    """The tokenizer of a new run; one that is trained comes from the first host, if all share the cache."""
    if (tokenizer := existing_tokenizer(config)) is not None:
        return tokenizer
    # SentencePiece is trained once per corpus and vocabulary size.
    key = hashlib.sha256(f"{_FORMAT} {corpus.fingerprint} {config.vocab_size}".encode()).hexdigest()[:16]
    folder = cache / f"tokenizer-{corpus.name}-{key}"

    def make(partial: pathlib.Path) -> None:
        save_tokenizer(train_sentencepiece(_training_lines(corpus), config.vocab_size), partial)

    if shares_work:
        make_on_first = lambda partial, shared: make(partial) if is_first() else None
        return load_or_make_on_hosts(folder, make, make_on_first, load_tokenizer)
    return load_or_make(folder, make, load_tokenizer)


def _training_lines(corpus: Corpus) -> Iterator[str]:
    """Lines spread evenly over the training split, or the first lines of a stream."""
    # Every n-th line, so that about as many bytes are read as the trainer gets, from all of the corpus.
    every = -(-(corpus.size("train") or 1) // _TRAINING_BYTES)
    lines = itertools.chain.from_iterable(piece.text.splitlines(keepends=True) for piece in corpus.pieces("train"))
    taken = 0
    for line in itertools.islice(lines, 0, None, every):
        taken += len(line)
        if taken > 2 * _TRAINING_BYTES:
            return
        # SentencePiece silently drops longer lines.
        yield from (line[i : i + _LONGEST_LINE] for i in range(0, len(line), _LONGEST_LINE))


def _tokenize(corpus: Corpus, split: str, tokenizer: Tokenizer, folder: pathlib.Path) -> dict[str, Any]:
    """Streams a split through the tokenizer into two files; returns its counts as in TokenizedText."""
    dtype, total = _dtype(tokenizer), _announce(corpus, split, tokenizer)
    with Progress(f"{corpus.name} {split}", total) as progress, open(folder / f"{split}.tokens", "wb") as file:
        write = lambda ids: file.write(ids.astype(dtype).tobytes())
        starts, counts = encode(_batches(corpus.pieces(split), progress.show), tokenizer, write)
    _finish(corpus, split, folder, starts, counts)
    return counts


def _tokenize_on_hosts(
    corpus: Corpus, split: str, tokenizer: Tokenizer, folder: pathlib.Path, shared: pathlib.Path
) -> dict[str, Any]:
    """As `_tokenize`, on all hosts together, which exchange files through `shared`."""
    total = on_all_hosts(lambda: _announce(corpus, split, tokenizer) if is_first() else None)
    dtype = _dtype(tokenizer)
    with Progress(f"{corpus.name} {split}", total, shown=is_first()) as progress:
        parts = Parts(folder, shared, split, dtype)
        encoded = encode_shared(corpus.pieces(split), _batches, tokenizer, parts, progress.show)
    on_all_hosts(lambda: _finish(corpus, split, folder, *encoded) if encoded else None)
    return gather_from_hosts(encoded and encoded[1])[0]


def _announce(corpus: Corpus, split: str, tokenizer: Tokenizer) -> int | None:
    """The bytes of a split, if they are known; of a large one it says how long tokenising will take."""
    size = corpus.size(split)
    if size is None or size < _LARGE:
        return size
    # A sample tells the speed; each host does its part.
    sample = [piece.text for piece in next(_batches(corpus.pieces(split)))]
    since = time.perf_counter()
    tokenizer.encode(sample)
    seconds = (time.perf_counter() - since) * size / sum(len(text.encode()) for text in sample)
    count = jax.process_count() if several() else 1
    on_hosts = f" on {count} hosts" if count > 1 else ""
    about = f"{in_bytes(size)}, about {in_time(seconds / count)}{on_hosts}"
    _log.info("tokenise %s %s: %s", corpus.name, split, about)
    return size


def _finish(corpus: Corpus, split: str, folder: pathlib.Path, starts: np.ndarray, counts: dict[str, Any]) -> None:
    """Writes the starts; every part of a mixture must have documents."""
    named = list(corpus.parts) if isinstance(corpus, MixedCorpus) else [corpus.name]
    documents = counts.get("part_documents", [len(starts) - 1])
    empty = [name for name, count in itertools.zip_longest(named, documents) if not count]
    if empty:
        raise InputError(f"corpus {empty[0]} is too small: its {split} split has no text; give more or longer files")
    np.save(folder / f"{split}.starts.npy", starts)


def _batches(pieces: Iterable[Piece], show: Callable[[int], object] = lambda done: None) -> Iterator[list[Piece]]:
    """Batches of about equal size in bytes, for the parallel tokenizer; `show` receives the bytes of those before."""
    batch, size, done = [], 0, 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text.encode())
        if size >= _BATCH_BYTES:
            yield batch
            done += size
            show(done)
            batch, size = [], 0
    if batch:
        yield batch
