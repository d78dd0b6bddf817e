"""Beam search: against all answers that there are, against a search in NumPy, and against greedy decoding."""

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from models.cases import LENGTH, case
from models.test_encoder_decoder import model as reader

from flash_lm.errors import InputError, RunError
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.decoding import Hypothesis
from flash_lm.inference.engine import Engine
from flash_lm.inference.settings import BeamSearch
from flash_lm.training.train_state import ModelFunction
from inference import test_given
from inference.test_engine import ALLOWED, END, MAX_TOKENS, PROMPTS, VOCAB, engine, mesh, recomputed

pytestmark = pytest.mark.usefixtures("usual_promotion")
# One whose state is a sum, one whose state must be flushed, and one with a cache.
each_family = pytest.mark.parametrize("family", ["linear_transformer", "flash", "transformer"])
WIDE = 4
Next = Callable[[tuple[int, ...]], np.ndarray]  # log-probabilities of the token after some ids


def normaliser(tokens: int, penalty: float) -> float:
    return ((5 + tokens) / 6) ** penalty


def allowed(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    return np.where(ALLOWED, logits - np.logaddexp.reduce(logits), -np.inf)


def after(family: str, prompt: np.ndarray) -> Next:
    """The whole row read again for each token."""
    model = case(family, True)

    @functools.cache
    def log_probs(ids: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((2, LENGTH), np.int32)
        padded[:, : len(prompt) + len(ids)] = [*prompt, *ids]
        return allowed(model.logits(model.params, padded)[0, len(prompt) + len(ids) - 1])

    return log_probs


def after_a_prefix(family: str, prompt: np.ndarray) -> Next:
    given = np.full((1, LENGTH), len(prompt), np.int32)

    def log_probs(ids: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(prompt) + len(ids)] = [*prompt, *ids]
        logits = test_given.logits_of(family)(case(family, True).params, padded, given)
        return allowed(logits[0, len(prompt) + len(ids) - 1])

    return log_probs


def after_a_source(name: str, prompt: np.ndarray) -> Next:
    one, source = reader(name), np.zeros((1, LENGTH), np.int32)
    source[0, : len(prompt)] = prompt
    given = {"source": source, "source_segment_ids": (np.arange(LENGTH) < len(prompt))[None].astype(np.int32)}

    def log_probs(ids: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : 1 + len(ids)] = [test_given.BEGIN, *ids]
        return allowed(one.logits(one.params, padded, **given)[0, len(ids)])

    return log_probs


def searched(next_: Next, beams: int, penalty: float, count: int, end: int = END) -> list[tuple]:
    """The answers, best first, as (score, tokens, whether it ended), with lists and loops."""
    live: list[tuple] = [(0.0, ())]
    done: list[tuple] = []
    for place in range(count):
        longer = [
            (total + log_prob, (*ids, token))
            for total, ids in live
            for token, log_prob in enumerate(next_(ids))
            if log_prob > -np.inf
        ]
        longer = sorted(longer, key=lambda one: -one[0])[: 2 * beams]
        ends = [one for one in longer[:beams] if one[1][-1] == end]
        done += [(total / normaliser(place + 1, penalty), ids[:-1], True) for total, ids in ends]
        live = [one for one in longer if one[1][-1] != end][:beams]
    done += [(total / normaliser(count, penalty), ids, False) for total, ids in live]
    return sorted(done, key=lambda one: -one[0])[:beams]


def assert_found(found: list[Hypothesis], expected: list[tuple]) -> None:
    for one, (score, ids, ended) in zip(found, expected, strict=True):
        assert (one.tokens, one.finished) == (list(ids), ended)
        np.testing.assert_allclose(one.score, score, atol=1e-4)


@functools.cache
def often(family: str) -> int:
    """A token that ends many answers, if it is the end: the second one of a greedy answer."""
    return recomputed(family, 0)[0][1]


@each_family
@pytest.mark.parametrize("penalty", [0.0, 1.5])
@pytest.mark.parametrize("early", [False, True])
def test_is_a_search_in_numpy(family, penalty, early):
    end = often(family) if early else END
    found = engine(family, end=end).search(PROMPTS, BeamSearch(WIDE, penalty), MAX_TOKENS)
    for prompt, answers in zip(PROMPTS, found, strict=True):
        assert_found(answers, searched(after(family, prompt), WIDE, penalty, MAX_TOKENS, end))
        for one in answers:
            if not one.finished:
                total = sum(one.log_probs)
                np.testing.assert_allclose(total / normaliser(MAX_TOKENS, penalty), one.score, atol=1e-4)
    assert any(one.finished for one in found[0]) or not early


@each_family
@pytest.mark.parametrize("penalty", [0.0, 3.0])
def test_one_beam_is_greedy(family, penalty):
    """Whatever longer answers would score."""
    for row, (found,) in enumerate(engine(family).search(PROMPTS, BeamSearch(1, penalty), MAX_TOKENS)):
        tokens, log_probs = recomputed(family, row)
        assert found.tokens == tokens
        np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-4)
    (found,) = engine(family, end=often(family)).search(PROMPTS[:1], BeamSearch(1, penalty), MAX_TOKENS)[0]
    assert found.finished and found.tokens == recomputed(family, 0)[0][:1]


def test_enough_beams_find_the_best_of_all_answers():
    """Of seven words, three tokens long: there are never more than 49 answers to go on with, and 43 that end."""
    words, family, penalty, count = (END, 7, 11, 20, 33, 41, 59), "linear_transformer", 0.7, 3
    model = case(family, True)
    params = DecodeParams(ModelFunction(model.config, seed=0), model.params)
    few = Engine(params, mesh(1, 1, 1), end=END, allowed_V=np.isin(np.arange(VOCAB), words))
    (found,) = few.search(PROMPTS[:1], BeamSearch(49, penalty), count)
    answers, next_ = [], after(family, PROMPTS[0])
    for size in range(1, count + 1):
        for ids in itertools.product(words, repeat=size):
            if END in ids[:-1] or (size < count and ids[-1] != END):
                continue
            total, ended = sum(next_(ids[:i])[ids[i]] for i in range(size)), ids[-1] == END
            answers.append((total / normaliser(size, penalty), ids[:-1] if ended else ids, ended))
    answers.sort(key=lambda one: -one[0])
    assert_found(found[:5], answers[:5])


@pytest.mark.parametrize("shape", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 1)])
def test_answers_to_a_source(shape):
    """The memory of each prompt goes with its beams; and the batch is padded over four devices."""
    found = test_given.reading_engine("gau", shape).search(PROMPTS, BeamSearch(WIDE), MAX_TOKENS)
    for prompt, answers in zip(PROMPTS, found, strict=True):
        assert_found(answers, searched(after_a_source("gau", prompt), WIDE, 0.6, MAX_TOKENS))


