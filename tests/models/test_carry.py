"""State carried between batches: a sequence in several rows equals the full sequence, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracles import families as oracle_families

from flash_lm import build_model
from flash_lm.errors import InputError
from flash_lm.models.model_inputs import ModelInputs
from models.cases import (
    BATCH,
    LENGTH,
    assert_close,
    assert_trees_close,
    case,
    model_config,
    targets,
    tokens,
)

RTOL = 1e-5
# Families that limit the length themselves cannot be carried.
CARRIED = [name for name, row in oracle_families.FAMILIES.items() if row.constant_state and not row.limits_length]
LENGTHS = np.array([[13, 8], [16, 5]])  # two rows per sequence, in a batch of two, padded to 16


def carried_case(family: str):
    learned = oracle_families.FAMILIES[family].absolute == "learned"
    return case(family, True, **({"absolute_positions": "none", "rotary": True} if learned else {}))


def loss(logits, targets_, weights) -> jax.Array:
    return (weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets_)).sum()


def split_into_rows(x: np.ndarray) -> list[np.ndarray]:
    """Splits the sequences into two batches of length 16, padded with garbage."""
    starts, rows = np.zeros(BATCH, int), []
    for lengths in LENGTHS:
        row = np.random.default_rng(5).integers(61, size=(BATCH, 16))
        for b in range(BATCH):
            row[b, : lengths[b]] = x[b, starts[b] : starts[b] + lengths[b]]
        rows.append(row)
        starts = starts + lengths
    return rows


@pytest.mark.representatives("flash")
@pytest.mark.parametrize("family", CARRIED)
def test_rows_that_continue_equal_the_full_sequence(family):
    """Logits, loss, and gradients, which also flow through the state; rows may end anywhere in a chunk."""
    model, ends = carried_case(family), LENGTHS.sum(axis=0)
    weights = (np.arange(LENGTH)[None] < ends[:, None]).astype(np.float32)

    def carried_loss(params):
        bound, total, row_logits = model.model(params), 0.0, []
        state, begins = bound.init_state(BATCH), jnp.ones(BATCH, bool)
        for inputs, wanted, lengths in zip(split_into_rows(tokens()), split_into_rows(targets()), LENGTHS, strict=True):
            features, state = bound.carry(inputs, state, jnp.asarray(lengths), begins)
            logits, begins = bound.logits(features), jnp.zeros(BATCH, bool)
            total += loss(logits, wanted, (np.arange(16)[None] < lengths[:, None]).astype(np.float32))
            row_logits.append(logits)
        return total, (row_logits, state.positions_B)

    logits, expected, expected_grads = model.run(None, weights=weights)
    (total, (rows, positions)), grads = jax.jit(jax.value_and_grad(carried_loss, has_aux=True))(model.params)
    np.testing.assert_array_equal(positions, ends)
    for b in range(BATCH):
        joined = np.concatenate([np.asarray(row)[b, :n] for row, n in zip(rows, LENGTHS[:, b], strict=True)])
        assert_close(joined, logits[b, : ends[b]], RTOL)
    np.testing.assert_allclose(total, expected, rtol=RTOL)
    assert_trees_close(jax.tree.map(np.asarray, grads), expected_grads, 2e-5)


def test_memory_without_gradient_when_carried():
    """From an empty state Transformer-XL's default has the gradients of the parallel form."""
    model, weights = case("transformer_xl", True, **{"xl.memory_gradient": False}), np.ones((BATCH, LENGTH), np.float32)

    def carried_loss(params):
        bound = model.model(params)
        lengths, begins = jnp.full(BATCH, LENGTH), jnp.ones(BATCH, bool)
        features, _ = bound.carry(tokens(), bound.init_state(BATCH), lengths, begins)
        return loss(bound.logits(features), targets(), weights)

    expected, through = model.run(None)[2], case("transformer_xl", True).run(None)[2]
    actual = jax.tree.map(np.asarray, jax.jit(jax.grad(carried_loss))(model.params))
    assert_trees_close(actual, expected, RTOL)
    differs = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-3 * np.abs(b).max(), expected, through)
    assert all(jax.tree.leaves(differs["layers"]["sublayer_0"]["key"])), "the memory has no part in this"


@pytest.mark.parametrize("family", ["flash", "performer", "transformer_xl"])
def test_a_new_sequence_resets_the_state(family):
    """A new sequence ignores the earlier state, up to rounding; the other sequence of the batch continues."""
    model = carried_case(family)
    carry = jax.jit(lambda params, *args: model.model(params).carry(*args))
    lengths, all_begin = np.full(BATCH, 16), np.ones(BATCH, bool)
    _, before = carry(model.params, tokens()[:, :16], model.init_state(), lengths, all_begin)
    mixed, state = carry(model.params, tokens()[:, 13:], before, lengths, np.array([False, True]))
    anew, _ = carry(model.params, tokens()[:, 13:], before, lengths, all_begin)
    fresh, _ = carry(model.params, tokens()[:, 13:], model.init_state(), lengths, all_begin)
    mixed, fresh = np.asarray(mixed), np.asarray(fresh)
    assert_close(mixed[1], fresh[1], 1e-6)
    assert_close(anew, fresh, 1e-6)
    assert np.abs(mixed[0] - fresh[0]).max() > 1e-3
    np.testing.assert_array_equal(state.positions_B, [32, 16])


@pytest.mark.parametrize("family", ["flash", "mega"])
def test_dropout_is_that_of_the_parallel_form(family):
    """From an empty state, with the same random key."""
    model, key = case(family, True, dropout=0.3), jax.random.key(3)
    expected = jax.jit(lambda params: model.model(params).features(ModelInputs(tokens()), key))(model.params)

    def carried_features(params):
        bound = model.model(params)
        begins = jnp.ones(BATCH, bool)
        return bound.carry(tokens(), bound.init_state(BATCH), jnp.full(BATCH, LENGTH), begins, key)[0]

    assert_close(np.asarray(jax.jit(carried_features)(model.params)), np.asarray(expected), RTOL)


def test_states_are_cut_as_microbatches_are():
    state = case("flash", True).init_state(6)
    state = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), state)
    parts = state.split_microbatches(2)
    np.testing.assert_array_equal(parts.positions_B, [[0, 2, 4], [1, 3, 5]])
    leaf, cut = jax.tree.leaves(state.layers)[0], jax.tree.leaves(parts.layers)[0]
    np.testing.assert_array_equal(cut[1], leaf[:, 1::2])
    jax.tree.map(np.testing.assert_array_equal, parts.merge_microbatches(), state)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("transformer_plus_plus", {}, "grows with the text"),
        ("reformer", {"absolute_positions": "none"}, "grows with the text"),
        ("linear_transformer", {}, "end at model.max_length=32.*absolute_positions=none"),
        ("aft_local", {"absolute_positions": "none"}, "end at model.max_length=32.*another family"),
        ("cosformer", {"absolute_positions": "none"}, "end at model.cosformer.cos_length=32"),
        ("performer", {"absolute_positions": "none", "favor.redraw": True}, "model.favor.redraw=True"),
        ("flash", {"causal": False}, "causal"),
    ],
)
def test_models_that_cannot_be_carried_raise_errors(family, keys, message):
    config = model_config(family, **{"causal": True, **keys})
    model = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match=message):
        model.check_carried()
