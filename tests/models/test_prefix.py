"""Bidirectional prefix: which families support it, their oracles, and decoding."""

import functools

import jax
import numpy as np
import optax
import pytest
from oracles import families as oracle_families
from oracles.language_model import cross_entropy
from oracles.segments import visibility

from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES
from models.cases import BATCH, LENGTH, PACKED, SHAPE, assert_close, case, real_tokens, targets, tokens

SUPPORTED = [family for family, row in FAMILIES.items() if "prefix" in row.serves]
each_family = pytest.mark.parametrize("family", SUPPORTED)

# Prefix of each document in PACKED: within a chunk, across its border, all of it, none, longer than the document.
PREFIX = np.array([[9] * 10 + [0] * 3 + [4] * 9 + [0] * 4 + [0] * 3, [11] * 17 + [30] * 12], np.int32)
PREFIX_LENGTHS = np.array([13, 4], np.int32)  # for two sequences of one document


@functools.cache
def functions(family: str, **overrides):
    """Returns a function for logits, loss and gradient of sequences with a prefix."""
    model = case(family, True, **overrides)

    def loss(params, segment_ids, prefix):
        keep = (segment_ids > 0).astype(np.float32)
        logits = model.model(params)(tokens(), segment_ids, prefix=prefix)
        return (optax.softmax_cross_entropy_with_integer_labels(logits, targets()) * keep).sum(), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_which_families_support_it():
    assert [name for name in FAMILIES if oracle_families.FAMILIES[name].serves_prefix] == SUPPORTED


@each_family
def test_logits_and_gradients_of_packed_sequences(family):
    model, keep = case(family, True), real_tokens(PACKED)
    (_, logits), grads = functions(family)(model.params, PACKED, PREFIX)
    expected = model.oracle(PACKED, prefix=PREFIX)
    assert_close(np.asarray(logits)[keep], expected[keep], 1e-5)
    assert np.abs(expected - model.oracle(PACKED))[keep].max() > 0.1, "the prefix changes nothing"

    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), model.params)
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda g: rng.normal(size=g.shape) / max(np.linalg.norm(g), 1), grads)
    shares = jax.tree.leaves(jax.tree.map(lambda g, d: (np.asarray(g, np.float64) * d).sum(), grads, direction))

    def loss_at(step: float) -> float:
        at = jax.tree.map(lambda p, d: p + step * d, params, direction)
        return cross_entropy(model.oracle(PACKED, params=at, prefix=PREFIX), targets(), keep)

    slope = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    np.testing.assert_allclose(sum(shares), slope, rtol=0, atol=1e-5 * len(shares))


@pytest.mark.parametrize("family", ["transformer", "linear_transformer"])  # one mixer per layer
def test_a_token_sees_the_full_prefix_and_earlier_tokens_only(family):
    """With one layer, derivatives of a token's logits are nonzero exactly where the oracle's token sees."""
    model = case(family, True, num_layers=1)

    @jax.jit
    def derivatives(params):
        def logit_sums(table):
            return model.model(params | {"embedding": table})(tokens(), PACKED, prefix=PREFIX).sum(axis=-1)

        return jax.jacrev(logit_sums)(params["embedding"])

    gradients = np.abs(np.asarray(derivatives(model.params))).sum(axis=-1)  # B×L×V
    for b in range(BATCH):
        sees = visibility(PACKED[b].tolist(), True, PREFIX[b].tolist())
        for t in np.flatnonzero(PACKED[b]):
            for u in np.flatnonzero(PACKED[b]):
                assert (gradients[b, t, tokens()[b, u]] > 0) == sees(t, u), (b, t, u)


@each_family
def test_without_a_prefix_nothing_changes(family):
    model = case(family, True)
    (_, logits), _ = functions(family)(model.params, PACKED, np.zeros_like(PREFIX))
    assert_close(logits, model.logits(model.params, tokens(), PACKED), 1e-6)


