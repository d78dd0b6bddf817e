"""Beam search: against all answers that there are, against a search in NumPy, and against greedy decoding."""

import functools
import itertools

import numpy as np
import pytest
from models.cases import LENGTH, case

from flash_lm.errors import InputError
from flash_lm.inference.decoding import Hypothesis
from flash_lm.inference.engine import Engine
from flash_lm.inference.held_params import HeldParams
from flash_lm.inference.settings import BeamSearch
from flash_lm.training.state import ModelFunction
from inference.test_engine import ALLOWED, END, MAX_TOKENS, PROMPTS, VOCAB, engine, mesh, recomputed
from inference.test_given import reading_engine, written

pytestmark = pytest.mark.usefixtures("usual_promotion")
# One whose state is a sum, one whose state must be settled, and one with a cache.
each_family = pytest.mark.parametrize("family", ["linear_transformer", "flash", "transformer"])
WIDE = 4


def normaliser(tokens: int, penalty: float) -> float:
    return ((5 + tokens) / 6) ** penalty


@functools.cache
def log_probs_after(family: str, ids: tuple[int, ...]) -> np.ndarray:
    """The next token's log-probabilities, the whole row read again; −∞ for ids that may not be generated."""
    padded = np.zeros((2, LENGTH), np.int32)
    padded[:, : len(ids)] = ids
    model = case(family, True)
    logits = np.asarray(model.logits(model.params, padded), np.float64)[0, len(ids) - 1]
    log_probs = logits - np.logaddexp.reduce(logits)
    return np.where(ALLOWED, log_probs, -np.inf)


def searched(family: str, prompt: np.ndarray, beams: int, penalty: float, count: int) -> list[tuple]:
    """The answers, best first, as (score, tokens, whether it ended): lists and loops, without early stopping."""
    live: list[tuple] = [(0.0, ())]
    done: list[tuple] = []
    for place in range(count):
        after = [
            (total + log_prob, (*ids, token))
            for total, ids in live
            for token, log_prob in enumerate(log_probs_after(family, (*prompt.tolist(), *ids)))
            if log_prob > -np.inf
        ]
        after = sorted(after, key=lambda one: -one[0])[: 2 * beams]
        done += [
            (total / normaliser(place + 1, penalty), ids[:-1], True) for total, ids in after[:beams] if ids[-1] == END
        ]
        live = [one for one in after if one[1][-1] != END][:beams]
    done += [(total / normaliser(count, penalty), ids, False) for total, ids in live]
    return sorted(done, key=lambda one: -one[0])[:beams]


def assert_found(found: list[Hypothesis], expected: list[tuple]) -> None:
    for one, (score, ids, ended) in zip(found, expected, strict=True):
        assert (one.tokens, one.finished) == (list(ids), ended)
        np.testing.assert_allclose(one.score, score, atol=1e-4)


@each_family
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_is_a_search_in_numpy(family, penalty):
    found = engine(family).search(PROMPTS, BeamSearch(WIDE, penalty), MAX_TOKENS)
    for prompt, answers in zip(PROMPTS, found, strict=True):
        assert_found(answers, searched(family, prompt, WIDE, penalty, MAX_TOKENS))
        for one in answers:
            if not one.finished:
                total = sum(one.log_probs)
                np.testing.assert_allclose(total / normaliser(MAX_TOKENS, penalty), one.score, atol=1e-4)


@each_family
def test_one_beam_is_greedy(family):
    for row, (found,) in enumerate(engine(family).search(PROMPTS, BeamSearch(1), MAX_TOKENS)):
        tokens, log_probs = recomputed(family, row)
        assert found.tokens == tokens
        np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-4)


def test_enough_beams_find_the_best_of_all_answers():
    """Of seven words, three tokens long: 7 + 49 + 343 beams are never too few."""
    words, family, penalty, count = (END, 7, 11, 20, 33, 41, 59), "linear_transformer", 0.7, 3
    model = case(family, True)
    held = HeldParams(ModelFunction(model.config, seed=0), model.params)
    few = Engine(held, mesh(1, 1, 1), end=END, allowed_V=np.isin(np.arange(VOCAB), words))
    (found,) = few.search(PROMPTS[:1], BeamSearch(49, penalty), count)
    answers = []
    for size in range(1, count + 1):
        for ids in itertools.product(words, repeat=size):
            if END in ids[:-1] or (size < count and ids[-1] != END):
                continue
            before = PROMPTS[0].tolist()
            each = [log_probs_after(family, (*before, *ids[:i]))[ids[i]] for i in range(size)]
            ended = ids[-1] == END
            answers.append((sum(each) / normaliser(size, penalty), ids[:-1] if ended else ids, ended))
    answers.sort(key=lambda one: -one[0])
    assert_found(found[:5], answers[:5])


def test_answers_to_a_source():
    """The memory of each prompt goes with its beams; and the batch is padded over four devices."""
    for shape in ((1, 1, 1), (2, 2, 1)):
        found = reading_engine("gau", shape).search(PROMPTS, BeamSearch(1), MAX_TOKENS)
        assert [answers[0].tokens for answers in found] == [written("gau", row)[0] for row in range(len(PROMPTS))]


def test_more_beams_than_answers():
    """With one word besides the end, there are four answers of at most three tokens."""
    model = case("linear_transformer", True)
    held = HeldParams(ModelFunction(model.config, seed=0), model.params)
    one = Engine(held, mesh(1, 1, 1), end=END, allowed_V=np.isin(np.arange(VOCAB), (END, 7)))
    (found,) = one.search(PROMPTS[:1], BeamSearch(8, 0.0), 3)
    assert {(*x.tokens, x.finished) for x in found} == {(True,), (7, True), (7, 7, True), (7, 7, 7, False)}
    assert sorted((x.score for x in found), reverse=True) == [x.score for x in found]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beams": 0}, "beams=0 must be from 1 to 256"), ({"length_penalty": -1.0}, "length_penalty=-1.0 must be from 0")],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(InputError, match=message):
        BeamSearch(**settings)
