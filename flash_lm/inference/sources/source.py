"""`Source`: a model of another library, opened; and what all kinds of files have in common."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flash_lm.data.tokenizer import Tokenizer
from flash_lm.models.formats.format import Arrays


class Source(NamedTuple):
    """A model of another library.

    Attributes:
        kind: what the files are, for a message, such as "safetensors".
        settings: of a config.json.
        arrays: functions that read the arrays as they are in the files, by name.
        dtype: bfloat16 if all of them are, else float32, which can hold the others.
        tokenizer: function (rows of embeddings) -> the tokenizer without tokens that have none.
    """

    kind: str
    settings: dict[str, Any]
    arrays: Arrays
    dtype: str
    tokenizer: Callable[[int], Tokenizer]