@each_family
def test_one_prefill_and_steps_give_the_parallel_form(family):
    model = case(family, True)
    segment_ids = np.ones((BATCH, LENGTH), np.int32)
    (_, expected), _ = functions(family)(model.params, segment_ids, np.repeat(PREFIX_LENGTHS[:, None], LENGTH, axis=1))
    expected = np.asarray(expected)
    consumed = PREFIX_LENGTHS + np.array([3, 0], np.int32)  # one sequence has tokens after its prefix in the same call
    inputs = np.where(np.arange(LENGTH) < consumed[:, None], tokens(), 7)
    logits, state = model.prefill(model.params, inputs, model.init_state(), consumed, PREFIX_LENGTHS)
    for b in range(BATCH):
        assert_close(np.asarray(logits)[b, : consumed[b]], expected[b, : consumed[b]], 1e-5)
    positions = consumed.copy()
    while positions.min() < LENGTH:
        now = np.minimum(positions, LENGTH - 1)
        logits, state = model.step(model.params, tokens()[np.arange(BATCH), now], state)
        for b in np.flatnonzero(positions < LENGTH):
            assert_close(np.asarray(logits)[b], expected[b, positions[b]], 1e-5, f"row {b}, position {positions[b]}")
        positions += 1


def test_a_part_of_a_prefix_is_refused():
    model = case("linear_transformer", True)
    bound = model.model(model.params)
    with pytest.raises(InputError, match=r"row 0 has a prefix of 13 tokens, and this call its tokens 0 to 8: one call"):
        bound.prefill(tokens()[:, :8], model.init_state(), np.full(2, 8), PREFIX_LENGTHS)
    logits, _ = model.prefill(model.params, tokens()[:, :8], model.init_state(), np.full(2, 8), PREFIX_LENGTHS)
    assert np.isnan(np.asarray(logits)[0]).all()
    assert np.isfinite(np.asarray(logits)[1]).all()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SUPPORTED])
def test_other_families_raise_errors(family):
    model = case(family, "causal" in FAMILIES[family].serves)
    match = rf"model.family={family} cannot see a prefix both ways; families that can: transformer, "
    with pytest.raises(InputError, match=match if model.causal else "a prefix needs a causal model"):
        jax.eval_shape(lambda params: model.model(params)(tokens(), PACKED, prefix=PREFIX), model.params)


@pytest.mark.parametrize("family", ["transformer", "flash_quad"])
def test_blocks_of_keys_equal_all_pairs(family):
    """Sequences are longer than a block, and the prefix ends inside one: blocks after the query are visited."""
    length = 300
    inputs = np.random.default_rng(3).integers(SHAPE["vocab_size"], size=(1, length))
    prefix = np.full((1, length), 170, np.int32)
    outputs = []
    for implementation in ("plain", "blocked"):
        model = case(family, True, max_length=512, num_layers=1, **{"quadratic.implementation": implementation})
        outputs.append(jax.jit(lambda params, model=model: model.model(params)(inputs, prefix=prefix))(model.params))
    assert_close(outputs[1], outputs[0], 1e-5)
    causal = np.asarray(jax.jit(lambda params: model.model(params)(inputs))(model.params))
    assert np.abs(causal - outputs[0]).max() > 0.1


def test_the_kernel_of_all_pairs_sees_the_prefix():
    model, keep = case("flash_quad", True, kernels="pallas"), real_tokens(PACKED)
    logits = jax.jit(lambda params: model.model(params)(tokens(), PACKED, prefix=PREFIX))(model.params)
    assert_close(np.asarray(logits)[keep], model.oracle(PACKED, prefix=PREFIX)[keep], 1e-5)


def test_linear_attention_does_not_use_its_kernel_with_a_prefix():
    """Its kernel has one running sum, but a prefix needs another one."""
    model, keep = case("linear_transformer", True, kernels="pallas"), real_tokens(PACKED)
    logits = jax.jit(lambda params: model.model(params)(tokens(), PACKED, prefix=PREFIX))(model.params)
    assert_close(np.asarray(logits)[keep], model.oracle(PACKED, prefix=PREFIX)[keep], 1e-5)
