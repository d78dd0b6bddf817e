"""The decode loop against the parallel form recomputed for each token, for every family."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.cases import CAUSAL, LENGTH, SHAPE, case

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.engine import Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.training.sharding import param_shardings
from flash_lm.training.train_state import ModelFunction

pytestmark = [pytest.mark.representatives("transformer_plus_plus", "flash"), pytest.mark.group("flash")]

END, VOCAB = 2, SHAPE["vocab_size"]
_MESH = parse(get_config()).mesh
RULES = dataclasses.replace(_MESH, rules=_MESH.rules[1:])  # 61 words cannot be split into two
GREEDY = SamplingArrays.from_sampling(Sampling(temperature=0))
PROMPTS = [np.random.default_rng(i).integers(5, VOCAB, size=n).astype(np.int32) for i, n in enumerate((3, 17, 9))]
MAX_TOKENS = 8
each_family = pytest.mark.parametrize("family", CAUSAL)


def mesh(*shape: int):
    names = ("data", "fsdp", "tensor")
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:count])


ALLOWED = ~np.isin(np.arange(VOCAB), (0, 1, 3))


@functools.cache
def engine(family: str, shape: tuple[int, ...] = (1, 1, 1), end: int = END) -> Engine:
    model = ModelFunction(case(family, True).config, seed=0)
    devices = mesh(*shape)
    shardings = param_shardings(jax.eval_shape(model.init), model.traits().matrix, RULES, devices)
    params = jax.device_put(case(family, True).params, shardings)
    return Engine(DecodeParams(model, params), devices, end=end, allowed_V=ALLOWED)


def greedy(compute_logits: Callable, ids: list[int], count: int = MAX_TOKENS) -> tuple[list[int], list[float]]:
    """Greedy tokens after `ids` and their log-probabilities; `compute_logits` reads a full padded row of LENGTH."""
    begins, log_probs = len(ids), []
    for _ in range(count):
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.asarray(compute_logits(padded), np.float64)[0, len(ids) - 1]
        token = int(np.where(ALLOWED, logits, -np.inf).argmax())
        if token == END:
            break
        log_probs.append(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        ids = [*ids, token]
    return ids[begins:], log_probs


@functools.cache
def greedy_recomputed(family: str, row: int, count: int = MAX_TOKENS) -> tuple[list[int], list[float]]:
    """`greedy` after a prompt; each token recomputes the full prefix."""
    model = case(family, True)
    twice = lambda padded: model.logits(model.params, np.concatenate([padded, np.zeros_like(padded)]))
    return greedy(twice, PROMPTS[row].tolist(), count)


def assert_row(new, b: int, family: str, row: int) -> None:
    tokens, log_probs = greedy_recomputed(family, row)
    assert new.tokens_BxT[b, : new.lengths_B[b]].tolist() == tokens
    np.testing.assert_allclose(new.log_probs_BxT[b, : new.lengths_B[b]], log_probs, atol=1e-4)
    assert new.finished_B[b] == (len(tokens) < MAX_TOKENS)


@each_family
def test_a_batch_of_different_lengths_equals_single_prompts(family):
    one = engine(family)
    _, new = one.advance(one.prefill(PROMPTS, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    for row in range(len(PROMPTS)):
        assert_row(new, row, family, row)


@each_family
def test_scores_equal_those_of_the_parallel_form(family):
    one = engine(family)
    pairs = [greedy_recomputed(family, row) for row in range(len(PROMPTS))]
    continuations = [np.array(tokens or [7], np.int32) for tokens, _ in pairs]
    for scored, (tokens, log_probs) in zip(one.score(PROMPTS, continuations), pairs, strict=True):
        if tokens:
            np.testing.assert_allclose(scored.log_probs, log_probs, atol=1e-4)


def test_a_row_ends_at_end_of_text_and_the_others_continue():
    """The second token of one row becomes its end token."""
    tokens, _ = greedy_recomputed("flash", 1)
    one = engine("flash", end=tokens[1])
    _, new = one.advance(one.prefill(PROMPTS, MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    assert (new.lengths_B[1], new.finished_B[1]) == (tokens.index(tokens[1]), True)
    for row in (0, 2):
        full, _ = greedy_recomputed("flash", row)
        stop = full.index(tokens[1]) if tokens[1] in full else len(full)
        assert new.tokens_BxT[row, : new.lengths_B[row]].tolist() == full[:stop]


def test_many_short_calls_equal_one_long_call():
    """Samples, too: a token's key depends on its row and position alone."""
    one, settings = engine("flash"), SamplingArrays.from_sampling(Sampling(temperature=1.5, top_k=20))
    _, full = one.advance(one.prefill(PROMPTS, MAX_TOKENS), settings, 5, MAX_TOKENS)
    carry, parts = one.prefill(PROMPTS, MAX_TOKENS), []
    for size in (1, 4, 3):
        carry, new = one.advance(carry, settings, 5, size)
        parts.append(new)
    for row in range(len(PROMPTS)):
        pieces = [part.tokens_BxT[row, : part.lengths_B[row]] for part in parts]
        assert np.concatenate(pieces).tolist() == full.tokens_BxT[row, : full.lengths_B[row]].tolist()
    _, other = one.advance(one.prefill(PROMPTS, MAX_TOKENS), settings, 6, MAX_TOKENS)
    assert not np.array_equal(other.tokens_BxT, full.tokens_BxT)


