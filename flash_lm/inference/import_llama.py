"""Converts Llamas in Hugging Face's format to an exported model, for every command and `flash_lm.load`."""

import logging
import os
import pathlib
from typing import Any

import jax
from safetensors import SafetensorError

from flash_lm.config.experiment import default_config, parse
from flash_lm.data.foreign_tokenizer import read_json, read_tokenizer
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import SentencePieceTokenizer, save_tokenizer
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.layers.parameter import parameter_name
from flash_lm.models import llama
from flash_lm.runs.provenance import config_hash, provenance
from flash_lm.training.export_folder import flatten_arrays, new_folder, open_weights, write_json, write_weights
from flash_lm.training.train_state import ModelFunction

_log = logging.getLogger(__name__)
_DTYPES = {"F32", "F16", "BF16"}  # as safetensors calls them
_MAX_EVAL_LENGTH = 2048  # default length for evaluation: the full context of a large model takes long


def import_hf(model: str | os.PathLike[str], out: str | os.PathLike[str]) -> pathlib.Path:
    """Converts a Llama downloaded from the Hugging Face hub to an exported model of flash_lm.

    Args:
        model: a folder with config.json, *.safetensors, and tokenizer.json or tokenizer.model.
        out: the folder to write; must not exist yet.

    Returns:
        `out`, for `flash_lm.load`, `--workdir` and `train.init_from`.

    Raises:
        InputError: it is not a Llama that flash_lm supports (no biases), or a file is missing or damaged.
    """
    # The config: that of the Llama, and data keys that fit its tokenizer and length.
    folder, out = pathlib.Path(model), pathlib.Path(out)
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} already exists: give a new folder")
    settings = read_json(folder / "config.json")
    raw: Any = default_config()
    raw.model.update_from_flattened_dict(llama.model_keys(settings))
    tokenizer = _tokenizer(folder, raw.model.vocab_size)
    length = min(raw.model.max_length, _MAX_EVAL_LENGTH)
    raw.data.update(tokenizer=tokenizer.kind, length=length, tokens_per_batch=length)

    # The parameters, converted array by array, and checked against the shapes of our model.
    try:
        with open_weights(folder) as files:
            dtype = _dtype(files)
            raw.model.update(dtype=dtype, param_dtype=dtype)
            config = complete(parse(raw).model)
            params = llama.from_llama(files, lambda name: files[name].get_tensor(name).astype(dtype), config)
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be read ({error}): download the model again") from None
    _check_shapes(params, ModelFunction(config, seed=0))

    # The export. The corpus and the time of its training are unknown.
    facts = {"corpus": None, "tokenizer": tokenizer.fingerprint, "train_seconds": 0.0}
    origin: dict[str, Any] = {"run": str(folder), "step": 0, "config_hash": config_hash(raw.to_dict()), "facts": facts}
    about = {"architectures": ["FlashLM"], "model_type": "flash_lm", "config": raw.to_dict()}
    origin["exported_by"] = provenance(jax.devices()[0].device_kind)
    with new_folder(out) as partial:
        write_weights(partial, flatten_arrays(params, {}))
        write_json(partial / "config.json", about | {"flash_lm": origin})
        save_tokenizer(tokenizer, partial / "tokenizer")
    return out


def _tokenizer(folder: pathlib.Path, num_embeddings: int) -> Tokenizer:
    """Reads tokenizer.json, or else tokenizer.model, a SentencePiece model; without tokens that have no embedding."""
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


def _dtype(files: dict[str, Any]) -> str:
    """The dtype for our parameters: bfloat16 if all are bfloat16, else float32, which can hold the others."""
    dtypes = {file.get_slice(name).get_dtype() for name, file in files.items()}
    if not dtypes or dtypes - _DTYPES:
        listed = ", ".join(sorted(dtypes)) or "nothing"
        raise InputError(f"the weights are {listed}: only {', '.join(sorted(_DTYPES))} can be read")
    return "bfloat16" if dtypes == {"BF16"} else "float32"


def _check_shapes(params: Any, model: ModelFunction) -> None:
    trees = (jax.tree_util.tree_leaves_with_path(tree) for tree in (jax.eval_shape(model.init), params))
    expected, shapes = ({parameter_name(path): x.shape for path, x in leaves} for leaves in trees)
    if wrong := [f"{key} {shapes[key]}, not {shape}" for key, shape in expected.items() if shapes[key] != shape]:
        raise InputError(f"the weights do not fit config.json: {', '.join(wrong[:5])}")
