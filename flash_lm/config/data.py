"""The schema of `config.data`: the keys that every corpus shares."""

import dataclasses
import math
from typing import Any

from flash_lm.config.addresses import address_problem, is_remote
from flash_lm.config.keys import Group, at_least, key, one_of
from flash_lm.config.registry import CORPORA


def _mixture_pairs(pairs: tuple) -> str | None:
    # JSON and overrides give lists or tuples, and integers for whole shares.
    def is_pair(pair: Any) -> bool:
        good = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) and pair[0] != ""
        return good and type(pair[1]) in (int, float) and 0 < pair[1] < math.inf

    good = not pairs or (len(pairs) > 1 and all(map(is_pair, pairs)) and len({x for x, _ in pairs}) == len(pairs))
    return None if good else "pairs of different places and positive shares, such as (('books/', 0.7), ('wiki/', 0.3))"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Group, name="data"):
    """The keys of `config.data`: corpus, tokenizer, packing and batch."""

    corpus: str = key("stdlib", "name of a corpus", CORPORA.rule)
    path: str = key(
        None,
        "text: a file, a glob or a folder of .txt files; hf: a folder, file or glob of parquet, arrow or json; "
        "chat: of .jsonl; couplets and images: a folder; it may be at gs://",
    )
    mixture: tuple = key(
        (),
        "text and hf: several corpora with the share of sequences from each, instead of data.path, such as "
        "(('books/', 0.7), ('wiki/', 0.3)); shares may be any positive numbers",
        _mixture_pairs,
    )
    name: str = key(None, "hf and images: a data set on the hub, instead of a path")
    config: str = key(None, "hf: one of the configs of that data set; open: its only one")
    split: str = key(
        "train",
        "hf: the split to train on; validation and test are the data set's, or else held out of this one",
    )
    text_column: str = key("text", "hf: the column that has the text")
    label_column: str = key(None, "hf: the column that has a label for each text, for task=classify; open: none")
    pair_column: str = key(
        None,
        "hf: the column of a second text, which is predicted from the first (data.pack=examples); with "
        "data.label_column, labels are of pairs; open: none",
    )
    label_share: float = key(
        1.0,
        "with data.label_column: share of the training texts that are used, drawn once; a smaller one is part of a "
        "larger",
        lambda x: None if 0 < x <= 1 else "more than 0 and at most 1",
    )
    streaming: bool = key(False, "hf: read during training, without storing the training split on disk")
    shuffle_buffer: int = key(
        None,
        "of a stream: millions of characters whose documents are shuffled together; 0: no shuffling; open: 64",
        at_least(0),
    )
    streams: int = key(
        None,
        "of a streamed corpus: parts that are read side by side, each for its rows of a batch, for as long as the run "
        "lasts; open: one for each host that has its own rows when the run begins",
        at_least(1),
    )
    tokenizer: str = key(
        "sentencepiece",
        "bytes, sentencepiece, or hf (Hugging Face's `tokenizers`: the one of train.init_from or tokenizer_path)",
        one_of("bytes", "sentencepiece", "hf"),
    )
    tokenizer_path: str = key(
        None, "a SentencePiece model, or a tokenizer.json or its folder; open: trained on the corpus"
    )
    # SentencePiece needs its 256 bytes and the special tokens.
    vocab_size: int = key(8192, "size of the SentencePiece vocabulary to train", at_least(300))
    length: int = key(None, "L, tokens per row; open: model.max_length", at_least(1))
    tokens_per_batch: int = key(2048, "B x L; open: 2048, or as many more as the devices need", at_least(1), open=True)
    pack: str = key(
        "stream",
        "stream (documents joined and cut), documents (isolated segments), examples (one per row)",
        one_of("stream", "documents", "examples"),
    )
    cache_dir: str = key("~/.cache/flash_lm", "tokenised corpora; it may be at gs://")

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents that do not see each other."""
        return self.pack == "documents"

    @property
    def pairs(self) -> bool:
        """Whether a row of the data set is an example: a first text, and a second one that is predicted."""
        return CORPORA[self.corpus].paired(self)

    @property
    def batch_size(self) -> int:
        """Rows per batch, over all devices."""
        return self.tokens_per_batch // self.length

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        sentences = []
        for name in ("path", "cache_dir"):
            if problem := address_problem(getattr(self, name) or ""):
                sentences.append(f"data.{name}={problem}")
        if self.streaming and self.path and is_remote(self.path):
            sentences.append(
                f"data.path={self.path} is copied to this machine, and data.streaming keeps nothing there: set "
                "data.streaming=false, or stream a data set of the hub"
            )
        if self.tokens_per_batch % self.length:
            sentences.append(
                f"data.tokens_per_batch={self.tokens_per_batch} must be a multiple of data.length={self.length}"
            )
        if self.streaming and (self.streams or 1) > self.batch_size:
            sentences.append(f"data.streams={self.streams} must be at most the sequences of a batch, {self.batch_size}")
        if self.path and not CORPORA[self.corpus].reads_path and not CORPORA[self.corpus].examples:
            sentences.append(f"data.corpus={self.corpus} does not read data.path: set data.corpus=text, or hf")
        # Examples and pairs fill rows by themselves, and text is packed.
        kind = CORPORA[self.corpus]
        if self.pairs and self.mixture:
            sentences.append("data.mixture mixes texts: leave data.pair_column open, or name one place of pairs")
        if (examples := kind.examples or self.pairs) != (self.pack == "examples"):
            needed = "examples" if examples else "stream or documents"
            what = f"data.pair_column={self.pair_column}" if self.pairs else f"data.corpus={self.corpus}"
            sentences.append(f"{what} needs data.pack={needed}, not {self.pack}")
        return sentences + (self._mixture_problems() if self.mixture else kind.problems(self))

    def _mixture_problems(self) -> list[str]:
        if not CORPORA[self.corpus].mixes:
            kinds = " or ".join(name for name, row in CORPORA.items() if row.mixes)
            return [f"data.mixture needs data.corpus={kinds}, not {self.corpus}"]
        # A mixture has a list of paths with shares; keys of a single text do not apply.
        sentences = []
        if self.path or self.name:
            sentences.append("data.mixture names the places of the text: leave data.path and data.name open")
        if self.streaming:
            sentences.append("data.mixture needs data.streaming=False: its texts are read at the start")
        if self.label_column:
            sentences.append("data.mixture has no labels: leave data.label_column open")
        return sentences
