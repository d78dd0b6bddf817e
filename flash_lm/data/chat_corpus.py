"""Chats as examples, one a row: all of a chat as the model's template writes it, of which the answers are predicted.

They are read from JSON lines, {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]},
and tokenised when a run starts.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flash_lm.config.data import DataConfig
from flash_lm.data.chat_encoder import ChatEncoder, ChatTokens
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import NO_TARGET, Example, ExampleCorpus
from flash_lm.data.files import DataFile, find_files
from flash_lm.data.token_cache import KnownCorpus, existing_tokenizer
from flash_lm.errors import InputError
from flash_lm.runs.json_file import parse_json

_log = logging.getLogger(__name__)
_ENDINGS = (".jsonl",)  # of the files of a folder
_HELD_OUT, _MOST_HELD_OUT = 0.05, 5000  # share, and largest number, of the chats in a held-out split


class Chats:
    """A split of chats; the end of one that is longer than a row is cut."""

    longest = 0  # any row will do

    def __init__(self, chats: Sequence[ChatTokens]):
        """Takes the tokens of each chat."""
        self._chats = chats

    def __len__(self) -> int:
        """The number of chats."""
        return len(self._chats)

    def example(self, number: int, length: int) -> Example:
        """The first tokens of a chat, for a row of `length`; the tokens of its answers are targets."""
        ids, is_answer, _ = self._chats[number]
        targets = np.where(is_answer[1:], ids[1:], NO_TARGET)
        return Example(ids[:-1][:length], targets=targets[:length])


class _Chat(NamedTuple):
    """A chat of a file.

    Attributes:
        tokens: its tokens.
        digest: hash of its messages.
    """

    tokens: ChatTokens
    digest: str


def chats(config: DataConfig, known: KnownCorpus | None) -> ExampleCorpus:
    """The chats of `data.path`, with the tokenizer and the chat template of train.init_from.

    Args:
        config: data.path is a .jsonl file, a glob, or a folder of such files at any depth; data.length is the length of
            a row.
        known: the tokenizer of the model that is trained or scored; None: that of data.tokenizer_path.

    Raises:
        InputError: no such file, a line is no chat that the template accepts, the tokenizer has no template, or there
            are too few chats.
    """
    files = find_files(config.path, _ENDINGS)
    if not files:
        raise InputError(f"no file matches data.path={config.path}: give a .jsonl file, a folder of them, or a glob")
    tokenizer: Any = known.tokenizer if known else existing_tokenizer(config)  # of kind hf, so there is one
    encoder = ChatEncoder(tokenizer, "the model")
    read: dict[str, list[_Chat]] = {split: [] for split in SPLITS}
    for file in files:
        read[file.split] += _read(file, encoder)
    _tell_only_last([chat.tokens for content in read.values() for chat in content])
    splits = _hold_out(read, config)

    # The name and the order of chats do not depend on the row's length, but those without a target there are left out.
    digests = (f"{split} {chat.digest}" for split, content in splits.items() for chat in content)
    fingerprint = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    examples = {split: _fitting(split, content, config) for split, content in splits.items()}
    return ExampleCorpus("chat", fingerprint, tokenizer, examples)


def _read(file: DataFile, encoder: ChatEncoder) -> Iterator[_Chat]:
    """The chats of a file; raises InputError with the number of a line that is none."""
    try:
        with open(file.path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield _encode(line, encoder)
                except InputError as error:
                    raise InputError(f"{file.path}, line {number}: {error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{file.path} is not UTF-8: convert it, for example with iconv -t utf-8") from None
    except OSError as error:
        raise InputError(f"cannot read {file.path}: {error.strerror}: check --config.data.path") from None


def _encode(line: str, encoder: ChatEncoder) -> _Chat:
    try:
        content = parse_json(line)
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise InputError(
            'a line must be {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
        )
    messages = content["messages"]
    tokens = encoder.with_answers(messages)
    return _Chat(tokens, hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest())


def _tell_only_last(read: Sequence[ChatTokens]) -> None:
    """Says of how many chats only the last answer is learnt."""
    if count := sum(tokens.only_last for tokens in read):
        _log.info(
            "%d of %d chats teach their last answer alone, for the template writes earlier answers in another way once "
            "messages follow",
            count,
            len(read),
        )


def _hold_out(splits: dict[str, list[_Chat]], config: DataConfig) -> dict[str, list[_Chat]]:
    """The splits, with missing ones held out of the training split by hash, so that equal chats are in one split."""
    missing = [split for split in SPLITS[1:] if not splits[split]]
    ordered = sorted({chat.digest for chat in splits["train"]})
    each = min(max(1, round(_HELD_OUT * len(ordered))), _MOST_HELD_OUT)
    if len(ordered) <= len(missing) * each:
        also = f", too few to hold out {' and '.join(missing)}" if missing and ordered else ""
        raise InputError(
            f"data.path={config.path} has {len(ordered)} different chats for training{also}: give more chats, or files "
            "named train.jsonl, validation.jsonl and test.jsonl"
        )
    split_of = {digest: missing[i // each] for i, digest in enumerate(ordered[: len(missing) * each])}
    held = {split: [x for x in splits["train"] if split_of.get(x.digest) == split] for split in missing}
    return splits | held | {"train": [x for x in splits["train"] if x.digest not in split_of]}


def _fitting(split: str, content: Sequence[_Chat], config: DataConfig) -> Chats:
    """The chats of a split with a target in a row; says how many are cut, and how many have none."""
    kept = [chat.tokens for chat in content if chat.tokens.is_answer[1 : config.length + 1].any()]
    long = sum(len(chat.tokens.ids) - 1 > config.length for chat in content)
    if not kept:
        raise InputError(
            f"no chat of the {split} split has an answer within data.length={config.length} tokens: raise "
            "--config.data.length (and model.max_length)"
        )
    if long:
        _log.info(
            "%s: %d of %d chats are longer than data.length=%d tokens: %d are cut, %d have no answer within it and are "
            "left out",
            split,
            long,
            len(content),
            config.length,
            long - (len(content) - len(kept)),
            len(content) - len(kept),
        )
    return Chats(kept)
