"""Prompts that are not read from left to right: the decode loop against the recomputed parallel form."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from models.cases import LENGTH, case
from models.test_encoder_decoder import model as reader

from flash_lm.data.conditioning import PREFIX as A_PREFIX
from flash_lm.data.conditioning import SOURCE
from flash_lm.errors import InputError
from flash_lm.inference import engine as engine_module
from flash_lm.inference.couplets import CoupletWriter
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.engine import Engine
from flash_lm.inference.harness import HarnessModel
from flash_lm.inference.running_batch import RunningBatch
from flash_lm.inference.sampling import Sampling
from flash_lm.training.train_state import ModelFunction
from inference.service.serving import random_model
from inference.test_engine import ALLOWED, END, GREEDY, MAX_TOKENS, PROMPTS, greedy, mesh

BEGIN = 1
PREFIX = {"task": "prefix_lm", "model.family": "linear_transformer"}
PAIRS = {"data.corpus": "hf", "data.path": "pairs", "data.pair_column": "answer", "data.pack": "examples"}
READS = {"task": "seq2seq", "model.encoder.family": "transformer_plus_plus"}
pytestmark = [pytest.mark.usefixtures("usual_promotion"), pytest.mark.group("conditioning")]
each_family = pytest.mark.parametrize("family", ["transformer", "flash_quad", "linear_transformer"])


@functools.cache
def engine(family: str) -> Engine:
    model = case(family, True)
    params = DecodeParams(ModelFunction(model.config, seed=0), jax.device_put(model.params))
    return Engine(params, mesh(1, 1, 1), end=END, allowed_V=ALLOWED, conditioning=A_PREFIX)


@functools.cache
def make_logits(family: str):
    model = case(family, True)
    return jax.jit(lambda params, inputs, prefix: model.model(params)(inputs, prefix=prefix))


@functools.cache
def greedy_with_prefix(family: str, row: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities; the prompt is a prefix, and each token recomputes the sequence."""
    prefix = np.full((1, LENGTH), len(PROMPTS[row]), np.int32)
    params = case(family, True).params
    return greedy(lambda padded: make_logits(family)(params, padded, prefix), PROMPTS[row].tolist())


