"""Converts a model to another family, as an exported model for every command; `models/conversion.py` has the rules."""

import os
import pathlib
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict

from flash_lm.config.experiment import parse
from flash_lm.config.keys import keys
from flash_lm.config.model import ModelConfig
from flash_lm.errors import InputError
from flash_lm.families.family import complete, layer_configs, unused_keys
from flash_lm.inference.model import load_model
from flash_lm.models.conversion import Conversion, convert
from flash_lm.runs.hosts import fetch_array, gather_from_hosts, is_first
from flash_lm.runs.run_name import RunName
from flash_lm.runs.storage import reach
from flash_lm.training.checkpoint_read import identity
from flash_lm.training.export_folder import flatten_arrays, write_export
from flash_lm.training.resolve import fill_from_corpus
from flash_lm.training.train_state import ModelFunction


class Converted(NamedTuple):
    """A converted model: its config and its parameters, with the report."""

    config: ModelConfig
    conversion: Conversion


def convert_model(
    name: RunName, raw: Any, given: Collection[str], out: pathlib.Path, mesh_shape: tuple[int, ...] = (-1, 1, 1)
) -> Converted:
    """Converts a model to the family of another config, and writes it as an export.

    Args:
        name: the name of a checkpoint or of an exported model.
        raw: the config of its run with the keys that the user gave; open keys are filled in.
        given: the names of these keys, such as model.family.
        out: the folder to write; must not exist yet.
        mesh_shape: devices along (data, fsdp, tensor) for reading the weights.

    Raises:
        InputError: there is no such model, the folder exists, the config is wrong, or the model cannot be converted to
            it.
    """
    if gather_from_hosts(reach(out).exists() or os.path.lexists(out))[0]:
        raise InputError(f"--out={out} already exists: give a new folder")
    trained = load_model(name, mesh_shape=mesh_shape)
    # The target's config and its initial parameters; then all parameters on the host.
    raw = fill_from_source(raw, trained.config.model, given)
    config = fill_from_corpus(parse(raw), trained.tokenizer, trained.labels).model
    function = ModelFunction(config, raw.seed)
    params = jax.tree.map(fetch_array, trained.params)
    conversion = convert(params, trained.config.model, config, jax.jit(function.init)())
    if not is_first():
        return Converted(config, conversion)

    # The export: it was trained on what the source was trained on, and its parent is the source.
    parent = identity(trained.run, trained.folder, trained.step, trained.params, trained.facts)
    facts = {key: trained.facts[key] for key in ("corpus", "tokenizer")} | {"train_seconds": 0.0, "parent": parent}
    origin = {"run": str(trained.run), "step": 0, "facts": facts}
    arrays = flatten_arrays(conversion.params, function.constants)
    write_export(out, arrays, raw.to_dict(), origin, trained.tokenizer, trained.labels)
    return Converted(config, conversion)


def fill_from_source(raw: Any, source: ModelConfig, given: Collection[str]) -> Any:
    """The config of a converted model: where it would differ by the defaults of its family, it is as the source.

    Args:
        raw: the config of the source's run with the keys that the user gave.
        source: the complete config of the source.
        given: the names of these keys, such as model.mlp_dim; an open one among them keeps its family's default.

    Raises:
        InputError: the config is wrong, or its keys do not go together.
    """
    raw = raw.copy_and_resolve_references()
    raw.model.vocab_size = source.vocab_size
    if "model.family" in given and "model.pattern" not in given:
        raw.model.pattern = ()  # all layers are to be of this family
    unread = unused_keys(raw.model.pattern or (raw.model.family,))
    open_keys = [one.name for one in keys(ModelConfig, "model.") if one.about["open"] and one.name not in given]
    # Keys of the source that no layer of the target reads, such as the number of its heads of keys.
    raw.update_from_flattened_dict({name: None for name in open_keys if name in unread})
    # Keys whose defaults differ, if layers of both read them, and those of the source all have the same value.
    target, unread = complete(parse(raw).model), unread | unused_keys(source.families)
    left_open = {name for name, value in flatten_dict(raw.to_dict(), sep=".").items() if value is None}
    for name in open_keys:
        theirs, ours = (_values(config, name.removeprefix("model.")) for config in (source, target))
        if name in left_open - unread and theirs != ours and len(theirs) == 1:
            raw.update_from_flattened_dict({name: theirs[0]})
    return raw


def describe(source: RunName, out: pathlib.Path, converted: Converted) -> str:
    """Lines on what was converted, with the names of parameters that are new and of those that were left out."""
    config, (params, report) = converted.config, converted.conversion
    count = sum(x.size for x in jax.tree.leaves(params))
    counts = ", ".join(f"{len(names)} {kind.replace('_', ' ')}" for kind, names in report._asdict().items())
    lines = [f"{out}: {config.label} from {source}, {count:,} parameters; {counts}"]
    for kind in ("new", "left_out"):
        # A line for all parameters of the same layers.
        by_layers: dict[tuple[int, ...], list[str]] = {}
        for name, layers in getattr(report, kind).items():
            by_layers.setdefault(layers if len(layers) < config.num_layers else (), []).append(name)
        for layers, names in by_layers.items():
            where = f" in layers {', '.join(map(str, layers))}" if layers else ""
            lines.append(f"{kind.replace('_', ' ')}{where}: {', '.join(names)}")
    return "\n".join(lines)


def _values(config: ModelConfig, key: str) -> list[Any]:
    """The values of a key in the layers of a model, each once, without open ones."""
    return [x for x in dict.fromkeys(layer.get(key) for layer in layer_configs(config)) if x is not None]
