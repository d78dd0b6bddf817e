"""A needle in a haystack: a number that stands somewhere in a long text is asked for at its end.

    … text … The code of kudapo is 4821. … text … The code of renomi is 0375. … text … The code of kudapo is 4821

Only the last digits are predicted. A row has several needles with different names, so the name matters. The text comes
from the same split of the corpus, from a random offset; after its end it begins again. A row has `data.needle.length`
tokens, or as many as fit: so a model is asked at lengths beyond those of its training, in longer rows or with a state
that is carried.

Tokens are those of the model that is scored or trained further, or of data.tokenizer_path; otherwise bytes. The parts
of a row are tokenised one by one, and each digit of a code is a token, also where the tokenizer would join several: so
codes are equally hard to guess with all tokenizers.

The n-th row of a split is a pure function of the text, split and n, made when it is read. The needle that is asked for
is in tenth n mod 10 of the text.
"""

import functools
import hashlib
from collections.abc import Callable

import numpy as np

from flash_lm.config.data import DataConfig
from flash_lm.config.keys import at_least, key, section
from flash_lm.data.corpora import CorpusKind
from flash_lm.data.corpus import SPLITS
from flash_lm.data.examples import Example, ExampleCorpus
from flash_lm.data.text_files import FileCorpus, stdlib, text_files
from flash_lm.data.token_cache import KnownCorpus, existing_tokenizer
from flash_lm.data.tokenizer import ByteTokenizer, Tokenizer
from flash_lm.errors import InputError

_COUNTS = {"train": 1 << 20, "validation": 200, "test": 1000}
_DEPTHS = 10
_MOST_TEXT = 1 << 23  # bytes of a split that rows are cut from
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_DEFAULT = ByteTokenizer()
_DRAWS = 0x9EED  # keeps its rows separate from other random numbers


def _between(x: int, low: int, high: int) -> str | None:
    return None if low <= x <= high else f"{low} to {high}"


@section("data.needle")
class NeedleOptions:
    """Options of data.corpus=needle."""

    needles: int = key(4, "names with a code each, one of which is asked for", lambda x: _between(x, 1, 64))
    digits: int = key(4, "of a code, which are predicted", lambda x: _between(x, 1, 9))
    length: int = key(
        None, "tokens per example, to be read in sequences that carry their state; open: one sequence", at_least(1)
    )


class Needles:
    """A split of needles in haystacks."""

    def __init__(self, split: str, read: Callable[[], np.ndarray], tokenizer: Tokenizer, options: NeedleOptions):
        """Cuts each row from a split's text on access.

        Args:
            split: its name.
            read: returns the tokens of its text, (n,); called at the first row.
            tokenizer: writes the needles.
            options: the options of the corpus.

        Raises:
            InputError: the tokenizer has no token for a digit, or lacks other characters of a needle.
        """
        self._split, self._read, self._tokenizer, self._options = split, read, tokenizer, options
        self._digits = [_token_of_digit(tokenizer, digit) for digit in range(10)]
        facts = self._facts(self._draw(0))
        _check_spelling(tokenizer, facts[0][0])
        # In bytes, all rows need this size; no tokenizer makes more tokens. Begin-of-text is read, and the last digit
        # is not.
        self.smallest = sum(len(f"{words}{code}.\n") for words, code in facts) + len("".join(facts[0]))
        self.longest, self.size = options.length or self.smallest, options.length

    def __len__(self) -> int:
        """The number of rows."""
        return _COUNTS[self._split]

    def parts(self) -> dict[str, range]:
        """The rows of each depth, by name."""
        return {
            f"depth {100 * i // _DEPTHS} to {100 * (i + 1) // _DEPTHS} %": range(i, len(self), _DEPTHS)
            for i in range(_DEPTHS)
        }

    def example(self, number: int, length: int) -> Example:
        """Begin-of-text, text with needles, and the question with its answer."""
        draw = self._draw(number)
        *needles, question = self._parts(draw)
        room = (self._options.length or length) - sum(map(len, needles)) - len(question)
        text = np.take(self._text, draw.integers(len(self._text)) + np.arange(room), mode="wrap")
        # The first needle is the one asked for.
        offsets = (draw.random(len(needles)) * (len(text) + 1)).astype(np.int64)
        offsets[0] = (number % _DEPTHS + draw.random()) / _DEPTHS * (len(text) + 1)
        pieces, before = [np.array([self._tokenizer.begin])], 0
        for i in np.argsort(offsets, kind="stable"):
            pieces += [text[before : offsets[i]], needles[i]]
            before = offsets[i]
        ids = np.concatenate([*pieces, text[before:], question]).astype(np.int32)
        return Example(ids, prompt_length=len(ids) - self._options.digits)

    @functools.cached_property
    def _text(self) -> np.ndarray:
        return self._read()

    def _draw(self, number: int) -> np.random.Generator:
        key = (_DRAWS, SPLITS.index(self._split), number)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))

    def _facts(self, draw: np.random.Generator) -> list[tuple[str, str]]:
        """What each needle says before its code, and the code."""
        count, digits = self._options.needles, self._options.digits
        # The first syllables differ, so all names do.
        first = draw.choice(len(_SYLLABLES), count, replace=False)
        others = draw.integers(len(_SYLLABLES), size=(count, 2))
        codes = draw.integers(10**digits, size=count)
        return [
            (f"\nThe code of {''.join(_SYLLABLES[i] for i in (a, *rest))} is ", f"{code:0{digits}}")
            for a, rest, code in zip(first, others, codes, strict=True)
        ]

    def _parts(self, draw: np.random.Generator) -> list[np.ndarray]:
        """The tokens of each needle, and of the question about the first of them with its answer."""
        facts = self._facts(draw)
        *words, end = self._tokenizer.encode([*(words for words, _ in facts), ".\n"])
        codes = [np.array([self._digits[int(digit)] for digit in code]) for _, code in facts]
        said = [np.concatenate(fact) for fact in zip(words, codes, strict=True)]
        return [*(np.concatenate([fact, end]) for fact in said), said[0]]


