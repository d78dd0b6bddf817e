"""Converts a model of another library to an exported model of flash_lm, for every command and `flash_lm.load`."""

import os
import pathlib
from typing import Any, NamedTuple

import jax

from flash_lm.config.experiment import default_config, parse
from flash_lm.config.registry import FORMATS
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.inference.sources.open import open_source
from flash_lm.models.formats.arrays import to_params
from flash_lm.models.formats.format import find_format
from flash_lm.models.formats.settings import to_keys
from flash_lm.training.export_folder import flatten_arrays, write_export
from flash_lm.training.train_state import ModelFunction

_MAX_EVAL_LENGTH = 2048  # default length for evaluation: the full context of a large model takes long


class Imported(NamedTuple):
    """What was imported.

    Attributes:
        folder: where it is now.
        message: one line on what was read.
    """

    folder: pathlib.Path
    message: str


def import_hf(model: str | os.PathLike[str], out: str | os.PathLike[str]) -> pathlib.Path:
    """Converts a downloaded model to an exported model of flash_lm; docs/pretrained.md lists the formats.

    Args:
        model: a folder with config.json, *.safetensors or pytorch_model.bin, and tokenizer.json or tokenizer.model; or
            a file, .gguf or RWKV-4's .pth.
        out: the folder to write; must not exist yet.

    Returns:
        `out`, for `flash_lm.load`, `--workdir` and `train.init_from`.

    Raises:
        InputError: it is of no known format, it has what flash_lm does not support, or a file is missing or damaged.
    """
    return import_with_message(model, out).folder


def import_with_message(model: str | os.PathLike[str], out: str | os.PathLike[str]) -> Imported:
    """As `import_hf`, with a line on what was read."""
    path, out = pathlib.Path(model), pathlib.Path(out)
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} already exists: give a new folder")
    with open_source(path) as source:
        # The config: that of the model, and data keys that fit its tokenizer and length.
        name = find_format(source.settings)
        row = FORMATS[name]
        raw: Any = default_config()
        raw.model.update_from_flattened_dict(to_keys(row, source.settings))
        tokenizer = source.tokenizer(raw.model.vocab_size)
        length = min(raw.model.max_length, _MAX_EVAL_LENGTH)
        raw.data.update(tokenizer=tokenizer.kind, length=length, tokens_per_batch=length)

        # The parameters, converted array by array.
        dtype = "float32" if row.float32 else source.dtype
        raw.model.update(dtype=dtype, param_dtype=dtype)
        try:
            config = complete(parse(raw).model)
        except InputError as error:  # in our names, and perhaps on several lines
            raise InputError(f"config.json makes no model: {'; '.join(str(error).splitlines())}") from None
        if config.num_layers > len(source.arrays):
            raise InputError(
                f"config.json has {config.num_layers:,} layers, and the weights have {len(source.arrays)} arrays: "
                "it is damaged, or files are missing"
            )
        arrays = {name: lambda read=read: read().astype(dtype, copy=False) for name, read in source.arrays.items()}
        function = ModelFunction(config, seed=0)
        expected = flatten_arrays(function.get_params(function.abstract), {})
        params = to_params(row, arrays, {name: x.shape for name, x in expected.items()})

    # The export. The corpus and the time of its training are unknown.
    facts = {"corpus": None, "tokenizer": tokenizer.fingerprint, "train_seconds": 0.0}
    origin = {"run": str(path), "step": 0, "facts": facts}
    write_export(out, flatten_arrays(params, {}), raw.to_dict(), origin, tokenizer)
    chats = ", with a chat template" if getattr(tokenizer, "chat_template", None) else ""
    count = sum(x.size for x in jax.tree.leaves(params))
    return Imported(
        out,
        f"read {name} from {source.kind}: {config.family}, {count:,} parameters, {config.num_layers} layers of width "
        f"{config.model_dim}, {tokenizer.vocab_size:,} tokens, at most {config.max_length:,} a text{chats}",
    )
