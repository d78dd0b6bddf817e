"""Tokenizers restore texts exactly, count bytes exactly, and refuse text that they cannot represent."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flash_lm.data.tokenizer import SPECIALS, ByteTokenizer, CharacterTokenizer
from flash_lm.data.tokenizers import SentencePieceTokenizer, load_tokenizer, save_tokenizer, train_sentencepiece
from flash_lm.errors import InputError

LINES = ["def f(x):\n", "    return x + 1\n", "\tüber 猫  two  spaces\n", "\n"] * 50


def draw_words(characters: str) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices(characters, k=80)) + "\n" for _ in range(60)]


# Text of several kinds; only the first has enough blanks for a separate piece.
KINDS = {
    "prose": LINES,
    "han": draw_words("春眠不覺曉處處聞啼鳥夜來風雨聲花落知多少"),
    "dna": [line.strip() for line in draw_words("ACGT")],
    "minified": [f'{{"key{i % 7}":[{i},{{"x":null,"y":"z"}}]}}\n' for i in range(200)],
    "one blank": ["a b\n", *draw_words("abcdefgh") * 40],
    "tabs": draw_words("ab\t\r"),
}


@pytest.fixture(scope="module")
def trained_tokenizers():
    return {kind: train_sentencepiece(lines, 300) for kind, lines in KINDS.items()}


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs"])) | st.text('ab \n\t▁春雨ACGT{":,}<s>[MASK]\u3000\xa0'))
@example(" ")
@example(" ▁ a▁ b  \n ")
def test_any_text_is_restored_by_a_tokenizer_of_any_corpus(trained_tokenizers, text):
    for kind, tokenizer in trained_tokenizers.items():
        ids = tokenizer.encode([text])[0].tolist()
        assert tokenizer.decode(ids) == text, kind
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode(), kind


MAKERS = {
    "bytes": ByteTokenizer,
    "sentencepiece": lambda: train_sentencepiece(LINES, 320),
    "characters": lambda: CharacterTokenizer("".join(sorted(set("".join(LINES) + "".join(texts()))))),
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request):
    return MAKERS[request.param]()


def texts() -> list[str]:
    draw = random.Random(0)
    characters = "ab \t\n\r  üé猫\u200b🙂\x00<s>[MASK]▁"
    # SentencePiece writes a blank as ▁.
    return ["", " ", "\n\n", "▁", "a▁b", "▁▁ ▁", "<s>", *("".join(draw.choices(characters, k=40)) for _ in range(50))]


def test_any_text_is_restored(tokenizer):
    for text in texts():
        (ids,) = tokenizer.encode([text])
        assert tokenizer.decode(ids.tolist()) == text


def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer):
    counts = tokenizer.bytes_per_token()
    assert counts.shape == (tokenizer.vocab_size,)
    for text in texts():
        (ids,) = tokenizer.encode([text])
        assert b"".join(tokenizer.token_bytes(int(i)) for i in ids) == text.encode()
        assert counts[ids].sum() == len(text.encode())
    assert not counts[[tokenizer.begin, tokenizer.end]].any()


def test_special_tokens_have_fixed_ids_and_never_occur_in_text(tokenizer):
    assert (tokenizer.begin, tokenizer.end) == (SPECIALS.index("<s>"), SPECIALS.index("</s>"))
    for ids in tokenizer.encode(["<s></s>[MASK]<pad>"]):
        assert min(ids) >= len(SPECIALS)


def test_save_and_load(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(LINES)[1].tolist() == tokenizer.encode(LINES)[1].tolist()


def test_a_missing_tokenizer_is_reported_in_one_line(tmp_path):
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="not a SentencePiece model"):
        SentencePieceTokenizer(b"nonsense")
    with pytest.raises(InputError, match=r"too small for data.vocab_size=5000: lower .*vocab_size to \d+ or less"):
        train_sentencepiece(LINES, 5000)


def test_a_character_that_is_not_in_the_set():
    tokenizer = CharacterTokenizer("ab")
    (ids,) = tokenizer.encode(["a?b"])
    assert ids.tolist()[1] == tokenizer.unknown and tokenizer.decode(ids) == "ab"
    assert tokenizer.bytes_per_token()[ids].tolist() == [1, 0, 1]
