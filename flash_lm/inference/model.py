"""A run's model: the parameters of a checkpoint, without optimizer and corpus.

`flash_lm.load` gives the same with the methods of a notebook, see `api.LoadedModel`.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from flash_lm.config.experiment import Config, parse
from flash_lm.config.model import DTYPES
from flash_lm.config.overrides import apply_overrides, check_path
from flash_lm.config.registry import CORPORA, TASKS
from flash_lm.data.conditioning import Conditioning
from flash_lm.data.tasks import Task
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.runs.labels import read_labels
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import RunName, run_name
from flash_lm.training.checkpoint_read import Facts
from flash_lm.training.export_folder import read_origin
from flash_lm.training.hub import hub_name
from flash_lm.training.load_weights import read_weights
from flash_lm.training.train_state import ModelFunction, Params

# Keys of `config.data` that select the text.
OF_A_TEXT = ("corpus", "path", "name", "config", "split", "text_column", "label_column", "pair_column")
OF_A_TEXT += ("streaming", "bigrams.length", "needle.length")
# Keys that change how it is read and computed, but no score beyond rounding.
_HARMLESS = ("data.cache_dir", "data.tokens_per_batch", "model.kernels", "model.quadratic.implementation")
_HARMLESS += ("model.state_dtype", "model.remat", "model.scan_layers", "train.loss_chunk")


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model: what decoding, scoring, export and the service need of a run.

    Attributes:
        step: the checkpoint's step.
        config: the complete config.
        tokenizer: the run's tokenizer.
        decode_params: the parameters, and the model with its random, untrained arrays.
        mesh: the mesh that holds the parameters.
        facts: facts saved with the checkpoint.
        run: the checkpoint's name.
        folder: the run's folder.
    """

    step: int
    config: Config
    tokenizer: Tokenizer
    decode_params: DecodeParams
    mesh: Mesh
    facts: Facts
    run: RunName
    folder: RunFolder

    def __repr__(self) -> str:
        """One line with the run, step, family, size and task."""
        label, count = self.config.model.label, self.model.parameter_count()
        return f"<{self.run}, step {self.step}: {label}, {count:,} parameters, {self.config.task}>"

    @property
    def model(self) -> ModelFunction:
        """The model without its parameters."""
        return self.decode_params.model

    @property
    def params(self) -> Params:
        """Nested dicts of arrays, stacked over the layers; a new copy of the layers once the model has decoded."""
        return self.decode_params.stacked

    @property
    def constants(self) -> Params:
        """Random arrays that are never trained, nested like `params`; empty for most families."""
        return self.model.constants

    @property
    def name(self) -> str:
        """The name of the run's folder, or of a model on the hub, for messages and results."""
        return hub_name(self.run.workdir) or self.run.workdir.name

    @property
    def task(self) -> Task:
        """The row of its task."""
        return TASKS[self.config.task]

    @property
    def conditioning(self) -> Conditioning:
        """How the model reads what is given."""
        return self.task.conditioning

    @property
    def writes(self) -> str | None:
        """What it writes: text, second lines, masks that are filled in and so on, see `Answers.written`."""
        return self.task.answers.written(CORPORA[self.config.data.corpus].answers)

    @property
    def longest_prompt(self) -> int | None:
        """Most tokens of a prompt, by the positions of the model or of its encoder; None: any number."""
        return self.conditioning.max_prompt_length(self.model.abstract.longest, self.config.model.max_length)

    @property
    def asking(self) -> dict[str, Any]:
        """What an `Engine` must know of how prompts are read."""
        return {"conditioning": self.conditioning, "begin": self.tokenizer.begin}

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels that it predicts; empty if it predicts words."""
        return read_labels(self.run.workdir)

    @property
    def imported_from(self) -> str | None:
        """The folder of another library's model that it was imported from, untrained since; None: it was trained."""
        return read_origin(self.run.workdir)["run"] if self.facts["corpus"] is None else None

    @functools.cached_property
    def known_ids(self) -> np.ndarray:
        """(tokenizer's vocabulary,) bool: ids that stand for text."""
        return self.tokenizer.bytes_per_token() > 0

    @functools.cached_property
    def characters_a_token(self) -> int:
        """The length of the longest token: n tokens are a text of at most n times this many characters."""
        texts = (self.tokenizer.token_bytes(i).decode(errors="replace") for i in range(self.tokenizer.vocab_size))
        return max(map(len, texts))

    def text_ids(self) -> np.ndarray:
        """(V,) bool: ids that stand for text."""
        return np.pad(self.known_ids, (0, self.config.model.vocab_size - len(self.known_ids)))

    def text_of(self, ids: Iterable[int]) -> str:
        """The text of tokens; special tokens have none, broken characters are replaced."""
        return b"".join(self.tokenizer.token_bytes(int(i)) for i in ids).decode(errors="replace")

    def encode(self, text: str, what: str = "prompt") -> np.ndarray:
        """Returns begin-of-text and the tokens of a text.

        Args:
            text: at least one character.
            what: the text's name, for the error message.

        Raises:
            InputError: the text is empty, or the tokenizer does not know a part of it.
        """
        if not text:
            raise InputError(f"the {what} is empty: give at least a word")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a byte of the command line that is not UTF-8
            raise InputError(f"the {what} is not UTF-8 text at character {error.start + 1}") from None
        (ids,) = self.tokenizer.encode([text])
        known = self.known_ids[ids]
        if not known.all():
            place = len(self.tokenizer.decode(ids[: int(known.argmin())]))
            rest = text[place : place + 20]
            raise InputError(f"the tokenizer of {self.name} does not know what begins with {rest!r} in the {what}")
        return np.concatenate([[self.tokenizer.begin], ids]).astype(np.int32)

    def encode_given(self, text: str) -> np.ndarray:
        """As `encode`, for a prompt: of a model of pairs, it is the first text, at whose end the second begins."""
        ids, tokenizer = self.encode(text), self.tokenizer
        if not self.config.data.pairs:
            return ids
        return self.conditioning.make_prompt(np.concatenate([ids, [tokenizer.end, tokenizer.begin]]).astype(np.int32))


