"""`TrainedModel`: the parameters, config and tokenizer of a checkpoint, without optimizer and corpus.

`flash_lm.load` returns its subclass for interactive use, see `api.LoadedModel`.
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
from flash_lm.config.overrides import apply_overrides
from flash_lm.config.registry import CORPORA, TASKS
from flash_lm.data.chat_encoder import ChatEncoder
from flash_lm.data.conditioning import Conditioning
from flash_lm.data.corpus_of_path import fit_corpus
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
TEXT_KEYS = ("corpus", "path", "name", "config", "split", "text_column", "label_column", "pair_column")
TEXT_KEYS += ("streaming", "bigrams.length", "needle.length")
# Keys that change reading and computation, but scores only by rounding.
_PERFORMANCE_KEYS = ("data.cache_dir", "data.tokens_per_batch", "model.kernels", "model.quadratic.implementation")
_PERFORMANCE_KEYS += ("model.state_dtype", "model.remat", "model.scan_layers", "train.loss_chunk")


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model, for decoding, scoring, export and the service.

    Attributes:
        step: the checkpoint's step.
        config: the complete config.
        tokenizer: the run's tokenizer.
        decode_params: the parameters, and the model with its constants (random and not trained).
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
        """How the model reads its prompt."""
        return self.task.conditioning

    @property
    def writes(self) -> str | None:
        """The kind of its output: text, couplets, images, fill_in, label, …, see `Answers.written`."""
        return self.task.answers.written(CORPORA[self.config.data.corpus].answers)

    @property
    def longest_prompt(self) -> int | None:
        """Largest prompt in tokens, from the positions of the model or of its encoder; None: any."""
        return self.conditioning.max_prompt_length(self.model.abstract.longest, self.config.model.max_length)

    @property
    def engine_options(self) -> dict[str, Any]:
        """The arguments of an `Engine` that say how prompts are read."""
        return {"conditioning": self.conditioning, "begin": self.tokenizer.begin}

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels that it predicts; empty if it predicts words."""
        return read_labels(self.run.workdir)

    @property
    def imported_from(self) -> str | None:
        """The folder of an imported model of another library; None: it was trained by flash_lm."""
        return read_origin(self.run.workdir)["run"] if self.facts["corpus"] is None else None

    @functools.cached_property
    def known_ids(self) -> np.ndarray:
        """(tokenizer's vocabulary,) bool: ids that stand for text."""
        return self.tokenizer.bytes_per_token() > 0

    @functools.cached_property
    def max_token_characters(self) -> int:
        """The length of the longest token: n tokens are a text of at most n times this many characters."""
        texts = (self.tokenizer.token_bytes(i).decode(errors="replace") for i in range(self.tokenizer.vocab_size))
        return max(map(len, texts))

    @property
    def can_chat(self) -> bool:
        """Whether it continues texts and has a chat template."""
        try:
            return bool(self.chat_encoder)
        except InputError:
            return False

    @functools.cached_property
    def chat_encoder(self) -> ChatEncoder:
        """Turns chats into prompts.

        Raises:
            InputError: the model has no chat template or a wrong one, or does not continue texts.
        """
        if self.writes != "text" or self.config.data.pairs:
            raise InputError(f"{self.name} was not trained to continue texts, and so cannot chat: leave chat out")
        return ChatEncoder(self.tokenizer, self.name)

    def text_ids(self) -> np.ndarray:
        """(V,) bool: ids that stand for text."""
        return np.pad(self.known_ids, (0, self.config.model.vocab_size - len(self.known_ids)))

    def decode_text(self, ids: Iterable[int]) -> str:
        """Decodes tokens; special tokens have no text, broken characters are replaced."""
        return b"".join(self.tokenizer.token_bytes(int(i)) for i in ids).decode(errors="replace")

    def encode(self, text: str, what: str = "prompt") -> np.ndarray:
        """Returns begin-of-text and the tokens of a text.

        Args:
            text: at least one character.
            what: the text's name, for the error message.

        Raises:
            InputError: the text is empty, or the tokenizer does not know a part of it.
        """
        # The tokenizer would fail later, or silently lose a part of the text.
        if not text:
            raise InputError(f"the {what} is empty: give at least a word")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a byte of the command line that is not UTF-8
            raise InputError(f"the {what} is not UTF-8 text at character {error.start + 1}") from None
        # Report where the text leaves the tokenizer's alphabet.
        (ids,) = self.tokenizer.encode([text])
        known = self.known_ids[ids]
        if not known.all():
            offset = len(self.tokenizer.decode(ids[: int(known.argmin())]))
            rest = text[offset : offset + 20]
            raise InputError(f"the tokenizer of {self.name} does not know what begins with {rest!r} in the {what}")
        return np.concatenate([[self.tokenizer.begin], ids]).astype(np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Tokenises a prompt; for a model of pairs it is the first text, and the second one begins after it."""
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
    """Loads the parameters and constants of a checkpoint, without optimizer and corpus.

    Args:
        run: the checkpoint's name, such as runs/x or runs/x@best.
        dtype: dtype of parameters and computation; None: as trained.
        mesh_shape: devices along (data, fsdp, tensor); it may differ from that of training.
        overrides: words such as --config.data.path=… that do not change the model.

    Raises:
        InputError: no such run or checkpoint, an override changes the model, or the mesh does not fit.
    """
    # The run's config, with the overrides, the mesh of this machine and the dtype.
    name = run_name(run)
    folder = RunFolder(name.workdir)
    raw: Any = folder.config.copy_and_resolve_references()
    _override(raw, overrides)
    raw.update_from_flattened_dict({"mesh.shape": mesh_shape})
    saved_dtype = raw.model.param_dtype
    if dtype and saved_dtype in DTYPES:  # otherwise `parse` reports the run's dtype
        raw.update_from_flattened_dict({"model.dtype": dtype, "model.param_dtype": dtype})

    # The weights are read in the dtype of the checkpoint, and cast on the devices.
    weights = read_weights(name, folder, parse(raw), saved_dtype)
    params = jax.tree.map(lambda x: x.astype(weights.config.model.param_dtype), weights.params)
    decode_params = DecodeParams(weights.model, params)
    return TrainedModel(
        weights.step, weights.config, weights.tokenizer, decode_params, weights.mesh, weights.facts, name, folder
    )


def _override(raw: Any, overrides: Sequence[str]) -> None:
    """Applies overrides of the text to score and of its computation; refuses those that change the model."""
    text_keys = [f"data.{key}" for key in (*TEXT_KEYS, "pack")]
    allowed = tuple(f"--config.{key}=" for key in (*text_keys, *_PERFORMANCE_KEYS))
    if trained := [word for word in overrides if word.startswith("--config.") and not word.startswith(allowed)]:
        # Every wrong override is reported at once.
        raise InputError.of(
            f"{word} cannot be changed after training, or has a separate flag: keys to change here are "
            f"{', '.join(text_keys)} and {', '.join(_PERFORMANCE_KEYS)}"
            for word in trained
        )
    apply_overrides(raw, list(overrides))
    fit_corpus(raw, overrides)
