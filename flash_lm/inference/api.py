"""The Python interface of a trained model: `flash_lm.load("runs/mine@best")`."""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.config.plugins import import_plugins
from flash_lm.data.chat_template import Message
from flash_lm.errors import InputError
from flash_lm.inference.classify import TextClassifier
from flash_lm.inference.fill_in import FilledIn, Filler
from flash_lm.inference.generation import Generator, Prompt
from flash_lm.inference.model import TrainedModel, load_model
from flash_lm.inference.settings import BeamSearch, Sampling
from flash_lm.models.attention_weights import AttentionMap, attention_weights
from flash_lm.runs.hosts import fetch_array
from flash_lm.runs.run_name import RunName
from flash_lm.training.evaluation import perplexity
from flash_lm.training.hub import download
from flash_lm.training.sharding import batch_sharding, round_up_rows
from flash_lm.training.train_state import Params


@dataclasses.dataclass(frozen=True)
class TextScore:
    """Log-probabilities of a text under a model, starting from begin-of-text.

    Attributes:
        tokens: token ids of the text.
        log_probs: log-probability of each token, in nats.
        bytes: length of the text in bytes.

    >>> TextScore(tokens=[7, 9], log_probs=[math.log(0.5), math.log(0.125)], bytes=4).bits_per_byte
    1.0
    """

    tokens: list[int]
    log_probs: list[float]
    bytes: int

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return perplexity(-sum(self.log_probs), len(self.log_probs))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte."""
        return -sum(self.log_probs) / math.log(2) / self.bytes


class LoadedModel(TrainedModel):
    """A trained model: generates, chats, fills in, scores, and returns logits and attention weights.

    Scoring, export, the service and the harness take it, too.

    >>> import flash_lm
    >>> model = flash_lm.load("runs/mine")
    >>> texts = model.generate(["the ", "a "], max_tokens=4, temperature=0)
    >>> len(texts)
    2
    >>> model.score("the cat").bits_per_byte > 0
    True
    >>> model.logits([5, 6, 7]).shape == (3, model.config.model.vocab_size)
    True

    Attributes:
        config: the complete config.
        tokenizer: `encode` takes texts, `decode` takes ids.
        params: nested dicts of arrays, stacked over the layers; a new copy once the model has generated or scored text.
        constants: random arrays that are never trained, nested like `params`; empty for most families.
        model: the model as a function of `params`; `model.bind(params)` is its Flax module.
    """

    @overload
    def generate(self, text: str, max_tokens: int = 100, *, seed: int = 0, **settings: float) -> str: ...
    @overload
    def generate(self, text: list[str], max_tokens: int = 100, *, seed: int = 0, **settings: float) -> list[str]: ...
    def generate(
        self, text: str | list[str], max_tokens: int = 100, *, seed: int = 0, **settings: float
    ) -> str | list[str]:
        """Continues a text, or several in one batch.

        Args:
            text: the prompt, or prompts.
            max_tokens: largest number of new tokens.
            seed: random seed of samples, of 64 bits; -1: another one each time.
            settings: temperature, top_k, top_p, …: the fields of `inference.settings.Sampling`; or beams and
                length_penalty, the fields of `BeamSearch`, for the best answer of a search instead of a sample.

        Raises:
            InputError: the model is bidirectional, a text is empty or unknown to the tokenizer, or a number is out of
                range.
        """
        prompts = [text] if isinstance(text, str) else list(text)
        answers = self._continue(prompts, max_tokens, seed, settings)
        return answers[0] if isinstance(text, str) else answers

    def chat(self, messages: Sequence[Message], max_tokens: int = 200, *, seed: int = 0, **settings: float) -> str:
        """Answers the last message of a chat, with a model that has a chat template.

        Args:
            messages: the chat so far, such as [{"role": "user", "content": "Hello"}].
            max_tokens: largest number of new tokens.
            seed: as of `generate`.
            settings: as of `generate`.

        Raises:
            InputError: the model has no chat template, a message spells a special token, or as `generate`.
        """
        return self._continue([self.chat_encoder.prompt(messages)], max_tokens, seed, settings)[0]

    def _continue(self, prompts: Sequence[Prompt], max_tokens: int, seed: int, settings: dict[str, float]) -> list[str]:
        """The text after each prompt."""
        # The settings select the method: any field of BeamSearch means a search.
        names = {kind: [field.name for field in dataclasses.fields(kind)] for kind in (BeamSearch, Sampling)}
        kind = BeamSearch if settings.keys() & names[BeamSearch] else Sampling
        if wrong := [name for name in settings if name not in names[kind]]:
            kind_name = "a beam search" if kind is BeamSearch else "sampling"
            raise InputError(f"unknown setting {', '.join(wrong)}: {kind_name} has {', '.join(names[kind])}")
        options = kind(**settings)  # type: ignore[arg-type]
        if isinstance(options, BeamSearch):
            rows = [answers[0] for answers in self._generator.search(prompts, max_tokens, options)]
        else:
            rows = self._generator.generate(prompts, max_tokens, options, seed)
        return [row.text for row in rows]

    def classify(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[dict[str, float]]:
        """The probability of each label, for each text, or each pair if the model was trained on pairs.

        Texts that are longer than the training sequences are cut off, as in training.

        Raises:
            InputError: the model does not predict labels of texts, a text is empty or unknown to the tokenizer, or
                texts are given to a model of pairs, or pairs to a model of texts.
        """
        if isinstance(texts, str):
            raise InputError("classify takes a list of texts: put the text into one")
        as_tuple = lambda texts: (texts,) if isinstance(texts, str) else tuple(texts)
        return self._classifier([self._classifier.encode(as_tuple(row)).tokens for row in texts])

    def fill_in(self, text: str, candidates: int = 5) -> FilledIn:
        """The candidates for each [MASK] of a text; raises as `inference.fill_in.Filler` does."""
        return self._filler([text], candidates)[0]

    def score(self, text: str) -> TextScore:
        """The log-probability of each token of a text, given the tokens before it.

        Raises:
            InputError: the model is bidirectional, or the text is empty, unknown to the tokenizer or too long.
        """
        self._check_left_to_right("score")
        engine = self._generator.engine
        row = self.encode(text, "text")
        self.model.abstract.check_length(len(row))
        (scored,) = engine.score([row[:1]], [row[1:]])
        return TextScore(row[1:].tolist(), scored.log_probs.tolist(), len(text.encode()))

    def logits(self, ids: np.ndarray | Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray:
        """The logits after every token; each sequence is one document.

        Args:
            ids: L or B×L token ids; begin-of-text is not added.

        Returns:
            L×V or B×L×V float32.

        Raises:
            InputError: ids are missing, outside of the vocabulary, or more than the model has positions.
        """
        # Check shape, dtype and range: outside of the vocabulary the embedding would be NaN.
        try:
            array = np.asarray(ids)
        except ValueError:
            raise InputError("the rows of ids have different lengths: give L or B×L") from None
        ids_BxL = np.atleast_2d(array)
        if not array.size or array.ndim > 2 or not np.issubdtype(array.dtype, np.integer):
            raise InputError(f"ids of shape {array.shape}, {array.dtype}: give integers, L or B×L, at least one")
        if ids_BxL.min() < 0 or ids_BxL.max() >= self.config.model.vocab_size:
            raise InputError(
                f"ids from {ids_BxL.min()} to {ids_BxL.max()}: the vocabulary has {self.config.model.vocab_size}"
            )

        # One batch; a single sequence is returned without the batch dimension.
        self._check_left_to_right("logits")
        logits = self._batch_logits(ids_BxL)
        return logits[0] if array.ndim == 1 else logits

    def _check_left_to_right(self, what: str) -> None:
        """Raises InputError for a model with a bidirectional prefix or a source."""
        if not self.conditioning.scores_full_text:
            raise InputError(
                f"{what} is of complete texts, and a model of task={self.config.task} reads a given part apart: use "
                "generate, or model(…) of its Flax module"
            )

    def _batch_logits(self, *arrays_BxL: np.ndarray) -> np.ndarray:
        """Logits of a batch from token ids and perhaps segment ids; it is padded with repeats to fill the devices."""
        count, mesh = len(arrays_BxL[0]), self.mesh
        with jax.set_mesh(mesh):
            size = (round_up_rows(count, mesh), arrays_BxL[0].shape[1])
            put = lambda x_BxL: jax.device_put(np.resize(x_BxL, size).astype(np.int32), batch_sharding(mesh))
            return fetch_array(self._logits(self.params, *map(put, arrays_BxL)))[:count]

    def attention(self, text: str, tokens: int = 256) -> list[AttentionMap]:
        """Attention maps of every layer: the weight of each token's value in each other token's output.

        Args:
            text: the text; begin-of-text is put before it.
            tokens: largest number of its tokens; memory grows with their square, and time with their cube.

        Returns:
            Maps of all layers, from the first to the last, each 1×H×L×L.

        Raises:
            InputError: the text is empty or unknown to the tokenizer, or has more tokens than the model has positions.
        """
        self._check_left_to_right("attention")
        maps = list[AttentionMap]()
        ids_1xL = jnp.asarray(self.encode(text, "text")[:tokens])[None]

        # Names and indices of the maps are known when the function is traced; jit returns only the arrays.
        def weights(params: Params) -> list[jax.Array]:
            maps[:] = attention_weights(self.model.bind(params), ids_1xL)
            return [attention_map.weights_BxHxLxL for attention_map in maps]

        with jax.set_mesh(self.mesh):
            arrays = jax.device_get(jax.jit(weights)(self.params))
        return [
            dataclasses.replace(attention_map, weights_BxHxLxL=x) for attention_map, x in zip(maps, arrays, strict=True)
        ]

    @functools.cached_property
    def _logits(self):
        return jax.jit(lambda params, *rows_BxL: self.model.bind(params)(*rows_BxL))

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator(self)

    @functools.cached_property
    def _classifier(self) -> TextClassifier:
        return TextClassifier(self)

    @functools.cached_property
    def _filler(self) -> Filler:
        return Filler(self)


def load(
    run: str | os.PathLike[str] | RunName,
    *,
    dtype: str | None = None,
    mesh: tuple[int, ...] = (-1, 1, 1),
    overrides: Sequence[str] = (),
    plugins: str | Sequence[str] = (),
) -> LoadedModel:
    """Loads a trained model.

    >>> model = load("runs/mine@newest")
    >>> model.config.model.family, model.step
    ('transformer_plus_plus', 2)

    Args:
        run: a run, such as runs/mine or gs://bucket/mine@best, the folder of an exported model, or hub:OWNER/NAME.
        dtype: dtype of parameters and computation, float32 or bfloat16; None: as trained.
        mesh: devices along (data, fsdp, tensor).
        overrides: words such as --config.model.quadratic.implementation=blocked, for keys that do not change the model.
        plugins: modules that the run asks for. Importing one runs its code, so only these are imported.

    Raises:
        InputError: no such run, checkpoint or model, the mesh does not fit, or the run asks for other plugins.
    """
    import_plugins([plugins] if isinstance(plugins, str) else plugins)
    name = download(run)
    return LoadedModel(**vars(load_model(name, dtype=dtype, mesh_shape=mesh, overrides=overrides)))
