"""The model of a run: its newest parameters, without optimizer and corpus."""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from flash_lm.config import Config, parse
from flash_lm.data.tokenizers import Tokenizer, load_tokenizer
from flash_lm.errors import InputError
from flash_lm.models.families import complete
from flash_lm.training import workdir as run_folder
from flash_lm.training.checkpoint import open_checkpoints
from flash_lm.training.experiment import vocabulary
from flash_lm.training.sharding import make_mesh, param_shardings
from flash_lm.training.state import ModelFunction, Params


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What decoding needs of a run; `step`: of the checkpoint."""

    name: str
    step: int
    config: Config
    tokenizer: Tokenizer
    model: ModelFunction
    params: Params
    mesh: Mesh

    def text_ids(self) -> np.ndarray:
        """(V,) bool: ids that stand for text."""
        known = self.tokenizer.bytes_per_token() > 0
        return np.pad(known, (0, self.config.model.vocab_size - len(known)))

    def text_of(self, ids: Iterable[int]) -> str:
        """The text of tokens; special ones have none, broken characters are replaced."""
        return b"".join(self.tokenizer.token_bytes(int(i)) for i in ids).decode(errors="replace")

    def encode(self, text: str, what: str = "prompt") -> np.ndarray:
        """Begin-of-text and the tokens of a text.

        Args:
            text: of one character or more.
            what: it is, for the error.

        Raises:
            InputError: no text, or a part of it that the tokenizer does not know.
        """
        if not text:
            raise InputError(f"the {what} is empty: give it a word")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a byte of the command line that is no UTF-8
            raise InputError(f"the {what} is no UTF-8 text at character {error.start + 1}") from None
        (ids,) = self.tokenizer.encode([text])
        known = [bool(self.tokenizer.token_bytes(int(i))) for i in ids]
        if not all(known):
            place = len(self.tokenizer.decode(ids[: known.index(False)]))
            rest = text[place : place + 20]
            raise InputError(f"the tokenizer of {self.name} does not know what begins with {rest!r} in the {what}")
        return np.concatenate([[self.tokenizer.begin], ids]).astype(np.int32)


def load_model(
    workdir: pathlib.Path, *, dtype: str | None = None, mesh_shape: tuple[int, ...] = (-1, 1, 1)
) -> TrainedModel:
    """Loads the newest checkpoint of a run.

    Args:
        workdir: of the run.
        dtype: of parameters and computation; None: as it was trained.
        mesh_shape: devices along (data, fsdp, tensor), whatever it was trained on.

    Raises:
        InputError: no run, no checkpoint, or a mesh that does not fit.
    """
    raw: Any = run_folder.read_config(workdir)
    raw.update_from_flattened_dict({"mesh.shape": mesh_shape})
    saved_dtype = jnp.dtype(raw.model.param_dtype)
    if dtype:
        raw.update_from_flattened_dict({"model.dtype": dtype, "model.param_dtype": dtype})
    config, tokenizer = parse(raw), load_tokenizer(workdir / "tokenizer")
    model_config = complete(dataclasses.replace(config.model, vocab_size=vocabulary(config, tokenizer)))
    config = dataclasses.replace(config, model=model_config)
    model, mesh = ModelFunction(model_config, config.seed), make_mesh(config.mesh)
    abstract = jax.eval_shape(model.init)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, saved_dtype, sharding=s),
        abstract,
        param_shardings(abstract, model.traits().matrix, config.mesh, mesh),
    )
    with open_checkpoints(workdir) as checkpoints:
        step, params = checkpoints.restore_newest_params(abstract)
    params = jax.tree.map(lambda x: x.astype(model_config.param_dtype), params)
    return TrainedModel(workdir.name, step, config, tokenizer, model, params, mesh)
