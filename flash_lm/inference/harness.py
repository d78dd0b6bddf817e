"""A trained model for EleutherAI's lm-evaluation-harness: `lm_eval.simple_evaluate(model=HarnessModel(trained), …)`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM

from flash_lm.errors import InputError
from flash_lm.inference.generation import Generator
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.sampling import Sampling, SamplingArrays

_ROWS = 16  # that are on the device at a time
_PIECE = 32  # tokens that are generated between two looks for the end of an answer
_NEW_TOKENS = 256  # of an answer, if the task does not say, and there is room


class HarnessModel(TemplateLM):
    """Answers the harness's requests with a causal model of text.

    Texts are seen in windows of the length of training, as in `evaluate`. Requests are put into batches by length; what
    is asked beside a request changes its answer by rounding alone (where a task samples, the place of the request
    chooses the random numbers). Answers are generated with a state of the family's
    own size.
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first request.

        Raises:
            InputError: the model cannot continue text.
        """
        super().__init__()
        if trained.conditioning.separate_source or trained.config.data.pairs:
            raise InputError(
                f"{trained.name} writes a second text for a first: the harness needs a model of whole texts, such as "
                "one of task=causal_lm"
            )
        self._trained, self._generator = trained, Generator(trained)
        self.max_length = trained.config.data.length

    @property
    def eot_token_id(self) -> int:
        """The id of end-of-text."""
        return self._trained.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is predicted from: begin-of-text, as in training."""
        return self._trained.tokenizer.begin

    @property
    def tokenizer_name(self) -> str:
        """Names what the harness keeps of requests."""
        return self._trained.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text; unless told otherwise, after begin-of-text."""
        del kwargs
        row = self._trained.encode(string, "a text of the task").tolist() if string else [self.prefix_token_id]
        return row[1:] if add_special_tokens is False else row

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As the harness does, but a continuation that the tokenizer joins to what is before it is read by itself."""
        ids, after = super()._encode_pair(context, continuation)
        return ids, after or self.tok_encode(continuation, add_special_tokens=False)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in nats, without end-of-text.

        The windows are the rows of `evaluate` with data.pack=documents: each begins with the last token of the one
        before. (The harness's other models give the last window of a text a longer context.)

        Args:
            requests: with `args` (text,).
            disable_tqdm: not used.
        """
        del disable_tqdm
        if not self._trained.conditioning.scores_full_text:
            raise InputError(
                f"{self._trained.name} has task={self._trained.config.task} and scores what follows a prompt, not "
                "whole texts: leave out tasks of output_type loglikelihood_rolling"
            )
        pairs, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for start in range(0, len(ids) - 1, self.max_length):
                pairs.append((ids[start : start + 1], ids[start + 1 : start + 1 + self.max_length]))
                owners.append(number)
        found = np.zeros(len(requests))
        for number, (log_likelihood, _) in zip(owners, self._scored(pairs), strict=True):
            found[number] += log_likelihood
        return found.tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues contexts up to one of the strings of `until`, which is left out, or the end of the text.

        Args:
            requests: with `args` (context, settings): until, max_gen_toks (or max_new_tokens), do_sample, temperature
                and top_p.
            disable_tqdm: not used.

        Raises:
            InputError: a setting is unknown or out of range, or there is no room for a context.
        """
        del disable_tqdm
        limit = self._generator.engine.limit
        usual = _NEW_TOKENS if limit is None else min(_NEW_TOKENS, limit // 2)
        settings = [_settings(request.args[1], usual) for request in requests]
        contexts = []
        for request, (_, new_tokens, _) in zip(requests, settings, strict=True):
            room = self.max_length if limit is None else min(self.max_length, limit - new_tokens)
            if room < 1:
                raise InputError(f"max_gen_toks={new_tokens} leaves no room for a context: the limit is {limit}")
            ids = self.tok_encode(request.args[0])
            contexts.append(np.array(ids[-room:], np.int32))
        answers = [""] * len(requests)
        for alike in _alike(settings):
            for numbers in _batches(alike, lambda i: len(contexts[i])):
                found = self._answers(numbers, [contexts[i] for i in numbers], *settings[numbers[0]])
                for number, answer in zip(numbers, found, strict=True):
                    answers[number] = answer
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Of (texts, context, continuation), ids of the last two; what is too long is cut at its beginning."""
        del kwargs
        pairs = []
        for texts, context, continuation in requests:
            if not continuation:
                raise InputError(
                    f"there is nothing to score after {texts[0] if texts else context!r}: the task has "
                    "an empty choice or answer"
                )
            if len(continuation) > self.max_length:
                raise InputError(
                    f"a continuation of {len(continuation)} tokens is longer than the {self.max_length} of training: "
                    "score it as a whole text (output_type: loglikelihood_rolling)"
                )
            pairs.append((context[-(self.max_length + 1 - len(continuation)) :], continuation))
        return self._scored(pairs)

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether each of its tokens is the likeliest."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for batch in _batches(range(len(pairs)), lambda i: sum(map(len, pairs[i]))):
            contexts, continuations = ([np.array(pairs[i][part], np.int32) for i in batch] for part in (0, 1))
            for i, one in zip(batch, self._generator.engine.score(contexts, continuations), strict=True):
                found[i] = float(one.log_probs.astype(np.float64).sum()), bool(one.likeliest.all())
        return found

    def _answers(
        self,
        numbers: list[int],
        contexts: list[np.ndarray],
        until: tuple[str, ...],
        new_tokens: int,
        sampling: Sampling,
    ) -> list[str]:
        """The answers to requests of these numbers, which choose their random numbers."""
        engine, settings = self._generator.engine, SamplingArrays.of(sampling)
        carry, left = engine.prefill(contexts, new_tokens), new_tokens
        of_rows_B = jnp.array([*numbers, *[0] * (len(carry.finished_B) - len(numbers))])
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), of_rows_B)
        tokens: list[list[int]] = [[] for _ in contexts]
        texts = [""] * len(contexts)
        while left > 0:
            carry, new = engine.advance_rows(carry, settings, keys_B, min(_PIECE, left))
            left -= _PIECE
            for b, row in enumerate(tokens):
                row += new.tokens_BxT[b, : new.lengths_B[b]].tolist()
                texts[b] = self._trained.text_of(row)
            stopped = [any(word in text for word in until) for text in texts]
            if all(stop or new.finished_B[b] for b, stop in enumerate(stopped)):
                break
        return [text[: min([text.find(word) for word in until if word in text], default=None)] for text in texts]


def _settings(given: dict[str, Any], usual: int) -> tuple[tuple[str, ...], int, Sampling]:
    """The strings that end an answer, its most tokens, and how a token is chosen: the likeliest if not sampled.

    Args:
        given: the task's generation_kwargs.
        usual: most tokens if the task does not say.
    """
    rest = dict(given)
    until = rest.pop("until", ())
    new_tokens = int(rest.pop("max_new_tokens", usual))
    new_tokens = int(rest.pop("max_gen_toks", new_tokens))
    sampled, top_p = rest.pop("do_sample", None), float(rest.pop("top_p", 1.0))
    temperature = float(rest.pop("temperature", 1.0 if sampled else 0.0))
    if sampled is False:
        temperature = 0.0
    if int(rest.get("num_beams", 1)) == 1:
        rest.pop("num_beams", None)
    if rest:
        raise InputError(
            f"generation_kwargs has {', '.join(rest)}: known are until, max_gen_toks or max_new_tokens, do_sample, "
            "temperature, top_p and num_beams=1"
        )
    words = (until,) if isinstance(until, str) else tuple(until)
    return tuple(word for word in words if word), new_tokens, Sampling(temperature=temperature, top_p=top_p)


def _alike(settings: Sequence[Any]) -> list[list[int]]:
    """Numbers of the requests by their settings."""
    found: dict[Any, list[int]] = {}
    for number, setting in enumerate(settings):
        found.setdefault(setting, []).append(number)
    return list(found.values())


def _batches(numbers: Sequence[int], length: Any) -> list[list[int]]:
    """The numbers in batches, the longest first: rows of a batch are padded to the longest of them."""
    ordered = sorted(numbers, key=lambda i: -length(i))
    return [ordered[i : i + _ROWS] for i in range(0, len(ordered), _ROWS)]
