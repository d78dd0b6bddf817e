"""A tokenizer read from a file of Hugging Face's `tokenizers`."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from flash_lm.errors import InputError
from flash_lm.runs.json_file import load_json, parse_json

# Usual names of begin- and end-of-text.
_USUAL = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "[CLS]"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]"),
}
_LISTED = 3  # tokens that an error names
SPACE = "▁"  # U+2581, SentencePiece's sign for a space, which others have adopted


class Marked(NamedTuple):
    """The tokens of a text with special tokens.

    Attributes:
        ids: (n,) int32.
        starts: where each begins in the text, in characters, (n,).
    """

    ids: np.ndarray
    starts: np.ndarray


class HuggingFaceTokenizer:
    """A tokenizer with pieces of bytes ("ByteLevel", as GPT-2's) or of text with a sign for a space (as Llama's).

    Attributes:
        chat_template: the Jinja source that a chat of its model is written with; None: there is none.
        has_begin: whether `begin` is the template's bos_token; otherwise the template has none.
    """

    kind = "hf"

    def __init__(self, model: bytes):
        """Loads what `model_bytes` returned.

        Raises:
            InputError: it is not such a tokenizer.
        """
        # The library's tokenizer, without truncation and padding, which a file may ask for.
        self._model, about = model, parse_json(model)
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(about["tokenizer"]))
        except Exception as error:  # the library raises nothing more specific
            raise InputError(f"not a tokenizer of Hugging Face's `tokenizers`: {str(error).splitlines()[0]}") from None
        self._byte_level = _is_byte_level(about["tokenizer"])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token is text
        # Special tokens and the size of the vocabulary, which may have gaps.
        self.begin, self.end, self.chat_template = about["begin"], about["end"], about.get("chat_template")
        self.has_begin = about.get("has_begin", True)
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if not all(type(i) is int and 0 <= i < self.vocab_size for i in (self.begin, self.end)):
            raise InputError(f"begin-of-text {self.begin!r} or end-of-text {self.end!r} is no token")
        if not isinstance(self.chat_template, str | None):
            raise InputError(f"a chat template must be a text, not {type(self.chat_template).__name__}")
        self.mask = self.vocab_size  # these tokenizers have none: use the id after the last
        self.fingerprint = hashlib.sha256(model).hexdigest()

    @classmethod
    def of(
        cls,
        tokenizer: dict[str, Any],
        begin: int | str,
        end: int | str,
        chat_template: str | None = None,
        *,
        has_begin: bool = True,
    ) -> "HuggingFaceTokenizer":
        """Builds a tokenizer from the content of a tokenizer.json.

        Args:
            tokenizer: the content of tokenizer.json.
            begin: what texts begin with, as an id or a token.
            end: end-of-text, as an id or a token.
            chat_template: Jinja source of the model's chats; None: there is none.
            has_begin: whether `begin` is the template's bos_token.

        Raises:
            InputError: not a tokenizer, or these tokens are missing.
        """
        about = {"begin": 0, "end": 0, "tokenizer": tokenizer}
        if chat_template is not None:  # without one, files and fingerprints are those of before there were any
            about["chat_template"] = chat_template
            if not has_begin:
                about["has_begin"] = False
        made = cls(json.dumps(about).encode())
        ids = [made._tokenizer.token_to_id(x) if isinstance(x, str) else x for x in (begin, end)]
        if any(i is None or not 0 <= i < made.vocab_size for i in ids):
            raise InputError(f"the tokenizer has no begin-of-text {begin!r} or no end-of-text {end!r}")
        return cls(json.dumps(about | dict(zip(("begin", "end"), ids, strict=True))).encode())

    def within(self, rows: int) -> tuple["HuggingFaceTokenizer", list[str]]:
        """This tokenizer without the special tokens for which a model has no row of embeddings, and their names.

        Others have added such tokens, for padding say, and never gave them to the model.

        Args:
            rows: of the model's embeddings.

        Raises:
            InputError: tokens beyond them are in use; says where they are.
        """
        about = json.loads(self._model)
        content, ends = about["tokenizer"], {self.begin, self.end}
        added, vocab = content.get("added_tokens") or [], content["model"]["vocab"]
        left_out = {x["content"] for x in added if x["id"] >= rows and x["special"] and x["id"] not in ends}
        ids = vocab.items() if isinstance(vocab, dict) else ((piece[0], i) for i, piece in enumerate(vocab))
        sections = {"added_tokens": [(x["content"], x["id"]) for x in added], "model.vocab": [*ids]}
        # An id beyond the rows has no embedding: its token must be an added special one, which can be left out.
        used = {name: (i, section) for section, all_ in sections.items() for name, i in all_ if i >= rows}
        if kept := [
            f"{name!r} (id {i}{', an end of texts' if i in ends else ''}) of {section}"
            for name, (i, section) in used.items()
            if name not in left_out
        ]:
            more = f" and {len(kept) - _LISTED} more" if len(kept) > _LISTED else ""
            raise InputError(
                f"{rows} rows of embeddings for {self.vocab_size} tokens: delete {', '.join(kept[:_LISTED])}{more} "
                "from tokenizer.json, or give config.json the vocab_size of the weights if they have more rows"
            )
        # Take the tokens out of all lists, and padding, which may refer to one of them.
        content["added_tokens"] = [x for x in added if x["content"] not in left_out]
        pieces = [x for x in vocab if (x if isinstance(vocab, dict) else x[0]) not in left_out]
        content["model"]["vocab"] = {x: vocab[x] for x in pieces} if isinstance(vocab, dict) else pieces
        content["padding"] = None
        return HuggingFaceTokenizer(json.dumps(about).encode()), sorted(left_out)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without special tokens."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_marked(self, texts: Sequence[str]) -> list["Marked"]:
        """Tokens of texts in which the spelling of a special token means that token, as a chat template writes it."""
        encodings = self._marking_tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            Marked(np.asarray(x.ids, np.int32), np.array([start for start, _ in x.offsets], int)) for x in encodings
        ]

    def special_tokens(self, ids: Iterable[int]) -> list[str]:
        """The names of the special tokens among ids."""
        return [self._added[i].content for i in map(int, ids) if i in self._added and self._added[i].special]

    def token(self, i: int) -> str:
        """How an id is spelled in a text for `encode_marked`; of use for special tokens."""
        return self._tokenizer.id_to_token(i) or ""

    @functools.cached_property
    def _marking_tokenizer(self) -> Tokenizer:
        """A second tokenizer, since the option is of all its calls, and threads of a service use both."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = False
        return tokenizer

    def decode(self, ids: Iterable[int]) -> str:
        """The text; special tokens are left out."""
        return self._tokenizer.decode([int(i) for i in ids if i < self.vocab_size], skip_special_tokens=True)

    def token_bytes(self, i: int) -> bytes:
        """The bytes of text that an id stands for; empty for special tokens."""
        # Special tokens have no text; other added tokens are literal text.
        piece = self._tokenizer.id_to_token(i) if i < self.vocab_size else None
        if piece is None or (i in self._added and self._added[i].special):
            return b""
        if self._byte_level:
            spelled = _byte_of_character()
            return piece.encode() if i in self._added else bytes(spelled[character] for character in piece)
        # Byte fallback spells single bytes as <0xE4>; all other pieces are text with ▁ for spaces.
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[1:-1], 16)])
        return piece.replace(SPACE, " ").encode()

    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text that each id stands for, (V,) int32; 0 for special tokens."""
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int32)

    def model_bytes(self) -> bytes:
        """JSON: the tokenizer.json, the ids of begin- and end-of-text, and what is known of a chat template."""
        return self._model

    def tokenizer_json(self) -> str:
        """The tokenizer.json, unchanged."""
        return json.dumps(json.loads(self._model)["tokenizer"], ensure_ascii=False)


def read_tokenizer(path: pathlib.Path) -> HuggingFaceTokenizer:
    """The tokenizer of a downloaded model.

    Args:
        path: a tokenizer.json or its folder; tokenizer_config.json or config.json beside it names the special tokens.
            Without these files they are the special tokens of a usual name, such as </s>. The chat template is in
            chat_template.jinja or tokenizer_config.json beside it.

    Raises:
        InputError: it cannot be read, or it has no end-of-text token.
    """
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    names = (folder / "tokenizer_config.json", folder / "config.json")
    words, ids = (read_json(name) if name.exists() else {} for name in names)
    # Prefer what the model's files say; without any, look for special tokens of usual names.
    begin, end = (_special(words, ids, name) for name in _USUAL)
    content = read_json(file)
    if end is None and "eos_token" not in words and "eos_token_id" not in ids:
        begin, end = (_usual(content, names) for names in _USUAL.values())
    if end is None:
        raise InputError(
            f"{folder} has no end-of-text token: name it as eos_token in a tokenizer_config.json next to tokenizer.json"
        )
    # Without begin-of-text, texts begin with end-of-text; a template has none even where only config.json names one.
    has_begin = begin is not None and words.get("bos_token", begin) is not None
    template = _chat_template(folder, words)
    return HuggingFaceTokenizer.of(content, end if begin is None else begin, end, template, has_begin=has_begin)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The content of a JSON file of a downloaded model.

    Raises:
        InputError: it cannot be read, or is not a JSON object.
    """
    # A file that is missing, and one that is damaged, need different advice.
    try:
        content = load_json(path)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or 'no file'}: name the folder of a downloaded model"
        ) from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object: download the model again")
    return content