def load_model(
    run: str | os.PathLike[str] | RunName,
    *,
    dtype: str | None = None,
    mesh_shape: tuple[int, ...] = (-1, 1, 1),
    overrides: Sequence[str] = (),
) -> TrainedModel:
    """Loads a checkpoint's parameters and its random, untrained arrays, without optimizer and corpus.

    Args:
        run: the checkpoint's name, such as runs/x or runs/x@best.
        dtype: dtype of parameters and computation; None: as trained.
        mesh_shape: devices along (data, fsdp, tensor); it may differ from that of training.
        overrides: words such as --config.data.path=… that do not change the model.

    Raises:
        InputError: there is no such run or checkpoint, an override changes the model, or the mesh does not fit.
    """
    name = run_name(run)
    folder = RunFolder(name.workdir)
    raw: Any = folder.config.copy_and_resolve_references()
    _override(raw, overrides)
    raw.update_from_flattened_dict({"mesh.shape": mesh_shape})
    saved_dtype = raw.model.param_dtype
    if dtype and saved_dtype in DTYPES:  # else `parse` says what is wrong with the run's own
        raw.update_from_flattened_dict({"model.dtype": dtype, "model.param_dtype": dtype})
    read = read_weights(name, folder, parse(raw), saved_dtype)
    params = jax.tree.map(lambda x: x.astype(read.config.model.param_dtype), read.params)
    decode_params = DecodeParams(read.model, params)
    return TrainedModel(read.step, read.config, read.tokenizer, decode_params, read.mesh, read.facts, name, folder)


def _override(raw: Any, overrides: Sequence[str]) -> None:
    """Applies overrides of the text to score, and of how it is read and computed."""
    of_a_text = [f"data.{key}" for key in (*OF_A_TEXT, "pack")]
    allowed = tuple(f"--config.{key}=" for key in (*of_a_text, *_HARMLESS))
    if trained := [word for word in overrides if word.startswith("--config.") and not word.startswith(allowed)]:
        raise InputError.of(
            f"{word} cannot be changed after training, or has a flag of its own: keys to change here are "
            f"{', '.join(of_a_text)} and {', '.join(_HARMLESS)}"
            for word in trained
        )
    apply_overrides(raw, list(overrides))
    check_path(raw, overrides)
