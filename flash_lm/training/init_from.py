"""`train.init_from`: copies parameters from another model by name, and initialises the rest."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flash_lm.config.experiment import Config
from flash_lm.config.registry import CORPORA
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.errors import InputError
from flash_lm.layers.parameter import is_stacked, parameter_name
from flash_lm.models.classifier import CLASSIFIER
from flash_lm.runs.labels import read_labels
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training import checkpoint_read
from flash_lm.training.hub import download
from flash_lm.training.load_weights import config_on_mesh, read_weights
from flash_lm.training.schedule_free import reset_iterate
from flash_lm.training.setup import Experiment
from flash_lm.training.train_state import TrainState


def parent_tokenizer(name: str, config: Any) -> Tokenizer | None:
    """The tokenizer of the model that a run on text starts from, which both must share.

    None: the corpus consists of examples and has its own tokenizer; `initial_state` compares the two. Chats and
    needles are examples that are written with the model's.

    Raises:
        InputError: no such model, or the config names another kind of tokenizer.
    """
    # Compare the keys that define a vocabulary: the kind, and for SentencePiece its size or file.
    folder, data = download(name).workdir, config.data
    parent_data, tokenizer = RunFolder(folder).config.data, load_tokenizer(folder / "tokenizer")
    kind = CORPORA.get(data.corpus)
    if kind and kind.examples and not kind.uses_parent_tokenizer:
        return None
    if kind and kind.tokenizer:  # without a parent it would have this one, and the config need not name another
        return tokenizer
    parent_keys, run_keys = {"tokenizer": tokenizer.kind}, {"tokenizer": data.tokenizer}
    if tokenizer.kind == "sentencepiece":
        key = "vocab_size" if data.tokenizer_path is None else "tokenizer_path"
        parent_keys[key], run_keys[key] = parent_data.get(key), data.get(key)
    if parent_keys != run_keys:
        differences = "; ".join(
            f"data.{key}={parent_keys[key]} there, {run_keys[key]} here"
            for key in parent_keys
            if parent_keys[key] != run_keys[key]
        )
        raise InputError(f"train.init_from={name} has another vocabulary ({differences}): use the same values here")
    return tokenizer


@dataclasses.dataclass(frozen=True)
class InitialState:
    """The first state of a run that starts from another model.

    Attributes:
        state: the state, with the other model's parameters.
        parent: the record of the other model for the run's facts.
        message: one sentence on which parameters were copied and which were not.
    """

    state: TrainState
    parent: dict[str, Any]
    message: str


def initial_state(experiment: Experiment, fresh: TrainState) -> InitialState:
    """The first state of a run with train.init_from.

    Args:
        experiment: the run's experiment.
        fresh: the newly initialised state; its parameters are kept where the other model has none of that name.

    Raises:
        InputError: no such model, another family or vocabulary, or parameters of other shapes, which are all listed.
    """
    # Read the other model onto this run's mesh, with this run's kernels.
    config = experiment.config
    source = config.train.init_from
    name = download(source)
    run = RunFolder(name.workdir)
    if (family := run.config.model.family) != config.model.family:  # parameters may fit, and mean something else
        raise InputError(
            f"train.init_from={source} is of the family {family}, and this run of {config.model.family}: choose a "
            f"model of the same family, or set --config.model.family={family}"
        )
    parent = read_weights(name, run, *config_on_mesh(run, config))
    if parent.tokenizer.fingerprint != experiment.corpus.tokenizer.fingerprint:
        raise InputError(
            f"train.init_from={source} has another vocabulary than the corpus {experiment.corpus.name}: choose a model "
            f"with the same tokenizer"
        )

    # Copy each parameter that the other model has, resized along the positions if the config asks for that.
    parent_params = {parameter_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(parent.params)}
    if read_labels(name.workdir) != experiment.corpus.labels:  # an output means another label
        parent_params = {key: x for key, x in parent_params.items() if not key.startswith(CLASSIFIER)}
    copied, initialised, mismatched = [], [], {}

    def copy_or_keep(path: Any, fresh_x: jax.Array, has_positions: bool) -> jax.Array:
        key = parameter_name(path)
        if key not in parent_params:
            initialised.append(key)
            return fresh_x
        x = parent_params[key]
        if has_positions and x.shape != fresh_x.shape and config.train.init_positions == "interpolate":
            x = _interpolate_positions(x, fresh_x.shape, axis=int(is_stacked(path)))
        if x.shape != fresh_x.shape:
            mismatched[key] = f"{key} {list(x.shape)} there, {list(fresh_x.shape)} here"
            return fresh_x
        copied.append(key)
        return jax.device_put(x.astype(fresh_x.dtype), fresh_x.sharding)

    params = jax.tree_util.tree_map_with_path(copy_or_keep, fresh.params, experiment.model.traits().positions)
    unused = sorted(parent_params.keys() - {*copied, *mismatched})
    parts = {"initialised": initialised, "of another shape": mismatched.values(), "left out": unused}
    # One message on all parameters; the shapes that do not match are listed together.
    message = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)
    message = f"train.init_from={source}: {len(copied)} parameters taken" + (f"; {message}" if message else "")
    if mismatched:
        raise InputError(f"{message}: set the model's keys to the same values{_advice(config, parent.config)}")

    # Random arrays go with the parameters that were trained with them.
    constants = fresh.constants
    if jax.tree.map(jnp.shape, parent.model.constants) == jax.tree.map(jnp.shape, constants):
        to_device = lambda x, fresh_x: jax.device_put(jnp.asarray(x, fresh_x.dtype), fresh_x.sharding)
        inherited = experiment.model.replace_constants(parent.model.constants).constants
        constants = jax.tree.map(to_device, inherited, constants)

    # The averages start at the copied parameters.
    ema = None if fresh.ema is None else jax.tree.map(jnp.copy, params)
    opt_state = reset_iterate(fresh.opt_state, params)
    state = dataclasses.replace(fresh, params=params, constants=constants, ema=ema, opt_state=opt_state)
    return InitialState(state, checkpoint_read.identity(name, run, parent.step, parent.params, parent.facts), message)


def _advice(config: Config, parent: Config) -> str:
    if config.model.max_length == parent.model.max_length:
        return ""
    return (
        f" (model.max_length={parent.model.max_length} there, {config.model.max_length} here: only positions can be "
        f"resized, with train.init_positions=interpolate)"
    )


def _interpolate_positions(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Interpolates linearly along the positions; the first and the last are unchanged."""
    if x.shape[:axis] + x.shape[axis + 1 :] != shape[:axis] + shape[axis + 1 :]:
        return x
    positions = jnp.linspace(0, x.shape[axis] - 1, shape[axis])
    low = jnp.floor(positions).astype(jnp.int32)
    fraction = (positions - low).reshape(*[1] * axis, -1, *[1] * (x.ndim - axis - 1))
    left, right = (jnp.take(x, i.clip(0, x.shape[axis] - 1), axis=axis).astype(jnp.float32) for i in (low, low + 1))
    return left * (1 - fraction) + right * fraction