def _chat_template(folder: pathlib.Path, words: dict[str, Any]) -> str | None:
    """The chat template of a folder, from its own file or from tokenizer_config.json; of several the default one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError(f"cannot read {file} as UTF-8 text: download the model again") from None
    template = words.get("chat_template")
    if isinstance(template, list):
        template = next(
            (x.get("template") for x in template if isinstance(x, dict) and x.get("name") == "default"), None
        )
    return template


def _usual(tokenizer: dict[str, Any], names: Sequence[str]) -> str | None:
    """The first of these names that is a special token."""
    added = tokenizer.get("added_tokens")
    special = (
        [x.get("content") for x in added if isinstance(x, dict) and x.get("special")] if isinstance(added, list) else []
    )
    return next((name for name in names if name in special), None)


def _special(words: Any, ids: Any, name: str) -> str | int | None:
    """Begin- or end-of-text, as a token or an id; the first of several."""
    # The files write it as text, as an id, as a list of ids, or as an object with its text.
    token = words.get(f"{name}_token") or ids.get(f"{name}_token_id")
    if isinstance(token, list) and token:
        token = token[0]
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str | int) and not isinstance(token, bool) else None


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether pieces are written in characters that stand for bytes.

    Raises:
        InputError: pieces are written in some other way, from which the bytes of a token cannot be known.
    """
    # The decoder says how a piece stands for bytes.
    decoder = tokenizer.get("decoder") or {}
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise InputError(
        f"a tokenizer with decoder {', '.join(map(str, kinds))} is not supported: flash_lm must know the bytes of each "
        f"token, so the decoder must be ByteLevel, ByteFallback or Metaspace"
    )


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The characters that stand for bytes: printable ones stand for themselves, the others map to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
