"""prefill and step equal the parallel form, and the decode state has the right size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import families as oracle_families

from flash_lm.families.family import FAMILIES
from flash_lm.layers import quadratic_core
from models.cases import BATCH, CAUSAL, LENGTH, SHAPE, Case, assert_close, case, set_positions, state_bytes, tokens

pytestmark = pytest.mark.every_family

RTOL = 1e-5
NORMALIZED = [name for name, row in oracle_families.FAMILIES.items() if row.reads_normalizer]
CONSTANT = [name for name, row in oracle_families.FAMILIES.items() if row.constant_state]
each_family = pytest.mark.parametrize("family", CAUSAL)
# Tokens that the two sequences have consumed: none, a full chunk, more and less than one, all.
another_split = pytest.mark.slow("other numbers of tokens: the same compiled functions")
SPLITS = [(0, 13), (16, 23), *(pytest.param(split, marks=another_split) for split in ((8, 7), (29, 1)))]


@functools.cache
def parallel(family: str) -> np.ndarray:
    model = case(family, True)
    return np.asarray(model.logits(model.params, tokens()))


def pad_tokens(starts, lengths) -> np.ndarray:
    """Takes lengths[b] tokens from starts[b], then garbage up to LENGTH."""
    inputs = np.random.default_rng(7).integers(SHAPE["vocab_size"], size=(BATCH, LENGTH))
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        inputs[b, :length] = tokens()[b, start : start + length]
    return inputs


def assert_prefilled(family, logits, starts, lengths):
    logits = np.asarray(logits)
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length:
            assert_close(logits[b, :length], parallel(family)[b, start : start + length], RTOL)


def assert_steps_follow(model, family, state, positions):
    """Steps both sequences to their ends and compares; a finished sequence gets garbage and is not compared."""
    positions = np.array(positions)
    for _ in range(LENGTH - positions.min()):
        now = np.minimum(positions, LENGTH - 1)
        logits, state = model.step(model.params, tokens()[np.arange(BATCH), now], state)
        logits = np.asarray(logits)
        for b in np.flatnonzero(positions < LENGTH):
            assert_close(logits[b], parallel(family)[b, positions[b]], RTOL, f"row {b}, position {positions[b]}")
        positions += 1
    np.testing.assert_array_equal(state.positions_B, positions)
    return state


@pytest.mark.parametrize("split", SPLITS, ids=str)
@each_family
def test_prefill_then_steps(family, split):
    model = case(family, True)
    logits, state = model.prefill(model.params, pad_tokens((0, 0), split), model.init_state(), np.array(split))
    assert_prefilled(family, logits, (0, 0), split)
    assert_steps_follow(model, family, state, split)


@each_family
def test_prefill_continues_from_anywhere(family):
    """Each sequence continues from any position in a chunk, over several borders, or with no new token."""
    model, state = case(family, True), case(family, True).init_state()
    starts = np.zeros(BATCH, int)
    for lengths in ((5, 3), (9, 0), (0, 16), (10, 9)):
        logits, state = model.prefill(model.params, pad_tokens(starts, lengths), state, np.array(lengths))
        assert_prefilled(family, logits, starts, lengths)
        starts += lengths
        np.testing.assert_array_equal(state.positions_B, starts)
    assert_steps_follow(model, family, state, starts)


@pytest.mark.parametrize("family", ["transformer_plus_plus", "flash_quad"])
def test_prefill_reads_the_filled_part_of_the_cache(family, monkeypatch):
    """The cache has eight parts, and the sequences end in different ones."""
    monkeypatch.setattr(quadratic_core, "_SMALLEST_SHARE", 4)
    model = Case(family, True, {})
    state, starts = model.init_state(), np.zeros(BATCH, int)
    for lengths in ((3, 1), (1, 0), (0, 16), (2, 3), (23, 9)):
        logits, state = model.prefill(model.params, pad_tokens(starts, lengths), state, np.array(lengths))
        assert_prefilled(family, logits, starts, lengths)
        starts += lengths


@pytest.mark.representatives("flash", "linear_transformer")
@each_family
def test_prefill_in_full_chunks_without_lengths(family):
    model, state = case(family, True), case(family, True).init_state()
    for start in (0, 8, 16):
        logits, state = model.prefill(model.params, tokens()[:, start : start + 8], state)
        assert_close(logits, parallel(family)[:, start : start + 8], RTOL)
    assert_steps_follow(model, family, state, (24, 24))


@each_family
def test_prefill_of_no_tokens_changes_nothing(family):
    model = case(family, True)
    _, state = model.prefill(model.params, pad_tokens((0, 0), (13, 6)), model.init_state(), np.array((13, 6)))
    logits, after = model.prefill(model.params, tokens()[:, :0], state)
    assert logits.shape == (BATCH, 0, SHAPE["vocab_size"])
    jax.tree.map(np.testing.assert_array_equal, after, state)


@each_family
def test_padding_of_a_prefill_has_no_effect(family):
    """Two prefills that differ only in the padding are followed by the same steps."""
    model, lengths = case(family, True), np.array((13, 6))
    inputs = pad_tokens((0, 0), lengths)
    other = np.where(np.arange(LENGTH)[None] < lengths[:, None], inputs, (inputs + 1) % SHAPE["vocab_size"])
    both = [model.prefill(model.params, x, model.init_state(), lengths) for x in (inputs, other)]
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(*(np.asarray(logits)[b, :length] for logits, _ in both))
    states = [state for _, state in both]
    for now in range(12):
        token = tokens()[:, now]
        results = [model.step(model.params, token, state) for state in states]
        np.testing.assert_array_equal(results[0][0], results[1][0])
        states = [state for _, state in results]


@each_family
def test_state_bytes(family):
    model, longer = case(family, True), case(family, True, max_length=64)
    shapes = lambda model, capacity: jax.eval_shape(lambda: model.init_state(BATCH, capacity))
    sizes = [state_bytes(shapes(*of)) for of in ((model, 8), (model, 16), (model, None), (longer, None))]
    if family in CONSTANT:
        assert len(set(sizes)) == 1
    else:  # twice the capacity, twice the cache
        last = (
            max(model.config.short_convolution - 1, 0) * 2 * SHAPE["model_dim"]
        )  # inputs of the convolutions of queries and keys
        last += oracle_families.FAMILIES[family].other_inputs(model.settings)
        fixed = 4 * BATCH * (1 + SHAPE["num_layers"] * last)
        assert [size - fixed for size in sizes] == [(sizes[0] - fixed) * n for n in (1, 2, 4, 8)]
    state = model.init_state()
    layout = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    _, state = model.prefill(model.params, tokens(), state, np.array((20, 3)))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == layout
    _, state = model.step(model.params, tokens()[:, 0], state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == layout


@pytest.mark.representatives("flash", "aft_local", "gated_deltanet")
@pytest.mark.parametrize("family", CONSTANT)
def test_constant_states_have_no_maximum_length(family):
    """`capacity` limits growing states only; learned positions have their separate limit."""
    model = case(family, True)
    state = model.init_state(capacity=4)
    _, state = model.prefill(model.params, tokens()[:, :8], state)
    assert_steps_follow(model, family, state, (8, 8))


@pytest.mark.parametrize("family", [name for name in CAUSAL if name not in CONSTANT])
def test_capacity_limits_growing_states(family):
    """An error outside jit; inside, NaN in the sequence that is too long, and only there."""
    model = case(family, True)
    near_end = set_positions(model.init_state(), np.array([31, 2]))
    logits, at_end = model.step(model.params, tokens()[:, 0], near_end)
    assert np.isfinite(logits).all()
    logits = np.asarray(model.step(model.params, tokens()[:, 0], at_end)[0])
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    logits = np.asarray(model.prefill(model.params, tokens(), near_end, np.array((2, 3)))[0])
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1, :3]).all()
    outside_jit = model.model(model.params)
    with pytest.raises(ValueError, match=r"row 0 .*33.*capacity of 32"):
        outside_jit.step(jnp.asarray(tokens()[:, 0]), set_positions(near_end, np.array([32, 3])))
    with pytest.raises(ValueError, match=r"row 1 .*capacity of 32"):
        outside_jit.prefill(jnp.asarray(tokens()), set_positions(near_end, np.array([0, 4])))


@pytest.mark.parametrize("family", FAMILIES)
def test_bidirectional_models_do_not_decode(family):
    with pytest.raises(ValueError, match="causal"):
        case(family, False).init_state()


@pytest.mark.parametrize("normalizer", ["length", "length_everywhere"])
@pytest.mark.parametrize("family", NORMALIZED)
def test_normalizers_that_need_the_full_length_do_not_decode(family, normalizer):
    with pytest.raises(ValueError, match="normalizer"):
        case(family, True, normalizer=normalizer).init_state()


@pytest.mark.parametrize("family", [name for name in CAUSAL if name not in NORMALIZED])
def test_other_families_ignore_the_normalizer(family):
    model = case(family, True, normalizer="length")
    model.init_state()
    np.testing.assert_array_equal(model.logits(model.params, tokens()), parallel(family))


OPTIONS = [
    ("flash", {"divides": "weights", "gau.relative_bias": "rope", "gau.attention_function": "laplace"}),
    (
        "flash",
        {"chunks.local_attention": False, "absolute_positions": "learned", "gau.heads": 2, "gau.query_key": "dense"},
    ),
    ("flash", {"chunks.global_attention": False, "gau.relative_bias": "t5", "gau.attention_function": "softmax"}),
    ("flash", {"chunks.overlapping": True}),
    ("transformer_plus_plus", {"num_heads": 4, "num_kv_heads": 2}),
    ("longformer", {"window.global_tokens": 3}),
]
more_options = pytest.mark.slow("compiles a model, its prefill and its step")
MORE_OPTIONS = [
    ("mc_tfm", {"normalizer": "7", "chunks.local_attention": False}),
    ("mc_tfm", {"chunks.global_attention": False}),
    ("mc_tfm", {"chunks.overlapping": True, "normalizer": "7"}),
    ("flash", {"chunks.overlapping": True, "chunks.global_attention": False, "gau.relative_bias": "rope"}),
    ("flash_quad", {"gau.relative_bias": "rope", "gau.attention_function": "softmax"}),
    ("flash_quad", {"divides": "scores", "normalizer": "7"}),
    ("flash", {"divides": "weights", "normalizer": "7"}),
    ("reformer", {"lsh.num_hashes": 3, "lsh.num_buckets": 2, "lsh.window": 64, "short_convolution": 3}),
    ("log_sparse", {"log_sparse.restart": 7, "log_sparse.convolution": "full"}),
    ("window_linear", {"window_linear.linear_attention": False, "window_linear.first_tokens": 0}),
    ("longformer", {"window.global_tokens": 9, "window.dilated_heads": 2, "window.dilations": (3,)}),
]


@pytest.mark.parametrize(
    ("family", "options"),
    OPTIONS + [pytest.param(*one, marks=more_options) for one in MORE_OPTIONS],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_options_decode(family, options):
    model, split = case(family, True, **options), (13, 6)
    expected = np.asarray(model.logits(model.params, tokens()))
    logits, state = model.prefill(model.params, pad_tokens((0, 0), split), model.init_state(), np.array(split))
    for b, length in enumerate(split):
        assert_close(np.asarray(logits)[b, :length], expected[b, :length], RTOL)
    for n in range(16):
        now = np.array(split) + n
        logits, state = model.step(model.params, tokens()[np.arange(BATCH), now], state)
        assert_close(logits, expected[np.arange(BATCH), now], RTOL)


def test_shared_heads_of_keys_are_cached_once():
    """A quarter of the key heads takes a quarter of the cache."""
    sizes = [
        state_bytes(case("transformer_plus_plus", True, num_heads=4, num_kv_heads=heads).init_state().layers)
        for heads in (4, 1)
    ]
    assert sizes[0] == 4 * sizes[1]


@pytest.mark.parametrize("family", ["transformer_plus_plus", "flash", "mc_tfm"])
def test_states_in_bfloat16(family):
    """Cached tokens take half the bytes; the error of the logits is that of bfloat16 rounding."""
    exact, model = case(family, True), case(family, True, state_dtype="bfloat16")
    before, after = ([x for x in jax.tree.leaves(each.init_state().layers) if x.ndim > 4] for each in (exact, model))
    halved = [2 * y.nbytes == x.nbytes for x, y in zip(before, after, strict=True)]
    layer_halved = [True, True] if family == "transformer_plus_plus" else [True, True, True, False]
    assert halved == layer_halved * (len(halved) // len(layer_halved))
    _, state = model.prefill(model.params, tokens()[:, :13], model.init_state())
    for now in range(13, 20):
        logits, state = model.step(model.params, tokens()[:, now], state)
        assert logits.dtype == jnp.float32
        error = np.abs(logits - parallel(family)[:, now]).max() / np.abs(parallel(family)).max()
        assert 1e-5 < error < 0.03


@pytest.mark.parametrize("family", ["flash", "mc_tfm"])
def test_sums_of_a_bfloat16_model_are_float32(family):
    """A running sum in bfloat16 would stop growing after a few hundred tokens."""
    state = case(family, True, dtype="bfloat16").init_state()
    assert {leaf.dtype for leaf in jax.tree.leaves(state.layers)} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
