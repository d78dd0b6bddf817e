"""A folder of Hugging Face's format: config.json, *.safetensors or pytorch_model.bin, and a tokenizer."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator

import numpy as np
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
        InputError: a file is missing or damaged, or an array that is read is of another type, such as a quantised one.
    """
    settings, tokenizer = read_json(folder / "config.json"), lambda rows: folder_tokenizer(folder, rows)
    if not any((folder / name).exists() for name in (WEIGHTS, INDEX)):
        if (folder / f"{_PICKLED}.index.json").exists():
            raise InputError(f"{folder} has several {_PICKLED} files: convert them to safetensors where they come from")
        if (folder / _PICKLED).exists():
            with open_pickled(folder / _PICKLED) as (arrays, dtype):
                yield Source("PyTorch's pickle", settings, arrays, dtype, tokenizer)
            return
    with contextlib.ExitStack() as stack:
        with _explained(folder):
            files = stack.enter_context(open_weights(folder))
            dtypes = {name: file.get_slice(name).get_dtype() for name, file in files.items()}
        # bfloat16 if all weights are, else float32, which can hold the others.
        kinds = {*dtypes.values()} & _DTYPES
        if not kinds:
            listed = ", ".join(sorted({*dtypes.values()})) or "nothing"
            raise InputError(f"the weights are {listed}: only {', '.join(sorted(_DTYPES))} can be read")
        dtype = "bfloat16" if kinds == {"BF16"} else "float32"

        def read(name: str) -> np.ndarray:
            if dtypes[name] not in _DTYPES:
                raise InputError(f"{name} is {dtypes[name]}: only {', '.join(sorted(_DTYPES))} can be read")
            with _explained(folder):
                return files[name].get_tensor(name)

        yield Source("safetensors", settings, {x: lambda x=x: read(x) for x in files}, dtype, tokenizer)


@contextlib.contextmanager
def _explained(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be read ({error}): download the model again") from None


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
        tokenizer, about = SentencePieceTokenizer(model.read_bytes()), folder / "tokenizer_config.json"
        if about.exists() and "chat_template" in read_json(about):
            _log.info("left out the chat template: only a tokenizer.json can have one here")
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
