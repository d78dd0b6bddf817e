"""The weights of a checkpoint or an exported model, with the config and the tokenizer that they need."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flash_lm.config.experiment import Config
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.runs.labels import read_labels
from flash_lm.runs.run_folder import RunFolder, is_export
from flash_lm.runs.run_name import RunName
from flash_lm.training.checkpoint_read import Facts, check_tokenizer, restore_params
from flash_lm.training.export_folder import check_layers, check_shapes
from flash_lm.training.resolve import close
from flash_lm.training.sharding import make_mesh, param_shardings
from flash_lm.training.train_state import ModelFunction, Params


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
    check: dict[str, Any] = {}
    if is_export(name.workdir):  # the config may be somebody else's: nothing large is built for it
        check_layers(name.workdir, config.model)
        check = {"check": partial(check_shapes, name.workdir)}
    tokenizer = load_tokenizer(name.workdir / "tokenizer")
    config = close(config, tokenizer, read_labels(name.workdir))
    model, mesh = ModelFunction(config.model, config.seed, **check), make_mesh(config.mesh)
    everywhere, dtype = NamedSharding(mesh, PartitionSpec()), jnp.dtype(saved_dtype)
    abstract = jax.eval_shape(model.init)
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding),
        abstract,
        param_shardings(abstract, model.traits().matrix, config.mesh, mesh),
    )
    drawn = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), model.constants)
    step, params, constants, facts = restore_params(name, run, abstract, drawn)
    check_tokenizer(facts, tokenizer)
    return Weights(step, config, tokenizer, model.with_constants(constants), params, mesh, facts)
