"""The compiled functions of decoding as files that any program with jax can run: `--format=stablehlo`.

start.stablehlo     params -> the state before the first token
prefill.stablehlo   params, state, tokens_BxL, lengths_B -> logits_BxV after each sequence's last token, and the state
step.stablehlo      params, state, tokens_B -> logits_BxV, and the state

Each is a `jax.export.Exported`, serialized: StableHLO with its calling convention. Parameters and states are dicts of
arrays by name, so the programs hold no weights. Shapes are fixed.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export as jax_export

from flash_lm.errors import InputError
from flash_lm.inference.model import TrainedModel
from flash_lm.layers.quadratic_core import compiled_by_xla
from flash_lm.models.decode_state import DecodeState
from flash_lm.training.train_state import ModelFunction

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
Arrays = dict[str, Any]


class Sizes(NamedTuple):
    """The shapes of the programs.

    Attributes:
        rows: B.
        piece: L, number of tokens of a prompt per call of `prefill`.
        capacity: largest sequence length, for states that grow; None: `model.max_length`.
    """

    rows: int = 1
    piece: int = 128
    capacity: int | None = None


def check_programs(trained: TrainedModel) -> None:
    """Raises InputError if a model does not generate token by token."""
    if not trained.task.answers.continues:
        raise InputError(f"{trained.run} does not generate text: --format=stablehlo is of causal models, omit it")
    if not trained.conditioning.scores_full_text:
        raise InputError(
            f"{trained.run} has task={trained.config.task}: --format=stablehlo is of models that read a prompt from "
            "left to right, omit it"
        )
    trained.model.abstract.check_decodable()


def write_programs(trained: TrainedModel, sizes: Sizes, folder: pathlib.Path) -> None:
    """Writes the programs into a folder.

    They are compiled by XLA alone, since the kernels' formats are not stable.
    """
    for name, exported in _programs(trained, sizes).items():
        (folder / f"{name}.stablehlo").write_bytes(exported.serialize())


def describe_programs(trained: TrainedModel, sizes: Sizes) -> dict[str, Any]:
    """The shapes and platforms of the programs, for config.json."""
    # The programs themselves say nothing of their meaning.
    model = trained.model.abstract
    return {
        "programs": ["start", "prefill", "step"],
        "platforms": [*PLATFORMS],
        "rows": sizes.rows,
        "prompt_tokens_at_a_time": sizes.piece,
        "most_tokens": _capacity(trained, sizes) if model.state_grows else model.longest,
        "vocab_size": trained.config.model.vocab_size,
    }


def _programs(trained: TrainedModel, sizes: Sizes) -> dict[str, jax_export.Exported]:
    """Exports the programs by name, with parameters and states as flat dicts."""
    # The model without kernels and libraries; parameters are arguments, and constants are part of the programs.
    config = compiled_by_xla(trained.config.model)
    model = ModelFunction(config, trained.config.seed).replace_constants(trained.model.constants)
    capacity = _capacity(trained, sizes)
    start = lambda bound: bound.init_state(sizes.rows, capacity)
    bind = lambda params: model.bind(unflatten_dict(params, sep="."))
    flat: Arrays = flatten_dict(trained.params, sep=".")
    shapes = lambda arrays: {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    params = shapes(flat)

    # The state as a dict: names are the paths of its leaves.
    empty = jax.eval_shape(lambda params: start(bind(params)), params)
    structure = jax.tree.structure(empty)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(empty)]

    def flatten_state(state: DecodeState) -> Arrays:
        return dict(zip(names, jax.tree.leaves(state), strict=True))

    def unflatten_state(state: Arrays) -> DecodeState:
        return jax.tree.unflatten(structure, [state[name] for name in names])

    def prefill(params: Arrays, state: Arrays, tokens_BxL: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, Arrays]:
        logits_BxV, state_after = bind(params).prefill_last(tokens_BxL, unflatten_state(state), lengths_B)
        return logits_BxV, flatten_state(state_after)

    def step(params: Arrays, state: Arrays, tokens_B: jax.Array) -> tuple[jax.Array, Arrays]:
        logits_BxV, state_after = bind(params).step(tokens_B, unflatten_state(state))
        return logits_BxV, flatten_state(state_after)

    # Shapes of the arguments; each function is lowered for all platforms.
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    states = shapes(flatten_state(empty))
    functions = {
        "start": (lambda params: flatten_state(start(bind(params))), ()),
        "prefill": (prefill, (states, ids(sizes.rows, sizes.piece), ids(sizes.rows))),
        "step": (step, (states, ids(sizes.rows))),
    }
    return {
        name: jax_export.export(jax.jit(function), platforms=PLATFORMS)(params, *arguments)
        for name, (function, arguments) in functions.items()
    }


def _capacity(trained: TrainedModel, sizes: Sizes) -> int:
    """The capacity of states that grow, within the positions of the model."""
    longest = trained.model.abstract.longest
    capacity = sizes.capacity or trained.config.model.max_length
    if longest is not None and capacity > longest:
        raise InputError(f"--capacity={capacity} is more than the {longest} positions of {trained.run}: lower it")
    return capacity
