"""Bugs of other code in families with decaying sums, such as RetNet, Mamba-2 and Gated DeltaNet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import families as oracle_families

import flash_lm
from flash_lm.families.family import FAMILIES
from flash_lm.layers.context import make_context
from models.cases import LENGTH, SHAPE, case

each = pytest.mark.parametrize("family", [name for name in FAMILIES if oracle_families.FAMILIES[name].decays])


def ids(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(SHAPE["vocab_size"], size=(1, length)).astype(np.int32)


@pytest.mark.representatives("gated_deltanet")
@pytest.mark.parametrize(
    "causal",
    [True, pytest.param(False, marks=pytest.mark.slow("compiles another model: the causal form in both directions"))],
    ids=["causal", "bidirectional"],
)
@each
def test_documents_that_begin_inside_a_chunk(family, causal):
    """In prime-rl (#3000), axolotl (#3572) and Hydra states and convolutions cross documents in packed training."""
    one, lengths = case(family, causal, **oracle_families.FAMILIES[family].one_chunk), (5, 11, 1, 12)
    tokens, segment_ids = ids(LENGTH), np.repeat([[1, 2, 3, 4]], lengths, axis=1).astype(np.int32)
    packed = np.asarray(one.logits(one.params, tokens, segment_ids))
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        span = slice(start, start + length)
        alone = one.logits(one.params, tokens[:, span], np.ones((1, length), np.int32))
        np.testing.assert_allclose(packed[:, span], alone, rtol=2e-5, atol=2e-5)


@pytest.mark.representatives("retnet")
@each
def test_lengths_that_are_no_multiple_of_the_chunk(family):
    """They gave NaN in mamba (#352)."""
    one = case(family, True)
    full = np.asarray(one.logits(one.params, ids(LENGTH), None))
    for length in (1, 7, 8, 9, 17):
        some = one.logits(one.params, ids(LENGTH)[:, :length], None)
        np.testing.assert_allclose(some, full[:, :length], rtol=2e-5, atol=2e-5)


@pytest.mark.representatives("mamba2")
@each
def test_a_prompt_in_pieces_goes_on_from_the_last_inputs(family):
    """In mamba (#641) a second piece starts with an empty convolution and an empty state."""
    one, tokens = case(family, True), np.repeat(ids(LENGTH), 2, axis=0)
    full, state, start = np.asarray(one.logits(one.params, tokens, None)), one.init_state(), 0
    for stop in (2, 3, 12, LENGTH):
        logits, state = one.prefill(one.params, tokens[:, start:stop], state)
        np.testing.assert_allclose(logits, full[:, start:stop], rtol=2e-5, atol=2e-5)
        start = stop


@each
def test_sums_stay_float32_in_states_of_bfloat16(family):
    """A bfloat16 sum over thousands of tokens would lose its terms; only inputs and a chunk's keys are rounded."""
    state = jax.eval_shape(case(family, True, state_dtype="bfloat16").init_state)
    rounded_names = oracle_families.FAMILIES[family].rounded_state
    dtypes = {"sums": set(), "held": set()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.layers):
        name = jax.tree_util.keystr(path)
        if leaf.size:
            dtypes["held" if any(part in name for part in rounded_names) else "sums"].add(leaf.dtype)
    assert dtypes["sums"] == {jnp.dtype("float32")} and dtypes["held"] <= {jnp.dtype("bfloat16")}


@pytest.mark.representatives("gated_deltanet")
@each
def test_sequences_of_padding_are_finite(family):
    """Values and derivatives are finite, although the norm of a head divides zeros."""
    one = case(family, True)
    tokens, padding = ids(LENGTH), np.zeros((1, LENGTH), np.int32)
    squared_logits = lambda params: jnp.square(one.logits(params, tokens, padding)).sum()
    value, gradient = jax.jit(jax.value_and_grad(squared_logits))(one.params)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_slow_heads_forget_in_bfloat16_too():
    """1 − 2⁻⁹ is 1 in bfloat16: from the fifth head on RetNet would never forget."""

    @jax.jit
    def log_decay_of(x):
        mixer = flash_lm.build_mixer("retnet", model_dim=32, num_heads=16, rotary=False, rngs=nnx.Rngs(0))
        return mixer.sublayer.arrange(mixer.sublayer.maps(x), make_context(3, causal=True)).by.log_decay_BxHxL

    log_decay = np.asarray(log_decay_of(jnp.ones((1, 3, 32), jnp.bfloat16)))
    assert log_decay.dtype == jnp.float32
    np.testing.assert_allclose(log_decay[0, :, 0], np.log1p(-(2.0 ** -(5 + np.arange(16)))), rtol=1e-6)
    assert (np.exp(log_decay) < 1).all()


def test_deltanet_is_gated_deltanet_without_decay():
    """A decay rate of nearly zero equals delta.decay=False."""
    gated, plain = case("gated_deltanet", True), case("gated_deltanet", True, **{"delta.decay": False})
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: np.full_like(x, -60) if "log_rate" in jax.tree_util.keystr(path) else x, gated.params
    )
    plain_params = jax.tree_util.tree_map_with_path(lambda path, x: get_leaf(params, path), plain.params)
    same = plain.logits(plain_params, ids(LENGTH), None)
    np.testing.assert_allclose(gated.logits(params, ids(LENGTH), None), same, rtol=1e-5, atol=1e-5)


def get_leaf(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree
