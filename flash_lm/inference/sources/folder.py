"""A folder of Hugging Face's format: config.json, *.safetensors or pytorch_model.bin, and a tokenizer."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError

from flash_lm.data.foreign_tokenizer import read_json, read_tokenizer
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import SentencePieceTokenizer
from flash_lm.errors import InputError
from flash_lm.inference.sources.pickled import open_pickled
from flash_lm.inference.sources.source import Source
from flash_lm.runs.run_folder import INDEX, WEIGHTS
from flash_lm.training.export_folder import open_weights

_log = logging.getLogger(__name__)
_PICKLED = "pytorch_model.bin"
_DTYPES = {"F32", "F16", "BF16"}  # as safetensors calls them


@contextlib.contextmanager
def open_folder(folder: pathlib.Path) -> Iterator[Source]:
    """Opens a folder; nothing but names and types of the arrays is read yet.

    Raises:
        InputError: a file is missing or damaged, or arrays are of another type, such as quantised ones.
    """
    settings, tokenizer = read_json(folder / "config.json"), lambda rows: folder_tokenizer(folder, rows)
    if (pickled := folder / _PICKLED).exists() and not any((folder / name).exists() for name in (WEIGHTS, INDEX)):
        with open_pickled(pickled) as (arrays, dtype):
            yield Source("PyTorch's pickle", settings, arrays, dtype, tokenizer)
        return
    try:
        with open_weights(folder) as files:
            dtype = _dtype(files)
            arrays = {name: lambda name=name: files[name].get_tensor(name).astype(dtype) for name in files}
            yield Source("safetensors", settings, arrays, dtype, tokenizer)
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be read ({error}): download the model again") from None


def _dtype(files: dict[str, Any]) -> str:
    """The dtype for our parameters: bfloat16 if all are bfloat16, else float32, which can hold the others."""
    dtypes = {file.get_slice(name).get_dtype() for name, file in files.items()}
    if not dtypes or dtypes - _DTYPES:
        listed = ", ".join(sorted(dtypes)) or "nothing"
        raise InputError(f"the weights are {listed}: only {', '.join(sorted(_DTYPES))} can be read")
    return "bfloat16" if dtypes == {"BF16"} else "float32"


def folder_tokenizer(folder: pathlib.Path, num_embeddings: int) -> Tokenizer:
    """Reads tokenizer.json, or else tokenizer.model, a SentencePiece model; without tokens that have no embedding.

    Args:
        folder: the folder, or a tokenizer.json.
        num_embeddings: rows of the model's embeddings.

    Raises:
        InputError: there is none, or it has tokens in use that have no embedding.
    """
    # A SentencePiece model cannot be cut.
    model = folder / "tokenizer.model"
    if model.is_file() and not (folder / "tokenizer.json").exists():
        tokenizer = SentencePieceTokenizer(model.read_bytes())
        if tokenizer.vocab_size > num_embeddings:
            raise InputError(
                f"{model} has {tokenizer.vocab_size} pieces for {num_embeddings} rows of embeddings: give config.json "
                f"the vocab_size of the weights, or a tokenizer.json with tokens 0 to {num_embeddings - 1} alone"
            )
        return tokenizer

    # In tokenizer.json, special tokens beyond the embeddings can be left out.
    tokenizer = read_tokenizer(folder)
    if tokenizer.vocab_size <= num_embeddings:
        return tokenizer
    try:
        tokenizer, left_out = tokenizer.within(num_embeddings)
    except InputError as error:
        raise InputError(f"{folder} has {error}") from None
    _log.info("left out special tokens without an embedding: %s", ", ".join(left_out))
    return tokenizer
