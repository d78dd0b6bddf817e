"""Loads the weights of a checkpoint or an exported model, with the config and the tokenizer that they need."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flash_lm.config.experiment import Config, parse
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.runs.labels import read_labels
from flash_lm.runs.run_folder import RunFolder, is_export
from flash_lm.runs.run_name import RunName
from flash_lm.training.checkpoint_read import Facts, check_tokenizer, restore_params
from flash_lm.training.export_folder import check_layers, check_shapes
from flash_lm.training.resolve import fill_from_corpus
from flash_lm.training.sharding import make_mesh, param_shardings
from flash_lm.training.train_state import ModelFunction, Params

# Keys that depend on the machine and not on the model: a run keeps its own values.
_MACHINE_KEYS = ("kernels", "quadratic.implementation", "remat", "scan_layers")


@dataclasses.dataclass(frozen=True)
class Weights:
    """Trained weights, without optimizer and corpus.

    Attributes:
        step: step of the checkpoint.
        config: the complete config.
        tokenizer: the run's tokenizer.
        model: the model, with its constants.
        params: parameters of the checkpoint.
        mesh: mesh of the parameters.
        facts: facts of the checkpoint.
    """

    step: int
    config: Config
    tokenizer: Tokenizer
    model: ModelFunction
    params: Params
    mesh: Mesh
    facts: Facts


def config_on_mesh(run: RunFolder, config: Config) -> tuple[Config, str]:
    """The checked config of another model's folder on the mesh of a run, with the run's kernels.

    Args:
        run: folder of the other model.
        config: the run's config.

    Returns:
        The config, and the dtype of the parameters in the folder.
    """
    raw = run.config.copy_and_resolve_references()
    raw.update_from_flattened_dict({"mesh.shape": config.mesh.shape, "mesh.rules": config.mesh.rules})
    raw.update_from_flattened_dict({f"model.{key}": config.model.get(key) for key in _MACHINE_KEYS})
    return parse(raw), raw.model.param_dtype


def model_without_weights(
    name: RunName, config: Config, tokenizer: Tokenizer, **settings: Any
) -> tuple[Config, ModelFunction]:
    """The complete config of a folder, and its model; its parameters are not read.

    Args:
        name: name of the checkpoint or export.
        config: its checked config.
        tokenizer: its tokenizer.
        settings: further arguments of `ModelFunction`.

    Raises:
        InputError: an export's config and its arrays do not fit each other.
    """
    # An export's config may be somebody else's: its shapes are checked before anything large is built.
    check: dict[str, Any] = {}
    if is_export(name.workdir):
        check_layers(name.workdir, config.model)
        check = {"check": partial(check_shapes, name.workdir)}
    config = fill_from_corpus(config, tokenizer, read_labels(name.workdir))
    return config, ModelFunction(config.model, config.seed, **check, **settings)


def read_weights(name: RunName, run: RunFolder, config: Config, saved_dtype: str) -> Weights:
    """Reads weights onto the mesh of a config.

    Args:
        name: name of the checkpoint.
        run: its folder.
        config: the run's checked config, with any changes that are allowed.
        saved_dtype: dtype of the parameters in the checkpoint.

    Raises:
        InputError: no such checkpoint, or a mesh that does not fit.
    """
    # The model and its mesh, without parameters.
    tokenizer = load_tokenizer(name.workdir / "tokenizer")
    config, model = model_without_weights(name, config, tokenizer)
    mesh = make_mesh(config.mesh)
    replicated, dtype = NamedSharding(mesh, PartitionSpec()), jnp.dtype(saved_dtype)

    # Shapes, dtypes and shardings to restore into; constants are small, and replicated.
    abstract = jax.eval_shape(model.init)
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding),
        abstract,
        param_shardings(abstract, model.traits().matrix, config.mesh, mesh),
    )
    abstract_constants = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), model.constants
    )
    step, params, constants, facts = restore_params(name, run, abstract, abstract_constants)
    check_tokenizer(facts, tokenizer)
    return Weights(step, config, tokenizer, model.replace_constants(jax.device_get(constants)), params, mesh, facts)