@pytest.mark.parametrize("family", ["flash", "transformer_plus_plus"])
def test_other_lengths_compile_nothing(family):
    """Within a bucket: prompts of 1 to 16 tokens, 1 to 16 new ones, in one call or two, at any temperature."""
    one = engine(family)
    loop = one._loop
    compiled = (loop.start, loop.prefill, loop.advance, loop.score)

    def generate(length: int, max_tokens: int, temperature: float) -> None:
        prompts = [np.arange(5, 5 + length, dtype=np.int32)] * 3
        settings = SamplingArrays.from_sampling(Sampling(temperature=temperature))
        carry, _ = one.advance(one.prefill(prompts, max_tokens), settings, length, max_tokens)
        one.advance(carry, settings, length, 1)
        one.score(prompts, [np.arange(5, 9, dtype=np.int32)] * 3)

    generate(8, 8, 0.0)
    before = [function._cache_size() for function in compiled]
    for length, max_tokens in ((1, 1), (7, 3), (5, 11), (6, 7)):
        generate(length, max_tokens, 0.1 * length)
    assert [function._cache_size() for function in compiled] == before


def test_the_state_is_donated_to_one_loop():
    one = engine("transformer_plus_plus")
    prefilled = one.prefill(PROMPTS, MAX_TOKENS)
    keys_B = jax.random.split(jax.random.key(0), len(PROMPTS))
    carry, _ = one.advance(prefilled, GREEDY, 0, 3)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(prefilled.state.layers))
    with jax.set_mesh(one._mesh):
        arguments = (one._params.unstacked, carry, GREEDY, keys_B, jnp.int32(3), 16)
        text = one._loop.advance.lower(*arguments).compile().as_text()
    aliased = text.splitlines()[0].count("may-alias") + text.splitlines()[0].count("must-alias")
    assert aliased == len(jax.tree.leaves(carry))
    one.advance(carry, GREEDY, 0, 3)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(carry.state))


def test_padding_rows_for_the_devices_delay_no_answer():
    tokens, _ = greedy_recomputed("flash", 1)
    one = engine("flash", (8, 1, 1), end=tokens[1])
    carry, new = one.advance(one.prefill(PROMPTS[1:2], MAX_TOKENS), GREEDY, 0, MAX_TOKENS)
    assert new.lengths_B[0] == tokens.index(tokens[1])
    assert int(carry.count_B[0]) == new.lengths_B[0] + 1


def test_the_penalty_is_for_tokens_of_prompt_and_output():
    """Against a loop over the full prefix."""
    model, penalty, ids = case("flash", True), 5.0, PROMPTS[1].tolist()
    for _ in range(MAX_TOKENS):
        padded = np.zeros((2, LENGTH), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.asarray(model.logits(model.params, padded), np.float64)[0, len(ids) - 1]
        for token in set(ids):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        ids.append(int(np.where(ALLOWED & (np.arange(VOCAB) != END), logits, -np.inf).argmax()))
    one, settings = (
        engine("flash", end=0),
        SamplingArrays.from_sampling(Sampling(temperature=0, repetition_penalty=penalty)),
    )
    _, new = one.advance(one.prefill(PROMPTS[1:2], MAX_TOKENS), settings, 0, MAX_TOKENS)
    expected = ids[len(PROMPTS[1]) :]
    assert END not in new.tokens_BxT[0, : new.lengths_B[0]] and expected != greedy_recomputed("flash", 1)[0]
    assert new.tokens_BxT[0, : new.lengths_B[0]].tolist() == expected


@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((1, 1, 2), marks=pytest.mark.slow("another mesh"))], ids=str)
@pytest.mark.parametrize("family", ["flash", "transformer_plus_plus"])
def test_sharded(family, shape):
    """Parameters sharded by the usual rules; the batch is sharded, and padded to a multiple of the devices."""
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
        Engine(DecodeParams(model, {}), mesh(1, 1, 1), end=END, allowed_V=ALLOWED)
