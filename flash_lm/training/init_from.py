"""The first parameters of a run that starts from another model: taken by name, or newly initialised."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flash_lm.config.experiment import Config, parse
from flash_lm.config.registry import CORPORA
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.errors import InputError
from flash_lm.layers.parameter import is_stacked, name_of
from flash_lm.models.classifier import CLASSIFIER
from flash_lm.runs.labels import read_labels
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training import checkpoint_read
from flash_lm.training.hub import downloaded
from flash_lm.training.load_weights import read_weights
from flash_lm.training.schedule_free import begun_with
from flash_lm.training.setup import Experiment
from flash_lm.training.train_state import TrainState

# Keys of the machine, not of the model.
_HOW = ("kernels", "quadratic.implementation", "remat", "scan_layers")


def tokenizer_of(name: str, config: Any) -> Tokenizer | None:
    """The tokenizer that a run on text must share with the model it starts from.

    None: the corpus has examples and its own tokenizer; `initial_state` compares the two.

    Raises:
        InputError: no such model, or the config names another kind of tokenizer.
    """
    folder, data = downloaded(name).workdir, config.data
    theirs, tokenizer = RunFolder(folder).config.data, load_tokenizer(folder / "tokenizer")
    if data.corpus in CORPORA and CORPORA[data.corpus].examples:
        return None
    there, here = {"tokenizer": tokenizer.kind}, {"tokenizer": data.tokenizer}
    if tokenizer.kind == "sentencepiece":
        key = "vocab_size" if data.tokenizer_path is None else "tokenizer_path"
        there[key], here[key] = theirs.get(key), data.get(key)
    if there != here:
        both = "; ".join(f"data.{key}={there[key]} there, {here[key]} here" for key in there if there[key] != here[key])
        raise InputError(f"train.init_from={name} has another vocabulary ({both}): use the same values here")
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Initial:
    """The first state of a run that starts from another model.

    Attributes:
        state: the state, with the other model's parameters.
        parent: what the run records of the other model.
        message: one sentence on what was taken and what was not.
    """

    state: TrainState
    parent: dict[str, Any]
    message: str


def initial_state(experiment: Experiment, drawn: TrainState) -> Initial:
    """The first state of a run whose config names train.init_from.

    Args:
        experiment: the run's experiment.
        drawn: the newly initialised state; its parameters are kept where the other model has none of that name.

    Raises:
        InputError: no such model, another family or vocabulary, or parameters of other shapes, which are all listed.
    """
    config = experiment.config
    given = config.train.init_from
    name = downloaded(given)
    run = RunFolder(name.workdir)
    raw = run.config.copy_and_resolve_references()
    if (family := raw.model.family) != config.model.family:  # parameters may fit, and mean something else
        raise InputError(
            f"train.init_from={given} is of the family {family}, and this run of {config.model.family}: choose a model "
            f"of the same family, or set --config.model.family={family}"
        )
    raw.update_from_flattened_dict({"mesh.shape": config.mesh.shape, "mesh.rules": config.mesh.rules})
    raw.update_from_flattened_dict({f"model.{key}": config.model.get(key) for key in _HOW})
    theirs = read_weights(name, run, parse(raw), raw.model.param_dtype)
    if theirs.tokenizer.fingerprint != experiment.corpus.tokenizer.fingerprint:
        raise InputError(
            f"train.init_from={given} has another vocabulary than the corpus {experiment.corpus.name}: choose a model "
            f"with the same tokenizer"
        )
    there = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(theirs.params)}
    if read_labels(name.workdir) != experiment.corpus.labels:  # an output means another label
        there = {key: x for key, x in there.items() if not key.startswith(CLASSIFIER)}
    taken, new, wrong = [], [], {}

    def first(path: Any, own: jax.Array, has_positions: bool) -> jax.Array:
        key = name_of(path)
        if key not in there:
            new.append(key)
            return own
        x = there[key]
        if has_positions and x.shape != own.shape and config.train.init_positions == "interpolate":
            x = _interpolated(x, own.shape, axis=int(is_stacked(path)))
        if x.shape != own.shape:
            wrong[key] = f"{key} {list(x.shape)} there, {list(own.shape)} here"
            return own
        taken.append(key)
        return jax.device_put(x.astype(own.dtype), own.sharding)

    params = jax.tree_util.tree_map_with_path(first, drawn.params, experiment.model.traits().positions)
    left_out = sorted(there.keys() - {*taken, *wrong})
    parts = {"initialised": new, "of another shape": wrong.values(), "left out": left_out}
    message = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)
    message = f"train.init_from={given}: {len(taken)} parameters taken" + (f"; {message}" if message else "")
    if wrong:
        raise InputError(f"{message}: set the model's keys to the same values{_advice(config, theirs.config)}")
    constants = drawn.constants
    if jax.tree.map(jnp.shape, theirs.model.constants) == jax.tree.map(jnp.shape, constants):
        put = lambda x, own: jax.device_put(jnp.asarray(x, own.dtype), own.sharding)
        constants = jax.tree.map(put, theirs.model.constants, constants)
    ema = None if drawn.ema is None else jax.tree.map(jnp.copy, params)
    opt_state = begun_with(drawn.opt_state, params)
    state = dataclasses.replace(drawn, params=params, constants=constants, ema=ema, opt_state=opt_state)
    return Initial(state, checkpoint_read.identity(name, run, theirs.step, theirs.params, theirs.facts), message)


def _advice(config: Config, theirs: Config) -> str:
    if config.model.max_length == theirs.model.max_length:
        return ""
    return (
        f" (model.max_length={theirs.model.max_length} there, {config.model.max_length} here: only positions can be "
        f"resized, with train.init_positions=interpolate)"
    )


def _interpolated(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Interpolates linearly along the positions; the first and the last are unchanged."""
    if x.shape[:axis] + x.shape[axis + 1 :] != shape[:axis] + shape[axis + 1 :]:
        return x
    place = jnp.linspace(0, x.shape[axis] - 1, shape[axis])
    low = jnp.floor(place).astype(jnp.int32)
    part = (place - low).reshape(*[1] * axis, -1, *[1] * (x.ndim - axis - 1))
    left, right = (jnp.take(x, i.clip(0, x.shape[axis] - 1), axis=axis).astype(jnp.float32) for i in (low, low + 1))
    return left * (1 - part) + right * part
