"""Exports our tokenizers to the format of Hugging Face's `tokenizers`, with the same ids.

One difference: our tokenizers treat text that spells a special token, such as [MASK], as text; set
`encode_special_tokens` of the exported one for that.
"""

from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing

from flash_lm.data.foreign_tokenizer import HuggingFaceTokenizer
from flash_lm.data.tokenizer import MASK, SPECIALS, ByteTokenizer, CharacterTokenizer, NumberTokenizer, byte_piece
from flash_lm.data.tokenizer import Tokenizer as OurTokenizer
from flash_lm.data.tokenizers import SPACE, SentencePieceTokenizer

_proto: Any = sentencepiece_model_pb2  # generated code, without types
_UNKNOWN = "<unk>"
# Texts that different tokenizers cut in different ways.
_PROBES = (
    "a b",
    "  two  blanks ",
    "\n\n\ttab\r\n",
    "naïve 猫 😀",
    "import os.path as p2",
    "The cat's 1,234.5 cats",
    "a▁b ▁",
)


def to_hugging_face(tokenizer: OurTokenizer) -> Tokenizer | str:
    """Converts a tokenizer to that format, or returns a sentence on why this is not possible."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return Tokenizer.from_str(tokenizer.tokenizer_json())
    if isinstance(tokenizer, NumberTokenizer):
        return "its tokens are numbers of made data, not text"
    if isinstance(tokenizer, ByteTokenizer):
        converted = _convert_bytes()
    elif isinstance(tokenizer, CharacterTokenizer):
        converted = _convert_characters(tokenizer)
    else:
        assert isinstance(tokenizer, SentencePieceTokenizer)
        converted = _convert_sentencepiece(tokenizer)
    if isinstance(converted, str):
        return converted
    # Like ours, it starts every text with begin-of-text.
    begin = converted.id_to_token(tokenizer.begin)
    assert begin is not None
    converted.add_special_tokens([_special(begin), _special(MASK)])  # a model from elsewhere may have no mask
    converted.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, tokenizer.begin)]
    )
    # Texts that tokenizers tend to cut differently must get the same ids.
    for text in _PROBES:
        if converted.encode(text, add_special_tokens=False).ids != tokenizer.encode([text])[0].tolist():
            return f"its tokens of {text!r} would be different there"
    return converted


def _convert_bytes() -> Tokenizer:
    """Bytes are never merged."""
    # Without merges, the byte fallback spells every character in bytes.
    vocab = {name: i for i, name in enumerate(SPECIALS)} | {byte_piece(b): len(SPECIALS) + b for b in range(256)}
    converted = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    converted.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    converted.add_special_tokens([_special(name) for name in SPECIALS])
    return converted


def _convert_characters(tokenizer: CharacterTokenizer) -> Tokenizer:
    characters = [tokenizer.token_bytes(i).decode() for i in range(tokenizer.unknown + 1, tokenizer.vocab_size)]
    vocab = {name: i for i, name in enumerate((*SPECIALS, _UNKNOWN, *characters))}
    converted = Tokenizer(models.BPE(vocab, [], unk_token=_UNKNOWN))
    converted.decoder = decoders.Fuse()
    converted.add_special_tokens([_special(name) for name in (*SPECIALS, _UNKNOWN)])
    return converted


def _convert_sentencepiece(tokenizer: SentencePieceTokenizer) -> Tokenizer | str:
    """Byte-pair encoding by scores is one by ranks: a merge has the rank of the piece that it makes."""
    spec = _proto.ModelProto.FromString(tokenizer.model_bytes())
    trainer, normalizer = spec.trainer_spec, spec.normalizer_spec
    if (trainer.model_type, normalizer.name) != (trainer.BPE, "identity") or not trainer.byte_fallback:
        return "its SentencePiece model is not byte-pair encoding without normalisation; only that is the same there"
    if normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces:
        return "its SentencePiece model adds or removes spaces, and no tokenizer there does so in the same way"
    kind = _proto.ModelProto.SentencePiece
    # With spaces as they are: SentencePiece's sign for them may stand in a text, too.
    vocab = {piece.piece.replace(SPACE, " "): i for i, piece in enumerate(spec.pieces)}
    scores = {piece.piece.replace(SPACE, " "): piece.score for piece in spec.pieces if piece.type == kind.NORMAL}
    # All pairs of pieces that make a piece, by the rank of the piece that they make.
    merges = [
        (piece[:i], piece[i:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for i in range(1, len(piece))
        if piece[:i] in scores and piece[i:] in scores
    ]
    # User-defined pieces are matched before any merge, as SentencePiece does.
    converted = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    converted.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    user_defined = [piece.piece for piece in spec.pieces if piece.type == kind.USER_DEFINED]
    if any({" ", SPACE} & set(piece) for piece in user_defined):
        return (
            "its SentencePiece model has user-defined pieces with spaces; no tokenizer there cuts them in the same way"
        )
    converted.add_tokens([AddedToken(piece, normalized=False) for piece in user_defined])
    converted.add_special_tokens([_special(x.piece) for x in spec.pieces if x.type in (kind.CONTROL, kind.UNKNOWN)])
    return converted


def _special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)
