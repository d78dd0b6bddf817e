"""The folder of an exported model: parameters as safetensors, with the config and the tokenizer that they need.

model.safetensors   parameters by path, `layers.sublayer_0.query.kernel`; `constants.…`: random and not trained; above
                    5 GB in several files, and model.safetensors.index.json says where each is
config.json         what other tools expect, what made the export, and under `config` the run's own config
tokenizer/          the tokenizer, exactly; tokenizer.json is the same one for Hugging Face's `tokenizers`
README.md           the model card
"""

import contextlib
import json
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flash_lm.config.model import ModelConfig
from flash_lm.errors import InputError, first_line
from flash_lm.runs.json_file import load_json
from flash_lm.runs.run_folder import INDEX, WEIGHTS
from flash_lm.training.train_state import Params

_LARGEST_FILE = 5 * 10**9  # bytes, as the hub's own tools cut
_PART = "model{suffix}.safetensors"  # the suffix is -00001-of-00003, or empty if there is one file
_CONSTANTS = "constants"
_ABOUT = {"run": str, "step": int, "config_hash": str, "facts": dict}
_FACTS = {
    "corpus": str | None,
    "tokenizer": str,
    "train_seconds": int | float,
    "code": dict,
    "parent": dict,
    "checksums": dict,
}


@contextlib.contextmanager
def new_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to fill, which becomes `out` at the end; after an error it is removed.

    Raises:
        InputError: `out` cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            partial = pathlib.Path(folder) / "new"
            partial.mkdir()
            yield partial
            os.rename(partial, out)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes JSON that people can read, too."""
    path.write_text(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def write_weights(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name into a folder, in files of at most 5 GB where no array is larger.

    They are made contiguous first: safetensors silently writes others wrong.
    """
    from huggingface_hub import split_state_dict_into_shards_factory as split  # noqa: PLC0415 (slow to import)

    parts = split(
        dict(arrays), get_storage_size=lambda x: x.nbytes, filename_pattern=_PART, max_shard_size=_LARGEST_FILE
    )
    for file, names in parts.filename_to_tensors.items():
        # Not np.ascontiguousarray, which turns a scalar into a vector.
        part = {name: np.asarray(arrays[name], order="C") for name in names}
        path = folder / file
        path.touch()
        usual = stat.S_IMODE(path.stat().st_mode)
        save_file(part, path, metadata={"format": "np"})
        path.chmod(usual)  # the library renames a temporary file, which only its owner can read
    if parts.is_sharded:
        write_json(folder / INDEX, {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename})


@contextlib.contextmanager
def open_weights(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The open file of each array, by its name.

    Raises:
        OSError, ValueError, SafetensorError: the folder is damaged.
    """
    index, files = folder / INDEX, {"": WEIGHTS}
    if index.exists():
        if not isinstance(content := load_json(index), dict):
            raise ValueError(f"{INDEX} is not a JSON object")
        files = content.get("weight_map", {})
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{INDEX} has no weight_map of file names")
    for file in files.values():
        # An index may be somebody else's. A link is fine: the hub's copies have them.
        if (path := pathlib.PurePath(file)).is_absolute() or ".." in path.parts or not (folder / file).is_file():
            raise ValueError(f"{file} is no file of the folder")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(folder / file, framework="np")) for file in sorted({*files.values()})]
        yield {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (not a mapping)


def check_layers(folder: pathlib.Path, config: ModelConfig) -> None:
    """Checks that an export has as many layers as its config says, before a model of so many is traced.

    Raises:
        InputError: it has not, or is damaged.
    """
    shapes, pattern = _shapes(folder), max(1, len(config.pattern))
    # Stacked: an array has the same parameter of each repetition of the pattern.
    most = max((shape[0] for shape in shapes.values() if shape), default=0)
    for layers in (config.num_layers, config.get("encoder.num_layers") or 0):
        if layers > most * pattern or pattern > len(shapes):
            raise _damaged(folder, f"config.json has {layers:,} layers, and the weights have not")


def check_shapes(folder: pathlib.Path, params: Params, constants: Params) -> None:
    """Checks that an export has these arrays; raises as `check_layers` does."""
    shapes = _shapes(folder)
    for name, like in of_trained(params, constants).items():
        if shapes.get(name) != like.shape:
            raise _damaged(folder, f"{name} is {shapes.get(name, 'missing')}, expected {like.shape}")


def _shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """The shape of each array, without reading any."""
    try:
        with open_weights(folder) as file_of:
            return {name: tuple(file.get_slice(name).get_shape()) for name, file in file_of.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(folder, first_line(error)) from None


def _damaged(folder: pathlib.Path, why: str) -> InputError:
    return InputError.of([f"{folder} is damaged ({why}): export the run again"])


def of_trained(params: Params, constants: Params) -> dict[str, Any]:
    """All arrays of a model by their names in the file."""
    return flatten_dict(params | ({_CONSTANTS: constants} if constants else {}), sep=".")


def about(folder: pathlib.Path) -> dict[str, Any]:
    """Where an export comes from: run, step, hash of the config, facts and versions.

    Raises:
        OSError, ValueError: the folder is damaged.
    """
    content = load_json(folder / "config.json")
    made = content.get("flash_lm") if isinstance(content, dict) else None
    if not isinstance(made, dict):
        raise ValueError("config.json does not say what made the export")
    if wrong := [key for key, kind in _ABOUT.items() if type(made.get(key)) is not kind]:
        raise ValueError(f"config.json has no good {', '.join(wrong)}")
    check_facts(made["facts"])
    return made


def check_facts(facts: Any) -> None:
    """Raises ValueError if what a checkpoint or an export says of itself is missing or has wrong types."""
    if not isinstance(facts, dict) or "corpus" not in facts:
        raise ValueError("its facts name no corpus")
    if wrong := [key for key, kinds in _FACTS.items() if key in facts and not isinstance(facts[key], kinds)]:
        raise ValueError(f"its facts have a wrong {', '.join(wrong)}")


def read_trained(folder: pathlib.Path, params: Params, constants: Params) -> tuple[int, Params, Params, dict[str, Any]]:
    """Step, parameters, constants and facts of an export.

    Args:
        folder: folder of the export.
        params: shapes, dtypes and shardings of the parameters.
        constants: shapes, dtypes and shardings of the constants (random and not trained).

    Raises:
        Exception: of any kind, if the folder is damaged.
    """
    made = about(folder)
    with open_weights(folder) as file_of:
        read = {key: _placed(file_of[key], key, like) for key, like in of_trained(params, constants).items()}
    tree = unflatten_dict(read, sep=".")
    return made["step"], {k: x for k, x in tree.items() if k != _CONSTANTS}, tree.get(_CONSTANTS, {}), made["facts"]


def _placed(file: Any, key: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    array = file.get_tensor(key)
    if array.shape != like.shape or array.dtype != like.dtype:
        raise ValueError(f"{key} is {array.dtype}{list(array.shape)}, expected {like.dtype}{list(like.shape)}")
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
