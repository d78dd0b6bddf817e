"""The model of a run: the parameters of a checkpoint, without optimizer and corpus."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from flash_lm.command import apply_overrides, check_path
from flash_lm.config import Config
from flash_lm.data.tokenizers import Tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.held_params import HeldParams
from flash_lm.run_name import RunName, run_name
from flash_lm.training import workdir as run_folder
from flash_lm.training.exported import about
from flash_lm.training.saved import Facts
from flash_lm.training.state import ModelFunction, Params
from flash_lm.training.weights import read_weights

# Keys of `config.data` that say which text is read.
OF_A_TEXT = ("corpus", "path", "name", "config", "split", "text_column", "streaming")
# And those that change how it is read and computed, and no score beyond rounding.
_HARMLESS = ("data.cache_dir", "data.tokens_per_batch", "model.kernels", "model.quadratic.implementation")
_HARMLESS += ("model.state_dtype", "model.remat", "model.scan_layers", "train.loss_chunk")


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What decoding and scoring need of a run.

    Attributes:
        step: of the checkpoint.
        config: complete.
        tokenizer: of the run.
        held: the parameters, and the model with what was drawn and not trained.
        mesh: on which they lie.
        facts: of the checkpoint.
        run: which it is.
    """

    step: int
    config: Config
    tokenizer: Tokenizer
    held: HeldParams
    mesh: Mesh
    facts: Facts
    run: RunName

    @property
    def model(self) -> ModelFunction:
        """Without its parameters."""
        return self.held.model

    @property
    def params(self) -> Params:
        """Stacked over the layers; a new copy of these once the model has decoded."""
        return self.held.stacked

    @property
    def name(self) -> str:
        """Of the run's folder, for messages."""
        return self.run.workdir.name

    @property
    def imported_from(self) -> str | None:
        """The folder of another library's model that it was read from and not trained since; None: it was trained."""
        return about(self.run.workdir)["run"] if self.facts["corpus"] is None else None

    @functools.cached_property
    def known_ids(self) -> np.ndarray:
        """(words of the tokenizer,) bool: ids that stand for text."""
        return self.tokenizer.bytes_per_token() > 0

    @functools.cached_property
    def characters_a_token(self) -> int:
        """Of the longest one: so many times a number of tokens is the longest text that they can stand for."""
        texts = (self.tokenizer.token_bytes(i).decode(errors="replace") for i in range(self.tokenizer.vocab_size))
        return max(map(len, texts))

    def text_ids(self) -> np.ndarray:
        """(V,) bool: ids that stand for text."""
        return np.pad(self.known_ids, (0, self.config.model.vocab_size - len(self.known_ids)))

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
        known = self.known_ids[ids]
        if not known.all():
            place = len(self.tokenizer.decode(ids[: int(known.argmin())]))
            rest = text[place : place + 20]
            raise InputError(f"the tokenizer of {self.name} does not know what begins with {rest!r} in the {what}")
        return np.concatenate([[self.tokenizer.begin], ids]).astype(np.int32)


def load_model(
    run: str | os.PathLike[str] | RunName,
    *,
    dtype: str | None = None,
    mesh_shape: tuple[int, ...] = (-1, 1, 1),
    overrides: Sequence[str] = (),
) -> TrainedModel:
    """Loads the parameters of a checkpoint, and what is drawn and not trained, without optimizer and corpus.

    Args:
        run: its name, such as runs/x or runs/x@best.
        dtype: of parameters and computation; None: as it was trained.
        mesh_shape: devices along (data, fsdp, tensor), whatever it was trained on.
        overrides: words such as --config.data.path=… that change what of the config does not change the model.

    Raises:
        InputError: no run, no such checkpoint, an override of what was trained, or a mesh that does not fit.
    """
    name = run_name(run)
    raw: Any = run_folder.read_config(name.workdir)
    _override(raw, overrides)
    raw.update_from_flattened_dict({"mesh.shape": mesh_shape})
    saved_dtype = raw.model.param_dtype
    if dtype:
        raw.update_from_flattened_dict({"model.dtype": dtype, "model.param_dtype": dtype})
    read = read_weights(name, raw, saved_dtype)
    params = jax.tree.map(lambda x: x.astype(read.config.model.param_dtype), read.params)
    held = HeldParams(read.model, params)
    return TrainedModel(read.step, read.config, read.tokenizer, held, read.mesh, read.facts, name)


def _override(raw: Any, overrides: Sequence[str]) -> None:
    """Of a text to be scored, and of how it is read and computed."""
    of_a_text = [f"data.{key}" for key in (*OF_A_TEXT, "pack")]
    allowed = tuple(f"--config.{key}=" for key in (*of_a_text, *_HARMLESS))
    if trained := [word for word in overrides if word.startswith("--config.") and not word.startswith(allowed)]:
        raise InputError.of(
            f"{word} is of the training, or has a flag of its own: here change {', '.join(of_a_text)} "
            f"or {', '.join(_HARMLESS)}"
            for word in trained
        )
    apply_overrides(raw, list(overrides))
    check_path(raw, overrides)