def test_answers_after_a_prefix():
    found = test_given.engine("flash_quad").search(PROMPTS, BeamSearch(WIDE), MAX_TOKENS)
    for prompt, answers in zip(PROMPTS, found, strict=True):
        assert_found(answers, searched(after_a_prefix("flash_quad", prompt), WIDE, 0.6, MAX_TOKENS))


def test_more_beams_than_answers():
    """With one word besides the end, there are four answers of at most three tokens."""
    model = case("linear_transformer", True)
    params = DecodeParams(ModelFunction(model.config, seed=0), model.params)
    one = Engine(params, mesh(1, 1, 1), end=END, allowed_V=np.isin(np.arange(VOCAB), (END, 7)))
    (found,) = one.search(PROMPTS[:1], BeamSearch(8, 0.0), 3)
    assert {(*x.tokens, x.finished) for x in found} == {(True,), (7, True), (7, 7, True), (7, 7, 7, False)}
    assert sorted((x.score for x in found), reverse=True) == [x.score for x in found]


def test_parameters_that_are_not_finite():
    model = case("linear_transformer", True)
    params = {**model.params, "embedding": model.params["embedding"] * np.nan}
    broken = Engine(
        DecodeParams(ModelFunction(model.config, seed=0), params), mesh(1, 1, 1), end=END, allowed_V=ALLOWED
    )
    with pytest.raises(RunError, match="logits are not finite"):
        broken.search(PROMPTS[:1], BeamSearch(2), 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beams": 0}, "beams=0 must be from 1 to 256"), ({"length_penalty": -1.0}, "length_penalty=-1.0 must be from 0")],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(InputError, match=message):
        BeamSearch(**settings)
