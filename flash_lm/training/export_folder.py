"""The folder of an exported model: parameters as safetensors, with the config and the tokenizer that they need.

model.safetensors   parameters by path, `layers.sublayer_0.query.kernel`; `constants.…`: random and not trained; above
                    5 GB in several files, which model.safetensors.index.json lists
config.json         the keys that other tools expect, the origin of the export, and under `config` the run's config
tokenizer/          the exact tokenizer; tokenizer.json is the same one for Hugging Face's `tokenizers`
README.md           the model card
"""

import contextlib
import json
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flash_lm.config.addresses import is_remote
from flash_lm.config.model import ModelConfig
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import save_tokenizer
from flash_lm.errors import InputError, first_line
from flash_lm.runs.json_file import load_json
from flash_lm.runs.labels import write_labels
from flash_lm.runs.local_copy import fetch
from flash_lm.runs.provenance import config_hash, provenance
from flash_lm.runs.run_folder import INDEX, WEIGHTS
from flash_lm.runs.storage import upload_folder
from flash_lm.training.train_state import Params

_LARGEST_FILE = 5 * 10**9  # bytes, as the hub's own tools cut
_PART = "model{suffix}.safetensors"  # the suffix is -00001-of-00003, or empty if there is one file
_CONSTANTS = "constants"
_ORIGIN = {"run": str, "step": int, "config_hash": str, "facts": dict}
_FACTS = {
    "corpus": str | None,
    "tokenizer": str,
    "train_seconds": int | float,
    "code": dict,
    "microbatches": dict,
    "parent": dict,
    "teacher": dict,
    "checksums": dict,
}


