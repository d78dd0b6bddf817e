"""Tokenizers from the metadata of GGUF files, against the library that trained them."""

import json
import pathlib
import re

import pytest
from inference.test_llama import byte_level
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, pre_tokenizers

from flash_lm.data.gguf_tokenizer import gguf_tokenizer
from flash_lm.data.tokenizers import train_sentencepiece
from flash_lm.errors import InputError

TEXTS = ["the cat sat", "  two  blanks\n\ttab", "naïve 猫 😀", "It's 1234 cats, we've 56", "THE CAT'S\r\n\r\nmat!!", ""]
PATH = pathlib.Path("model.gguf")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def metadata(tokenizer: Tokenizer, pre: str, **more) -> dict:
    """What a converter writes of a byte-level tokenizer whose only special token is the first."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    about = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [3] + [1] * (len(tokens) - 1)}
    about |= {"merges": [" ".join(pair) for pair in model["merges"]], "eos_token_id": 0} | more
    return {f"tokenizer.ggml.{name}": value for name, value in about.items()}


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2"])
def test_byte_level_tokenizers(pre):
    theirs = byte_level()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), bytes_only]),
    }[pre]
    ours = gguf_tokenizer(metadata(theirs, pre), PATH, 400)
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert ids.tolist() == theirs.encode(text).ids
        assert ours.decode(ids) == text
    assert ours.begin == ours.end == 0 and ours.token_bytes(0) == b""


def test_rows_that_fill_up_an_embedding_are_no_text():
    about = metadata(byte_level(), "gpt-2")
    about["tokenizer.ggml.tokens"] = [*about["tokenizer.ggml.tokens"], "[PAD300]"]
    about["tokenizer.ggml.token_type"] = [*about["tokenizer.ggml.token_type"], 5]
    tokenizer = gguf_tokenizer(about, PATH, 400)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""
    assert tokenizer.decode(tokenizer.encode(["[PAD300]"])[0]) == "[PAD300]"  # as text


@pytest.mark.parametrize("space", [False, True])
def test_sentencepiece(space):
    trained = train_sentencepiece(["the cat sat on the mat", "a naïve cat"] * 20, 300)
    proto = sentencepiece_model_pb2.ModelProto.FromString(trained.model_bytes())
    proto.normalizer_spec.add_dummy_prefix = space
    theirs = type(trained)(proto.SerializeToString())
    pieces = proto.pieces
    about = {"model": "llama", "tokens": [x.piece for x in pieces], "scores": [x.score for x in pieces]}
    about |= {"token_type": [x.type for x in pieces], "bos_token_id": theirs.begin, "eos_token_id": theirs.end}
    about |= {"unknown_token_id": proto.trainer_spec.unk_id, "add_space_prefix": space}
    ours = gguf_tokenizer({f"tokenizer.ggml.{name}": value for name, value in about.items()}, PATH, 300)
    for text, a, b in zip(TEXTS, ours.encode(TEXTS), theirs.encode(TEXTS), strict=True):
        assert a.tolist() == b.tolist(), text
    assert (ours.begin, ours.end) == (theirs.begin, theirs.end)


def test_turns_may_end_with_a_token_of_their_own():
    """An Instruct model's template ends answers with it, and not with the end of texts."""
    about = metadata(byte_level(), "gpt-2", eot_token_id=5)
    turn = about["tokenizer.ggml.tokens"][5]
    assert gguf_tokenizer(about, PATH, 400).end == 0
    assert gguf_tokenizer(about | {"tokenizer.chat_template": f"{{{{ x }}}}{turn}"}, PATH, 400).end == 5


def test_a_token_that_is_no_bytes_is_an_error():
    about = metadata(byte_level(), "gpt-2")
    about["tokenizer.ggml.tokens"] = [*about["tokenizer.ggml.tokens"][:-1], "a b"]
    about["tokenizer.ggml.merges"] = []
    with pytest.raises(InputError, match="damaged tokenizer"):
        gguf_tokenizer(about, PATH, 400)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "a tokenizer 'bert': only gpt2, llama"),
        ({"pre": "strange"}, "splits text as strange: only gpt-2, smollm"),
        ({"pre": None}, "splits text as None"),
        ({"eos_token_id": None}, "end-of-text None"),
        ({"bos_token_id": 999}, "begin-of-text 999"),
        ({"token_type": [1]}, "1 types for them"),
        ({"model": "llama"}, "0 scores for"),
    ],
    ids=str,
)
def test_other_tokenizers_are_refused(change, message):
    with pytest.raises(InputError, match=re.escape(message)):
        gguf_tokenizer(metadata(byte_level(), **{"pre": "gpt-2", **change}), PATH, 400)
    with pytest.raises(InputError, match="10 rows of embeddings"):
        gguf_tokenizer(metadata(byte_level(), "gpt-2"), PATH, 10)
