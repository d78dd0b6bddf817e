"""The tokenizer in the metadata of a GGUF file, as a tokenizer of Hugging Face's `tokenizers` or of SentencePiece."""

import logging
import pathlib
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from flash_lm.data.foreign_tokenizer import HuggingFaceTokenizer
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import SentencePieceTokenizer
from flash_lm.errors import InputError, first_line

_log = logging.getLogger(__name__)
_proto: Any = sentencepiece_model_pb2  # generated code, without types
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens, the same numbers as SentencePiece's
_NO_TEXT = {_UNKNOWN, _CONTROL, _UNUSED}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(regex: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return [split, _BYTES | {"use_regex": False}]


# Splitters of text before byte-pair encoding, by the name in tokenizer.ggml.pre.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITTERS = {
    "gpt-2": [_BYTES],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES],
    "llama-bpe": _split(_WORDS + r"\p{N}{1,3}" + _REST),
    "qwen2": _split(_WORDS + r"\p{N}" + _REST),
}


def gguf_tokenizer(about: dict[str, Any], path: pathlib.Path, num_embeddings: int) -> Tokenizer:
    """Builds the tokenizer.

    Args:
        about: the metadata by name.
        path: of the file, for messages.
        num_embeddings: rows of the model's embeddings.

    Raises:
        InputError: it is of a kind that is not supported, or metadata are missing.
    """
    get = lambda name, default=None: about.get(f"tokenizer.ggml.{name}", default)
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind := get("model"), str) or kind not in kinds:
        raise InputError(f"{path} has a tokenizer {kind!r:.80}: only {', '.join(kinds)} can be read from GGUF")
    tokens, types, end = get("tokens") or [], get("token_type") or [], get("eos_token_id")
    begin = get("bos_token_id", end)
    if len(types) != len(tokens) or len(tokens) > num_embeddings or not {begin, end} <= {*range(len(tokens))}:
        raise InputError(
            f"{path} has {len(tokens)} tokens, {len(types)} types for them, {num_embeddings} rows of embeddings, "
            f"begin-of-text {begin} and end-of-text {end}: its tokenizer is damaged or incomplete, so download it again"
        )
    # An Instruct model may end its turns with a token of its own.
    template, turn = about.get("tokenizer.chat_template"), get("eot_token_id")
    if template and isinstance(turn, int) and 0 <= turn < len(tokens) and tokens[turn] in template:
        end = turn
    try:
        tokenizer = kinds[kind](about, path, tokens, types, begin, end)
        tokenizer.bytes_per_token()
    except InputError:
        raise
    except Exception as error:  # libraries raise what they meet
        raise InputError(f"{path} has a damaged tokenizer ({first_line(error)}): download it again") from None
    return tokenizer


def _byte_level(
    about: dict[str, Any], path: pathlib.Path, tokens: list[str], types: list[int], begin: int, end: int
) -> HuggingFaceTokenizer:
    """Byte-pair encoding of bytes, as GPT-2's, behind one of the known splitters."""
    # Files without a name, the oldest, were split as each program pleased.
    name = about.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _SPLITTERS:
        raise InputError(f"{path} splits text as {name}: only {', '.join(_SPLITTERS)} are known; import the folder")
    merges = [merge.split(" ", 1) for merge in about.get("tokenizer.ggml.merges") or ()]
    # Added tokens are literal text; those without text, such as the rows that fill up an embedding, are special.
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, "special": kind in _NO_TEXT, **flags}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in {*_NO_TEXT, _USER_DEFINED}
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITTERS[name]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": name == "llama-bpe",  # a word that is a token stays one
        },
    }
    begins = about.get("tokenizer.ggml.bos_token_id") is not None
    return HuggingFaceTokenizer.of(content, begin, end, about.get("tokenizer.chat_template"), has_begin=begins)


def _sentencepiece(
    about: dict[str, Any], path: pathlib.Path, tokens: list[str], types: list[int], begin: int, end: int
) -> SentencePieceTokenizer:
    """SentencePiece's byte-pair encoding with scores."""
    if "tokenizer.chat_template" in about:
        _log.info("left out the chat template: a SentencePiece tokenizer cannot have one here")
    scores = about.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise InputError(f"{path} has {len(scores)} scores for {len(tokens)} tokens: download it again")
    spec = _proto.ModelProto()
    for piece, score, kind in zip(tokens, scores, types, strict=True):
        spec.pieces.add(piece=piece, score=score, type=kind)
    # The file says nothing of normalisation: Llama's has none but a space before the text.
    trainer, normalizer = spec.trainer_spec, spec.normalizer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = trainer.BPE, len(tokens), True
    trainer.unk_id = about.get("tokenizer.ggml.unknown_token_id", 0)
    trainer.bos_id, trainer.eos_id = begin, end
    trainer.unk_piece, trainer.bos_piece, trainer.eos_piece = (tokens[i] for i in (trainer.unk_id, begin, end))
    normalizer.name, normalizer.remove_extra_whitespaces = "identity", False
    normalizer.add_dummy_prefix = bool(about.get("tokenizer.ggml.add_space_prefix", True))
    return SentencePieceTokenizer(spec.SerializeToString())