@each_family
def test_a_prompt_is_a_prefix(family):
    one = engine(family)
    _, new = one.advance(one.prefill(PROMPTS, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    for b in range(len(PROMPTS)):
        tokens, log_probs = greedy_with_prefix(family, b)
        assert new.tokens_BxT[b, : new.lengths_B[b]].tolist() == tokens
        np.testing.assert_allclose(new.log_probs_BxT[b, : new.lengths_B[b]], log_probs, atol=1e-4)


@each_family
def test_scores_after_a_prefix(family):
    pairs = [greedy_with_prefix(family, row) for row in range(len(PROMPTS))]
    continuations = [np.array(tokens or [7], np.int32) for tokens, _ in pairs]
    for scored, (tokens, log_probs) in zip(engine(family).score(PROMPTS, continuations), pairs, strict=True):
        if tokens:
            np.testing.assert_allclose(scored.log_probs, log_probs, atol=1e-4)


def test_a_long_prefix_is_one_piece(monkeypatch):
    """A prompt that is read from the left is prefilled in several pieces."""
    expected = engine("linear_transformer").score(PROMPTS, [np.array([7, 8], np.int32)] * 3)
    monkeypatch.setattr(engine_module, "PIECE", 8)
    short_pieces = engine("linear_transformer").score(PROMPTS, [np.array([7, 8], np.int32)] * 3)
    for one, other in zip(expected, short_pieces, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


# A source of 3, 17 and 9 tokens, longer than one bucket.


@functools.cache
def encoder_engine(name: str, shape: tuple[int, ...] = (1, 1, 1)) -> Engine:
    one = reader(name)
    params = DecodeParams(ModelFunction(one.complete, seed=0), jax.device_put(one.params))
    return Engine(params, mesh(*shape), end=END, allowed_V=ALLOWED, conditioning=SOURCE, begin=BEGIN)


@functools.cache
def greedy_with_source(name: str, row: int) -> tuple[list[int], list[float]]:
    """As `greedy_with_prefix`, for a prompt that the encoder reads."""
    one, source = reader(name), np.zeros((1, LENGTH), np.int32)
    source[0, : len(PROMPTS[row])] = PROMPTS[row]
    condition = {"source": source, "source_segment_ids": (np.arange(LENGTH) < len(PROMPTS[row]))[None].astype(np.int32)}
    return greedy(lambda padded: one.logits(one.params, padded, **condition), [BEGIN])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("transformer", marks=pytest.mark.slow("another kind of attention to the source")),
        "gau",
        pytest.param("linear", marks=pytest.mark.slow("another kind of attention to the source")),
    ],
)
def test_a_prompt_is_a_source(name):
    one = encoder_engine(name)
    _, new = one.advance(one.prefill(PROMPTS, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    pairs = [greedy_with_source(name, row) for row in range(len(PROMPTS))]
    for b, (tokens, log_probs) in enumerate(pairs):
        assert new.tokens_BxT[b, : new.lengths_B[b]].tolist() == tokens
        np.testing.assert_allclose(new.log_probs_BxT[b, : new.lengths_B[b]], log_probs, atol=1e-4)
    scores = one.score(PROMPTS, [np.array(tokens or [7], np.int32) for tokens, _ in pairs])
    for scored, (tokens, log_probs) in zip(scores, pairs, strict=True):
        if tokens:
            np.testing.assert_allclose(scored.log_probs, log_probs, atol=1e-4)


def test_rows_with_sources_join_a_running_batch():
    one = encoder_engine("transformer")
    batch = RunningBatch(one, 2, 16)
    rows = {batch.join(PROMPTS[i], Sampling(temperature=0), 0): i for i in (1, 2)}
    parts = batch.advance(MAX_TOKENS)
    for row, i in rows.items():
        assert parts[row].tokens == greedy_with_source("transformer", i)[0]
    batch.leave(next(iter(rows)))
    row = batch.join(PROMPTS[0], Sampling(temperature=0), 0)  # in the row of another source
    assert batch.advance(MAX_TOKENS)[row].tokens == greedy_with_source("transformer", 0)[0]


def test_sources_on_several_devices():
    one = encoder_engine("transformer", (2, 2, 1))
    _, new = one.advance(one.prefill(PROMPTS, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    for b in range(len(PROMPTS)):
        assert new.tokens_BxT[b, : new.lengths_B[b]].tolist() == greedy_with_source("transformer", b)[0]


def test_couplets_that_are_too_long_for_an_encoder():
    """A decoder with rotary positions has no length limit."""
    writer = CoupletWriter(random_model("couplets", "transformer_plus_plus", READS))
    with pytest.raises(InputError, match="a first line of 40 characters is over the limit of 31"):
        writer("春" * 40)
    with pytest.raises(InputError, match="a source of 40 tokens is longer than model.max_length=32"):
        encoder_engine("transformer").prefill([np.zeros(40, np.int32)], 4)


@pytest.mark.parametrize("keys", [PREFIX, READS | PAIRS], ids=["prefix", "source"])
def test_calls_for_complete_texts_are_refused(keys):
    model = random_model("text", keys=keys)
    for call in (lambda: model.score("abc"), lambda: model.logits([1, 5]), lambda: model.attention("abc")):
        with pytest.raises(InputError, match="is of complete texts, and a model of task="):
            call()
    with pytest.raises(InputError, match="scores what follows a prompt"):
        encoder_engine("transformer").score_rows([np.array([1, 5, 7], np.int32)])
    if keys is not PREFIX:
        with pytest.raises(
            InputError, match="writes a second text for a first: the harness needs a model of complete texts"
        ):
            HarnessModel(model)
    else:
        with pytest.raises(InputError, match="leave out tasks of output_type loglikelihood_rolling"):
            HarnessModel(model).loglikelihood_rolling([SimpleNamespace(args=("abc",))])
