"""A tokenizer with a chat template for tests: bytes, with the ids and special tokens' places of `ByteTokenizer`."""

import functools
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flash_lm.data.foreign_tokenizer import HuggingFaceTokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "[MASK]")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@functools.cache
def tokenizer_json() -> str:
    """A tokenizer.json of 256 bytes and four special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=260, special_tokens=[*SPECIAL], initial_alphabet=alphabet)
    )
    return tokenizer.to_str()


def chat_tokenizer(template: str | None = CHATML) -> HuggingFaceTokenizer:
    """The tokenizer with a template."""
    return HuggingFaceTokenizer.of(json.loads(tokenizer_json()), SPECIAL[1], SPECIAL[2], template)


def spelled(ids) -> str:
    """The text of ids, with special tokens."""
    tokenizer = chat_tokenizer()
    texts = (SPECIAL[i].encode() if i < len(SPECIAL) else tokenizer.token_bytes(i) for i in map(int, ids))
    return b"".join(texts).decode()
