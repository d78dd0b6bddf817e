"""Our tokenizers in the format of Hugging Face's `tokenizers`, with equal ids.

A text that spells a special token, such as [MASK], is text to ours; set `encode_special_tokens` there. One that has
SentencePiece's own sign for a blank, U+2581, is a blank there.
"""

from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from flash_lm.data.tokenizers import SPECIALS, ByteTokenizer, CharacterTokenizer, SentencePieceTokenizer
from flash_lm.data.tokenizers import Tokenizer as OurTokenizer

_proto: Any = sentencepiece_model_pb2  # made by a compiler, without types
_BLANK = "▁"  # as SentencePiece writes it
_UNKNOWN = "<unk>"


def to_hugging_face(tokenizer: OurTokenizer) -> Tokenizer | str:
    """The same tokenizer there, or a sentence on why there is none."""
    if isinstance(tokenizer, ByteTokenizer):
        return _of_bytes()
    if isinstance(tokenizer, CharacterTokenizer):
        return _of_characters(tokenizer)
    return _of_sentencepiece(tokenizer)


def _of_bytes() -> Tokenizer:
    """No pair of bytes is ever merged."""
    vocab = {name: i for i, name in enumerate(SPECIALS)} | {_byte(b): len(SPECIALS) + b for b in range(256)}
    found = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return _with_specials(found, SPECIALS)


def _of_characters(tokenizer: CharacterTokenizer) -> Tokenizer:
    characters = [tokenizer.token_bytes(i).decode() for i in range(tokenizer.unknown + 1, tokenizer.vocab_size)]
    vocab = {name: i for i, name in enumerate((*SPECIALS, _UNKNOWN, *characters))}
    found = Tokenizer(models.BPE(vocab, [], unk_token=_UNKNOWN))
    found.decoder = decoders.Fuse()
    return _with_specials(found, (*SPECIALS, _UNKNOWN))


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> Tokenizer | str:
    """Byte-pair encoding by scores is one by ranks: what is merged to a piece ranks as the piece does."""
    spec = _proto.ModelProto.FromString(tokenizer.model_bytes())
    trainer, normalizer = spec.trainer_spec, spec.normalizer_spec
    if (trainer.model_type, normalizer.name) != (trainer.BPE, "identity") or not trainer.byte_fallback:
        return "its SentencePiece model is not byte-pair encoding without normalisation, which alone is the same there"
    if normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces:
        return "its SentencePiece model adds or removes blanks, which no tokenizer there does in the same way"
    kind = _proto.ModelProto.SentencePiece
    vocab = {piece.piece: i for i, piece in enumerate(spec.pieces)}
    scores = {piece.piece: piece.score for piece in spec.pieces if piece.type == kind.NORMAL}
    merges = [
        (piece[:i], piece[i:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for i in range(1, len(piece))
        if piece[:i] in scores and piece[i:] in scores
    ]
    found = Tokenizer(models.BPE(vocab, merges, unk_token=_UNKNOWN, byte_fallback=True))
    found.normalizer = normalizers.Replace(" ", _BLANK)
    found.decoder = decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    whole = [piece.piece for piece in spec.pieces if piece.type == kind.USER_DEFINED]
    found.add_tokens([AddedToken(piece, normalized=False) for piece in whole])
    specials = [piece.piece for piece in spec.pieces if piece.type in (kind.CONTROL, kind.UNKNOWN)]
    return _with_specials(found, specials)


def _with_specials(found: Tokenizer, names: tuple[str, ...] | list[str]) -> Tokenizer:
    """With special tokens, and begin-of-text before a text that is to have them."""
    found.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    begin = SPECIALS[1]
    found.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, found.token_to_id(begin))]
    )
    return found


def _byte(value: int) -> str:
    return f"<0x{value:02X}>"
