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

_ROWS = 16  # batch size on the device
_PIECE = 32  # tokens that are generated between two checks for the end of an answer
_NEW_TOKENS = 256  # largest answer, if the task does not say, and the positions suffice


class HarnessModel(TemplateLM):
    """Answers the harness's requests with a causal model of text.

    Texts are scored in windows of the training length, as in `evaluate`. Requests are batched by length; other requests
    change an answer only by rounding (if a task samples, the number of the request selects the random numbers). Answers
    are generated with the family's decode state.
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first request.

        Raises:
            InputError: the model cannot continue text.
        """
        super().__init__()
        # The harness's tasks are continuations of texts, which a model of pairs does not know.
        if trained.conditioning.separate_source or trained.config.data.pairs:
            raise InputError(
                f"{trained.name} writes a second text for a first: the harness needs a model of complete texts, "
                "such as one of task=causal_lm"
            )
        self._trained, self._generator = trained, Generator(trained)
        self.max_length = trained.config.data.length

    @property
    def eot_token_id(self) -> int:
        """The id of end-of-text."""
        return self._trained.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one: begin-of-text, as in training."""
        return self._trained.tokenizer.begin

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests."""
        return self._trained.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenises a text; begin-of-text is put before it unless add_special_tokens is False."""
        del kwargs
        row = self._trained.encode(string, "a text of the task").tolist() if string else [self.prefix_token_id]
        return row[1:] if add_special_tokens is False else row

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenises context and continuation; a continuation that is joined to the context is tokenised separately."""
        ids, after = super()._encode_pair(context, continuation)
        return ids, after or self.tok_encode(continuation, add_special_tokens=False)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of full texts, in nats, without end-of-text.

        The windows are the sequences of `evaluate` with data.pack=documents: each begins with the last token of the one
        before. (The harness's other models give the last window of a text a longer context.)

        Args:
            requests: requests with `args` (text,).
            disable_tqdm: not used.
        """
        del disable_tqdm
        if not self._trained.conditioning.scores_full_text:
            raise InputError(
                f"{self._trained.name} has task={self._trained.config.task} and scores what follows a prompt, not "
                "complete texts: leave out tasks of output_type loglikelihood_rolling"
            )
        # A text is as many pairs (one token of context, a window); their sums are its log-likelihood.
        pairs, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for start in range(0, len(ids) - 1, self.max_length):
                pairs.append((ids[start : start + 1], ids[start + 1 : start + 1 + self.max_length]))
                owners.append(number)
        totals = np.zeros(len(requests))
        for number, (log_likelihood, _) in zip(owners, self._score_pairs(pairs), strict=True):
            totals[number] += log_likelihood
        return totals.tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues contexts up to one of the strings of `until`, which is left out, or the end of the text.

        Args:
            requests: requests with `args` (context, settings): until, max_gen_toks (or max_new_tokens), do_sample,
                temperature and top_p.
            disable_tqdm: not used.

        Raises:
            InputError: a setting is unknown or out of range, or the new tokens leave no room for a context.
        """
        del disable_tqdm
        # Settings of each request; a long context loses its beginning, so that the answer has room.
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

        # A batch needs one setting for all; the answers go back to the numbers of their requests.
        answers = [""] * len(requests)
        for group in _group_by_settings(settings):
            for numbers in _batches(group, lambda i: len(contexts[i])):
                texts = self._generate(numbers, [contexts[i] for i in numbers], *settings[numbers[0]])
                for number, answer in zip(numbers, texts, strict=True):
                    answers[number] = answer
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Scores requests (texts, context ids, continuation ids); a context that is too long loses its beginning."""
        del kwargs
        # Every continuation is scored in full: one that is longer than a training sequence is refused.
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
                    "score it as a complete text (output_type: loglikelihood_rolling)"
                )
            pairs.append((context[-(self.max_length + 1 - len(continuation)) :], continuation))
        return self._score_pairs(pairs)

    def _score_pairs(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is the greedy one."""
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for batch in _batches(range(len(pairs)), lambda i: sum(map(len, pairs[i]))):
            contexts, continuations = ([np.array(pairs[i][part], np.int32) for i in batch] for part in (0, 1))
            for i, result in zip(batch, self._generator.engine.score(contexts, continuations), strict=True):
                scores[i] = float(result.log_probs.astype(np.float64).sum()), bool(result.likeliest.all())
        return scores

    def _generate(
        self,
        numbers: list[int],
        contexts: list[np.ndarray],
        until: tuple[str, ...],
        new_tokens: int,
        sampling: Sampling,
    ) -> list[str]:
        """Generates the answers to requests; their numbers select the random numbers."""
        # A key per request, so that its answer does not depend on its batch; padding has the key of request 0.
        engine, settings = self._generator.engine, SamplingArrays.from_sampling(sampling)
        carry, left = engine.prefill(contexts, new_tokens), new_tokens
        request_numbers_B = jnp.array([*numbers, *[0] * (len(carry.finished_B) - len(numbers))])
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), request_numbers_B)

        # Generate in pieces until each answer has a stop string or has ended.
        tokens: list[list[int]] = [[] for _ in contexts]
        texts = [""] * len(contexts)
        while left > 0:
            carry, new = engine.advance_rows(carry, settings, keys_B, min(_PIECE, left))
            left -= _PIECE
            for b, row in enumerate(tokens):
                row += new.tokens_BxT[b, : new.lengths_B[b]].tolist()
                texts[b] = self._trained.decode_text(row)
            stopped = [any(word in text for word in until) for text in texts]
            if all(stop or new.finished_B[b] for b, stop in enumerate(stopped)):
                break
        return [text[: min([text.find(word) for word in until if word in text], default=None)] for text in texts]


def _settings(kwargs: dict[str, Any], default: int) -> tuple[tuple[str, ...], int, Sampling]:
    """The strings that end an answer, its largest number of tokens, and its sampling settings, greedy by default.

    Args:
        kwargs: the task's generation_kwargs.
        default: largest number of tokens if the task does not say.
    """
    # Every known key is taken out; the keys that are left are unknown.
    unknown = dict(kwargs)
    until = unknown.pop("until", ())
    new_tokens = int(unknown.pop("max_new_tokens", default))
    new_tokens = int(unknown.pop("max_gen_toks", new_tokens))
    do_sample, top_p = unknown.pop("do_sample", None), float(unknown.pop("top_p", 1.0))
    temperature = float(unknown.pop("temperature", 1.0 if do_sample else 0.0))
    if do_sample is False:
        temperature = 0.0
    if int(unknown.get("num_beams", 1)) == 1:
        unknown.pop("num_beams", None)
    if unknown:
        raise InputError(
            f"generation_kwargs has {', '.join(unknown)}: known are until, max_gen_toks or max_new_tokens, do_sample, "
            "temperature, top_p and num_beams=1"
        )
    words = (until,) if isinstance(until, str) else tuple(until)
    return tuple(word for word in words if word), new_tokens, Sampling(temperature=temperature, top_p=top_p)


def _group_by_settings(settings: Sequence[Any]) -> list[list[int]]:
    """Groups the numbers of requests with equal settings."""
    groups: dict[Any, list[int]] = {}
    for number, setting in enumerate(settings):
        groups.setdefault(setting, []).append(number)
    return list(groups.values())


def _batches(numbers: Sequence[int], length: Any) -> list[list[int]]:
    """Batches of numbers, the longest requests first, since a batch is padded to its longest sequence."""
    ordered = sorted(numbers, key=lambda i: -length(i))
    return [ordered[i : i + _ROWS] for i in range(0, len(ordered), _ROWS)]
