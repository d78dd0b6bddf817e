"""Bugs that public code of these families has or had, each tested here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_lm.config.experiment import parse_model
from flash_lm.families.family import FAMILIES, complete
from flash_lm.layers.attention_core import Pair
from flash_lm.layers.context import Context
from flash_lm.ops.aft import aft
from flash_lm.ops.aft_bias import PositionBias
from flash_lm.ops.segments import find_segments
from models.cases import LENGTH, PACKED, SHAPE, assert_close, case, draw_parameters, model_config, real_tokens, tokens

pytestmark = pytest.mark.representatives("linear_transformer", "flash", "aft_simple")

AFT = ("aft_full", "aft_local", "aft_simple", "aft_conv")
LINEAR = ("linear_transformer", "performer", "cosformer")
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
each_mean = pytest.mark.parametrize("family", AFT + LINEAR)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


class Mean:
    """Core of a family as a weighted mean of values, from keys and, if it has them, queries."""

    def __init__(self, family: str, causal: bool = True, max_length: int = SHAPE["max_length"]):
        config = complete(parse_model(model_config(family, causal, max_length=max_length)))
        sublayer = FAMILIES[family].sublayers[0](config, rngs=nnx.Rngs(0))
        state = nnx.state(sublayer, nnx.Param)
        nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, draw_parameters(nnx.to_pure_dict(state))))
        nnx.update(sublayer, state)
        self.core, self.family, self.causal = sublayer.core, family, causal
        self.heads, self.key_width, self.value_width = sublayer.heads, sublayer.key_width, sublayer.value_width
        self.prefill = jax.jit(self._prefill)
        self._parallel = jax.jit(self._attend_documents)

    def inputs(self, length: int) -> list[np.ndarray]:
        """Queries, keys and values."""
        widths = (self.key_width, self.key_width, self.value_width)
        return [draw(i, self.heads, length, width)[-2:] for i, width in enumerate(widths, start=2)]

    def __call__(self, q, k, v, segment_ids) -> np.ndarray:
        """B×H×L×E."""
        return np.asarray(self._parallel(q, k, v, segment_ids))

    def _attend_documents(self, q, k, v, segment_ids):
        segments = find_segments(segment_ids)
        context = Context(positions_BxL=segments.offsets_BxL, segments=segments, causal=self.causal, packed=True)
        return self.core(self._keys(q, k), v, context)

    def init_state(self, batch: int, capacity: int):
        return self.core.init_state(batch, self.heads, self.key_width, self.value_width, capacity)

    def _prefill(self, q, k, v, state, start_B):
        positions_BxL = start_B[:, None] + jnp.arange(v.shape[2], dtype=jnp.int32)[None]
        context = Context(positions_BxL=positions_BxL, lengths_B=jnp.full_like(start_B, v.shape[2]))
        return self.core.prefill(self._keys(q, k), v, context, state)

    def _keys(self, q, k):
        return {"attention": Pair(q, k)} if self.family in LINEAR else k


mean = functools.cache(Mean)


@both_ways
def test_the_bias_of_aft_is_added_to_the_keys(causal):
    """Multiplied, as in fast-transformers, zeros would remove all keys, and −∞ of a mask gave NaN."""
    k, v, index = draw(1, 1, LENGTH, 4), draw(1, 1, LENGTH, 3), jnp.arange(LENGTH, dtype=jnp.int32)[None]

    @jax.jit
    def run(w_LxL):
        pairs = PositionBias(index, index, None, w_LxL[None], jnp.eye(LENGTH)[None])
        return aft(k[..., :3], v, jnp.ones((1, LENGTH), jnp.int32), pairs, causal=causal)

    weights = np.exp(k[0, 0, :, :3].astype(float))
    total = lambda x: np.cumsum(x, axis=0) if causal else np.broadcast_to(x.sum(axis=0), x.shape)
    simple = total(weights * v[0, 0]) / total(weights)
    for constant in (0.0, 3.0):  # all weights are scaled by the same factor
        assert_close(run(np.full((LENGTH, LENGTH), constant, np.float32))[0, 0], simple, 1e-5)
    favoured = np.zeros((LENGTH, LENGTH), np.float32)
    favoured[:, 5] = 60
    for t, row in enumerate(np.asarray(run(favoured))[0, 0]):
        expected = v[0, 0, 5] if t >= 5 or not causal else simple[t]
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_aft_simple_is_a_ratio_of_two_sums():
    """Computed by hand; fast-transformers divided each key by its prefix sum before summing."""
    k = jnp.log(jnp.array([1.0, 3.0, 4.0])).reshape(1, 1, 3, 1)
    v = jnp.array([8.0, 4.0, 1.0]).reshape(1, 1, 3, 1)
    out = aft(k, v, jnp.ones((1, 3), jnp.int32), None, causal=True)
    np.testing.assert_allclose(out.ravel(), [8, (8 + 12) / 4, (8 + 12 + 4) / 8], rtol=1e-6)


@pytest.mark.parametrize("family", ["aft_full", "aft_local", "aft_conv"])
def test_the_bias_of_aft_is_a_parameter(family):
    """Aft-pytorch created a new one in each forward pass, so it was never trained."""
    model = case(family, True)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model.params)}
    names = ("taps", "gain", "offset") if family == "aft_conv" else ("query_position", "key_position")
    _, _, grads = model.run(PACKED)
    for name in names:
        assert f"['layers']['sublayer_0']['core']['{name}']" in paths
        gradient = grads["layers"]["sublayer_0"]["core"][name]
        assert (np.linalg.norm(gradient.reshape(len(gradient), -1), axis=1) > 1e-4).all(), f"{name} in each layer"
    first, second = (np.asarray(model.logits(model.params, tokens())) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("family", LINEAR)
def test_causal_linear_attention_does_not_see_later_tokens(family):
    """Long Range Arena created an exception for causal masks without raising it, and continued without a mask."""
    model, keep = case(family, True), real_tokens(PACKED)
    changed = tokens().copy()
    changed[:, 12:] = (changed[:, 12:] + 7) % SHAPE["vocab_size"]
    before, after = (np.asarray(model.logits(model.params, ids)) for ids in (tokens(), changed))
    np.testing.assert_array_equal(after[:, :12], before[:, :12])
    assert np.abs(after[:, 12:] - before[:, 12:]).max() > 1e-2
    # Padding has no effect either; it ignored padding masks as well.
    filled = np.where(keep, tokens(), 3)
    before, after = (np.asarray(model.logits(model.params, ids, PACKED)) for ids in (tokens(), filled))
    np.testing.assert_array_equal(after[keep], before[keep])


@both_ways
@each_mean
def test_the_mean_of_ones_is_one(family, causal):
    """The denominator has the same keys as the numerator, without padding, even if its keys are large.

    Padding in the denominator cost flash-linear-attention (#1263) 73 %.
    """
    one, keep = mean(family, causal), real_tokens(PACKED)
    q, k, v = one.inputs(LENGTH)
    k, v = (np.where(keep[:, None, :, None], x, 20.0).astype(np.float32) for x in (k, np.ones_like(v)))
    out = np.swapaxes(one(q, k, v, PACKED), 1, 2)
    np.testing.assert_allclose(out[keep], 1, atol=1e-5)


@each_mean
def test_the_mean_of_ones_is_one_in_decoding(family):
    """The denominator was missing in decoding in flash-linear-attention (#267, #268)."""
    one = mean(family)
    q, k, v = one.inputs(12)
    state, start = one.init_state(2, 12), np.zeros(2, np.int32)
    for size in (9, 1, 1, 1):
        part = lambda x, i=int(start[0]), n=size: x[:, :, i : i + n]
        out, state = one.prefill(part(q), part(k), np.ones_like(part(v)), state, start)
        np.testing.assert_allclose(out, 1, atol=1e-5)
        start = start + size


@pytest.mark.parametrize("family", ["linear_transformer", "performer", "cosformer", "aft_conv"])
def test_sums_run_over_time_and_not_over_heads(family):
    """A cumulative sum over heads (flash-linear-attention #594) would make a head see those before it."""
    one = mean(family)
    q, k, v = one.inputs(LENGTH)
    ids = np.ones((2, LENGTH), np.int32)
    before = one(q, k, v, ids)
    for head in range(one.heads):
        changed = [x.copy() for x in (q, k, v)]
        for x in changed:
            x[:, head] += 1
        after = one(*changed, ids)
        same = [h for h in range(one.heads) if h != head]
        np.testing.assert_array_equal(after[:, same], before[:, same])
        assert np.abs(after[:, head] - before[:, head]).max() > 0.1
    earlier = v.copy()
    earlier[:, :, 0] += 1
    assert (np.abs(one(q, k, earlier, ids) - before).max(axis=(1, 3))[:, [0, 1, 3]] > 1e-4).all(), "time does count"


@pytest.mark.parametrize("family", ["aft_simple", "aft_local", "aft_conv", "linear_transformer", "performer"])
def test_running_sums_of_low_precision_inputs_do_not_saturate(family):
    """In bfloat16 a sum of ones stops at 256, and in float16 it overflows (fast-transformers #32, fla #1187).

    With equal keys the mean of 2048 zeros and then 2048 ones is a half.
    """
    one = mean(family, True, 4096)
    q, k, v = (np.zeros_like(x[:1], shape=(1, *x.shape[1:])) for x in one.inputs(4096))
    v[:, :, 2048:] = 1
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    state = one.init_state(1, 4096)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
    for start in range(0, 4096, 512):
        part = lambda x, i=start: x[:, :, i : i + 512]
        out, state = one.prefill(part(q), part(k), part(v), state, np.array([start], np.int32))
    last = np.asarray(out, np.float32)[0, :, -1]
    # The few tokens inside a window have other weights.
    np.testing.assert_allclose(last, 0.5, atol=0.02 if family in ("aft_local", "aft_conv") else 2**-9)