def _token_of_digit(tokenizer: Tokenizer, digit: int) -> int:
    """The token of a digit, with no space; raises InputError if there is none."""
    # Some tokenizers put a space before a text, and so a digit needs a letter there.
    for ids in tokenizer.encode([f"{digit}", f"x{digit}"]):
        if len(ids) and tokenizer.token_bytes(last := int(ids[-1])) == str(digit).encode():
            return last
    raise InputError(
        f"data.corpus=needle asks for digits, and the tokenizer ({tokenizer.kind}) has no token that is just {digit}: "
        "use a model of text, or data.tokenizer=bytes"
    )


def _check_spelling(tokenizer: Tokenizer, text: str) -> None:
    """Raises InputError if a tokenizer loses letters, so that names could be equal."""
    if tokenizer.decode(tokenizer.encode([text])[0]).lower().split() != text.lower().split():
        raise InputError(
            f"data.corpus=needle is in English, and the tokenizer ({tokenizer.kind}) cannot write {text.strip()!r}: "
            "use a model of English text, or data.tokenizer=bytes"
        )


def _read(source: FileCorpus, split: str, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of the first megabytes of a split."""
    texts, size = [], 0
    for piece in source.pieces(split):
        texts.append(piece.text)
        size += len(piece.text.encode())
        if size >= _MOST_TEXT:
            break
    if not texts:
        raise InputError(f"the {split} split has no text for needles: give more or longer files in --config.data.path")
    return np.concatenate(tokenizer.encode(texts))


def needle(config: DataConfig, known: KnownCorpus | None, options: NeedleOptions) -> ExampleCorpus:
    """All splits of the task.

    Args:
        config: data.path is the text; open: the standard library's.
        known: the tokenizer of the model that is scored or trained; None, or none in it:
            that of data.tokenizer_path, or bytes.
        options: the options of the corpus.

    Raises:
        InputError: no such text or tokenizer, the tokenizer cannot write needles, or rows are too short for them.
    """
    source = text_files(config) if config.path else stdlib(config)
    tokenizer = (known and known.tokenizer) or existing_tokenizer(config) or _DEFAULT
    splits = {
        split: Needles(split, functools.partial(_read, source, split, tokenizer), tokenizer, options)
        for split in SPLITS
    }
    if options.length and options.length < (smallest := splits["train"].smallest):
        raise InputError(
            f"data.needle.length={options.length} is too short: needles and question have {smallest} tokens"
        )
    of_tokens = "" if tokenizer.kind == "bytes" else f" {tokenizer.fingerprint}"
    about = f"needle {source.fingerprint} {options} {_COUNTS}{of_tokens}"
    return ExampleCorpus("needle", hashlib.sha256(about.encode()).hexdigest(), tokenizer, splits)


NEEDLE = CorpusKind(
    needle,
    examples=True,
    tokenizer=_DEFAULT,
    uses_parent_tokenizer=True,
    answers=None,
    sections=(NeedleOptions,),
)
