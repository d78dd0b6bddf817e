"""Beam search: against all possible answers, against a search in NumPy, and against greedy decoding."""

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
from inference import test_conditioning
from inference.test_engine import ALLOWED, END, MAX_TOKENS, PROMPTS, VOCAB, engine, greedy_recomputed, mesh

pytestmark = [pytest.mark.usefixtures("usual_promotion"), pytest.mark.group("conditioning")]
# A family whose state is a sum, one whose state must be flushed, and one with a cache.
each_family = pytest.mark.parametrize("family", ["linear_transformer", "flash", "transformer"])
WIDE = 4
Next = Callable[[tuple[int, ...]], np.ndarray]  # maps ids to log-probabilities of the next token


def length_penalty(tokens: int, penalty: float) -> float:
    return ((5 + tokens) / 6) ** penalty


def mask_special_tokens(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    return np.where(ALLOWED, logits - np.logaddexp.reduce(logits), -np.inf)


def next_after_prompt(family: str, prompt: np.ndarray) -> Next:
    """Reads the full sequence again for each token."""
    model = case(family, True)

    @functools.cache
    def log_probs(ids: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((2, LENGTH), np.int32)
        padded[:, : len(prompt) + len(ids)] = [*prompt, *ids]
        return mask_special_tokens(model.logits(model.params, padded)[0, len(prompt) + len(ids) - 1])

    return log_probs


def next_after_prefix(family: str, prompt: np.ndarray) -> Next:
    prefix = np.full((1, LENGTH), len(prompt), np.int32)

    def log_probs(ids: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(prompt) + len(ids)] = [*prompt, *ids]
        logits = test_conditioning.make_logits(family)(case(family, True).params, padded, prefix)
        return mask_special_tokens(logits[0, len(prompt) + len(ids) - 1])

    return log_probs


def next_after_source(name: str, prompt: np.ndarray) -> Next:
    one, source = reader(name), np.zeros((1, LENGTH), np.int32)
    source[0, : len(prompt)] = prompt
    condition = {"source": source, "source_segment_ids": (np.arange(LENGTH) < len(prompt))[None].astype(np.int32)}

    def log_probs(ids: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : 1 + len(ids)] = [test_conditioning.BEGIN, *ids]
        return mask_special_tokens(one.logits(one.params, padded, **condition)[0, len(ids)])

    return log_probs


def search_in_numpy(next_: Next, beams: int, penalty: float, count: int, end: int = END) -> list[tuple]:
    """The answers, best first, as (score, tokens, whether it ended), with lists and loops."""
    live: list[tuple] = [(0.0, ())]
    done: list[tuple] = []
    for index in range(count):
        longer = [
            (total + log_prob, (*ids, token))
            for total, ids in live
            for token, log_prob in enumerate(next_(ids))
            if log_prob > -np.inf
        ]
        longer = sorted(longer, key=lambda one: -one[0])[: 2 * beams]
        ends = [one for one in longer[:beams] if one[1][-1] == end]
        done += [(total / length_penalty(index + 1, penalty), ids[:-1], True) for total, ids in ends]
        live = [one for one in longer if one[1][-1] != end][:beams]
    done += [(total / length_penalty(count, penalty), ids, False) for total, ids in live]
    return sorted(done, key=lambda one: -one[0])[:beams]


def assert_hypotheses(actual: list[Hypothesis], expected: list[tuple]) -> None:
    for one, (score, ids, ended) in zip(actual, expected, strict=True):
        assert (one.tokens, one.finished) == (list(ids), ended)
        np.testing.assert_allclose(one.score, score, atol=1e-4)


@functools.cache
def frequent_end(family: str) -> int:
    """A token that ends many answers if it is the end token: the second token of a greedy answer."""
    return greedy_recomputed(family, 0)[0][1]


@each_family
@pytest.mark.parametrize("penalty", [0.0, 1.5])
@pytest.mark.parametrize("early", [False, True])
def test_equals_a_search_in_numpy(family, penalty, early):
    end = frequent_end(family) if early else END
    beams = engine(family, end=end).search(PROMPTS, BeamSearch(WIDE, penalty), MAX_TOKENS)
    for prompt, answers in zip(PROMPTS, beams, strict=True):
        assert_hypotheses(answers, search_in_numpy(next_after_prompt(family, prompt), WIDE, penalty, MAX_TOKENS, end))
        for one in answers:
            if not one.finished:
                total = sum(one.log_probs)
                np.testing.assert_allclose(total / length_penalty(MAX_TOKENS, penalty), one.score, atol=1e-4)
    assert any(one.finished for one in beams[0]) or not early


@each_family
@pytest.mark.parametrize("penalty", [0.0, 3.0])
def test_one_beam_is_greedy(family, penalty):
    """Whatever the scores of longer answers."""
    for row, (beams,) in enumerate(engine(family).search(PROMPTS, BeamSearch(1, penalty), MAX_TOKENS)):
        tokens, log_probs = greedy_recomputed(family, row)
        assert beams.tokens == tokens
        np.testing.assert_allclose(beams.log_probs, log_probs, atol=1e-4)
    (beams,) = engine(family, end=frequent_end(family)).search(PROMPTS[:1], BeamSearch(1, penalty), MAX_TOKENS)[0]
    assert beams.finished and beams.tokens == greedy_recomputed(family, 0)[0][:1]


def test_enough_beams_find_the_best_of_all_answers():
    """Of seven words, three tokens long: 49 live answers at most, and 43 that end."""
    words, family, penalty, count = (END, 7, 11, 20, 33, 41, 59), "linear_transformer", 0.7, 3
    model = case(family, True)
    params = DecodeParams(ModelFunction(model.config, seed=0), model.params)
    few = Engine(params, mesh(1, 1, 1), end=END, allowed_V=np.isin(np.arange(VOCAB), words))
    (beams,) = few.search(PROMPTS[:1], BeamSearch(49, penalty), count)
    answers, next_ = [], next_after_prompt(family, PROMPTS[0])
    for size in range(1, count + 1):
        for ids in itertools.product(words, repeat=size):
            if END in ids[:-1] or (size < count and ids[-1] != END):
                continue
            total, ended = sum(next_(ids[:i])[ids[i]] for i in range(size)), ids[-1] == END
            answers.append((total / length_penalty(size, penalty), ids[:-1] if ended else ids, ended))
    answers.sort(key=lambda one: -one[0])
    assert_hypotheses(beams[:5], answers[:5])


@pytest.mark.parametrize("shape", [pytest.param((1, 1, 1), marks=pytest.mark.slow("the usual mesh")), (2, 2, 1)])
def test_answers_to_a_source(shape):
    """The memory of each prompt follows its beams; the batch is padded over four devices."""
    beams = test_conditioning.encoder_engine("gau", shape).search(PROMPTS, BeamSearch(WIDE), MAX_TOKENS)
    for prompt, answers in zip(PROMPTS, beams, strict=True):
        assert_hypotheses(answers, search_in_numpy(next_after_source("gau", prompt), WIDE, 0.6, MAX_TOKENS))


def test_answers_after_a_prefix():
    beams = test_conditioning.engine("flash_quad").search(PROMPTS, BeamSearch(WIDE), MAX_TOKENS)
    for prompt, answers in zip(PROMPTS, beams, strict=True):
        assert_hypotheses(answers, search_in_numpy(next_after_prefix("flash_quad", prompt), WIDE, 0.6, MAX_TOKENS))


def test_more_beams_than_possible_answers():
    """With one word besides the end, only four answers have at most three tokens."""
    model = case("linear_transformer", True)
    params = DecodeParams(ModelFunction(model.config, seed=0), model.params)
    one = Engine(params, mesh(1, 1, 1), end=END, allowed_V=np.isin(np.arange(VOCAB), (END, 7)))
    (beams,) = one.search(PROMPTS[:1], BeamSearch(8, 0.0), 3)
    assert {(*x.tokens, x.finished) for x in beams} == {(True,), (7, True), (7, 7, True), (7, 7, 7, False)}
    assert sorted((x.score for x in beams), reverse=True) == [x.score for x in beams]


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