@contextlib.contextmanager
def new_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to fill, and renames it to `out` at the end; after an error it is removed.

    In an object store the folder is uploaded at the end, and what makes it an export comes last.

    Raises:
        InputError: `out` cannot be written.
    """
    if is_remote(out):
        with tempfile.TemporaryDirectory() as folder:
            partial = pathlib.Path(folder)
            yield partial
            upload_folder(partial, out, INDEX if (partial / INDEX).exists() else WEIGHTS)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            partial = pathlib.Path(folder) / "new"
            partial.mkdir()
            yield partial
            os.rename(partial, out)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def write_export(
    out: pathlib.Path,
    arrays: Mapping[str, np.ndarray],
    config: Any,
    origin: Mapping[str, Any],
    tokenizer: Tokenizer,
    labels: Sequence[str] = (),
) -> None:
    """Writes the folder of a model that was made and not trained: completely or not at all.

    Args:
        out: the folder; must not exist yet.
        arrays: from `flatten_arrays`.
        config: the config, a nested dict.
        origin: the model that it was made from: run, step and facts.
        tokenizer: its tokenizer.
        labels: of a classifier.

    Raises:
        InputError: `out` cannot be written.
    """
    about = {"architectures": ["FlashLM"], "model_type": "flash_lm", "config": config}
    made = {"config_hash": config_hash(config), "exported_by": provenance(jax.devices()[0].device_kind)}
    with new_folder(out) as partial:
        write_weights(partial, arrays)
        write_json(partial / "config.json", about | {"flash_lm": dict(origin) | made})
        save_tokenizer(tokenizer, partial / "tokenizer")
        write_labels(partial, labels)


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes indented JSON."""
    path.write_text(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def write_weights(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name as safetensors, in files of at most 5 GB unless one array is larger.

    Arrays are made contiguous first: safetensors silently writes others wrong.
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
    """Opens the files of an export; yields the open file of each array, by the array's name.

    Raises:
        OSError, ValueError, SafetensorError: the folder is damaged.
    """
    # The names of the files: one, or those of the index.
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

    # Open each file once; it is memory-mapped, so nothing is read yet.
    with contextlib.ExitStack() as stack:
        paths = [fetch(folder / file) for file in sorted({*files.values()})]
        handles = [stack.enter_context(safe_open(path, framework="np")) for path in paths]
        yield {name: file for file in handles for name in file.keys()}  # noqa: SIM118 (not a mapping)


def check_layers(folder: pathlib.Path, config: ModelConfig) -> None:
    """Checks that an export has as many layers as its config says, before a model of that size is traced.

    Raises:
        InputError: it has fewer, or is damaged.
    """
    shapes, pattern = _read_shapes(folder), max(1, len(config.pattern))
    # Stacked: an array has the same parameter of each repetition of the pattern.
    most = max((shape[0] for shape in shapes.values() if shape), default=0)
    for layers in (config.num_layers, config.get("encoder.num_layers") or 0):
        if layers > most * pattern or pattern > len(shapes):
            raise _damage_error(folder, f"config.json has {layers:,} layers, and the weights have not")


def check_shapes(folder: pathlib.Path, params: Params, constants: Params) -> None:
    """Checks that an export has these arrays; raises as `check_layers` does."""
    shapes = _read_shapes(folder)
    for name, like in flatten_arrays(params, constants).items():
        if shapes.get(name) != like.shape:
            raise _damage_error(folder, f"{name} is {shapes.get(name, 'missing')}, expected {like.shape}")


def _read_shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays by name, from the files' headers."""
    try:
        with open_weights(folder) as file_of:
            return {name: tuple(file.get_slice(name).get_shape()) for name, file in file_of.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise _damage_error(folder, first_line(error)) from None


def _damage_error(folder: pathlib.Path, why: str) -> InputError:
    return InputError.of([f"{folder} is damaged ({why}): export the run again"])


def flatten_arrays(params: Params, constants: Params) -> dict[str, Any]:
    """Parameters and constants in one flat dict, by their names in the file."""
    return flatten_dict(params | ({_CONSTANTS: constants} if constants else {}), sep=".")


def read_origin(folder: pathlib.Path) -> dict[str, Any]:
    """The origin of an export, from its config.json: run, step, hash of the config, facts and versions.

    Raises:
        OSError, ValueError: the folder is damaged.
    """
    content = load_json(folder / "config.json")
    origin = content.get("flash_lm") if isinstance(content, dict) else None
    if not isinstance(origin, dict):
        raise ValueError("config.json does not say what made the export")
    if wrong := [key for key, kind in _ORIGIN.items() if type(origin.get(key)) is not kind]:
        raise ValueError(f"config.json has no good {', '.join(wrong)}")
    check_facts(origin["facts"])
    return origin


def check_facts(facts: Any) -> None:
    """Raises ValueError if the facts of a checkpoint or an export lack the corpus or have wrong types."""
    if not isinstance(facts, dict) or "corpus" not in facts:
        raise ValueError("its facts name no corpus")
    if wrong := [key for key, kinds in _FACTS.items() if key in facts and not isinstance(facts[key], kinds)]:
        raise ValueError(f"its facts have a wrong {', '.join(wrong)}")


def read_export(folder: pathlib.Path, params: Params, constants: Params) -> tuple[int, Params, Params, dict[str, Any]]:
    """Reads step, parameters, constants and facts of an export.

    Args:
        folder: folder of the export.
        params: shapes, dtypes and shardings of the parameters.
        constants: shapes, dtypes and shardings of the constants (random and not trained).

    Raises:
        Exception: of any kind, if the folder is damaged.
    """
    origin = read_origin(folder)
    with open_weights(folder) as file_of:
        arrays = {key: _load_array(file_of[key], key, like) for key, like in flatten_arrays(params, constants).items()}
    tree = unflatten_dict(arrays, sep=".")
    return origin["step"], {k: x for k, x in tree.items() if k != _CONSTANTS}, tree.get(_CONSTANTS, {}), origin["facts"]


def _load_array(file: Any, key: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads an array, checks its shape and dtype, and puts it on the devices with the sharding of `like`."""
    array = file.get_tensor(key)
    if array.shape != like.shape or array.dtype != like.dtype:
        raise ValueError(f"{key} is {array.dtype}{list(array.shape)}, expected {like.dtype}{list(like.shape)}")
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
