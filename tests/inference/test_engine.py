"""The decode loop against the model's parallel form recomputed for every token, for every family."""

import functools

import jax
import numpy as np
import pytest
from models.cases import LENGTH, SHAPE, case

from flash_lm.inference.engine import Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.models.families import FAMILIES
from flash_lm.training.state import ModelFunction

END, VOCAB = 2, SHAPE["vocab_size"]
GREEDY = SamplingArrays.of(Sampling(temperature=0))
PROMPTS = [np.random.default_rng(i).integers(5, VOCAB, size=n).astype(np.int32) for i, n in enumerate((3, 17, 9))]
MAX_TOKENS = 8
each_family = pytest.mark.parametrize("family", FAMILIES)


def mesh(*shape: int):
    names = ("data", "fsdp", "tensor")
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:count])


def allowed(*never: int) -> np.ndarray:
    return ~np.isin(np.arange(VOCAB), (0, 1, 3, *never))


@functools.cache
def engine(family: str, shape: tuple[int, ...] = (1, 1, 1), end: int = END) -> Engine:
    model = ModelFunction(case(family, True).config, seed=0)
    params = jax.tree.map(lambda x: jax.device_put(x), case(family, True).params)
    return Engine(model, params, mesh(*shape), end=end, allowed_V=allowed())


@functools.cache
def recomputed(family: str, row: int, count: int = MAX_TOKENS) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, the whole prefix again for each."""
    model, ids, log_probs = case(family, True), PROMPTS[row].tolist(), []
    for _ in range(count):
        padded = np.zeros((2, LENGTH), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.asarray(model.logits(model.params, padded), np.float64)[0, len(ids) - 1]
        token = int(np.where(allowed(), logits, -np.inf).argmax())
        if token == END:
            break
        log_probs.append(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        ids.append(token)
    return ids[len(PROMPTS[row]) :], log_probs


def assert_row(new, b: int, family: str, row: int) -> None:
    tokens, log_probs = recomputed(family, row)
    assert new.tokens_BxT[b, : new.lengths_B[b]].tolist() == tokens
    np.testing.assert_allclose(new.log_probs_BxT[b, : new.lengths_B[b]], log_probs, atol=1e-4)
    assert new.finished_B[b] == (len(tokens) < MAX_TOKENS)


@each_family
def test_a_batch_of_different_lengths_is_each_prompt_alone(family):
    one = engine(family)
    _, new = one.advance(one.prefill(PROMPTS, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    for row in range(len(PROMPTS)):
        assert_row(new, row, family, row)


@each_family
def test_scores_are_those_of_the_parallel_form(family):
    one = engine(family)
    pairs = [recomputed(family, row) for row in range(len(PROMPTS))]
    continuations = [np.array(tokens or [7], np.int32) for tokens, _ in pairs]
    for scored, (tokens, log_probs) in zip(one.score(PROMPTS, continuations), pairs, strict=True):
        if tokens:
            np.testing.assert_allclose(scored, log_probs, atol=1e-4)


def test_a_row_ends_at_end_of_text_and_the_others_go_on():
    """The second token of one row is made its end."""
    tokens, _ = recomputed("flash", 1)
    one = engine("flash", end=tokens[1])
    _, new = one.advance(one.prefill(PROMPTS, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    assert (new.lengths_B[1], new.finished_B[1]) == (tokens.index(tokens[1]), True)
    for row in (0, 2):
        full, _ = recomputed("flash", row)
        stop = full.index(tokens[1]) if tokens[1] in full else len(full)
        assert new.tokens_BxT[row, : new.lengths_B[row]].tolist() == full[:stop]


def test_many_short_calls_are_one_long_call():
    """Samples too: a token's key depends on its row and place alone."""
    one, settings = engine("flash"), SamplingArrays.of(Sampling(temperature=1.5, top_k=20))
    _, whole = one.advance(one.prefill(PROMPTS, MAX_TOKENS), settings, 5, MAX_TOKENS)
    carry, parts = one.prefill(PROMPTS, MAX_TOKENS), []
    for size in (1, 4, 3):
        carry, new = one.advance(carry, settings, 5, size)
        parts.append(new)
    for row in range(len(PROMPTS)):
        pieces = [part.tokens_BxT[row, : part.lengths_B[row]] for part in parts]
        assert np.concatenate(pieces).tolist() == whole.tokens_BxT[row, : whole.lengths_B[row]].tolist()
    _, other = one.advance(one.prefill(PROMPTS, MAX_TOKENS), settings, 6, MAX_TOKENS)
    assert not np.array_equal(other.tokens_BxT, whole.tokens_BxT)


def test_other_lengths_compile_nothing():
    """Within a bucket: prompts of 1 to 16 tokens, 1 to 16 new ones, any settings."""
    one = engine("flash")
    sizes = lambda: (one._prefill._cache_size(), one._advance._cache_size(), one._score._cache_size())

    def work(length: int, max_tokens: int, settings: SamplingArrays) -> None:
        prompts = [np.arange(5, 5 + length, dtype=np.int32)] * 3
        one.advance(one.prefill(prompts, max_tokens), settings, length, max_tokens)
        one.score(prompts, [np.arange(5, 9, dtype=np.int32)] * 3)

    work(12, 16, GREEDY)
    before = sizes()
    for length, max_tokens in ((1, 1), (7, 3), (11, 12), (9, 16)):
        work(length, max_tokens, SamplingArrays.of(Sampling(temperature=0.1 * length)))
    assert sizes() == before


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("family", ["flash", "transformer_plus_plus"])
def test_sharded(family, shape):
    """Rows spread over the devices, filled up to a number that divides over them."""
    one = engine(family, shape)
    _, new = one.advance(one.prefill(PROMPTS, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    for row in range(len(PROMPTS)):
        assert_row(new, row, family, row)


def test_pieces_of_a_long_prompt(monkeypatch):
    monkeypatch.setattr("flash_lm.inference.engine.PIECE", 16)
    one = engine("flash")
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[2]]  # 17 tokens: more than one piece
    _, new = one.advance(one.prefill(prompts, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    for b, row in enumerate((1, 0, 2)):
        assert_row(new, b, "flash", row)


def test_a_bidirectional_model_is_refused():
    model = ModelFunction(case("flash", False).config, seed=0)
    with pytest.raises(ValueError, match="causal"):
        Engine(model, {}, mesh(1, 1, 1), end=END, allowed_V=allowed())
