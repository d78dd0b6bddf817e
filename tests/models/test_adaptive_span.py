"""Adaptive Span: limits, visited blocks, ring buffer, bugs of other code; training is tested in test_step.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.errors import InputError
from flash_lm.ops import banded_softmax, blocked_attention
from flash_lm.ops.adaptive_span import log_mask, reach
from flash_lm.ops.segments import whole_row
from flash_lm.ops.visibility import document_key_span
from models.cases import PACKED, SHAPE, Case, assert_close, assert_trees_close, case, real_tokens, tokens

ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def set_share(model: Case, share: float) -> dict:
    """Returns the parameters with all spans at this share of the limit."""
    attention = model.params["layers"]["sublayer_0"]
    core = {"share": np.full_like(attention["core"]["share"], share)}
    return model.params | {"layers": model.params["layers"] | {"sublayer_0": attention | {"core": core}}}


@ways
def test_spans_at_their_limit_equal_longformers_window(causal):
    model = case("adaptive_span", causal)
    fixed = {"window.size": SHAPE["span.limit"], "window.growth": 1.0, "window.dilations": (1,)}
    longest = model.logits(set_share(model, 1.0), tokens(), PACKED)
    attention = {name: p for name, p in model.params["layers"]["sublayer_0"].items() if name != "core"}
    params = model.params | {"layers": model.params["layers"] | {"sublayer_0": attention}}
    window = case("longformer", causal, **fixed).logits(params, tokens(), PACKED)
    keep = real_tokens(PACKED)
    assert_close(np.asarray(longest)[keep], np.asarray(window)[keep], 1e-5)


@pytest.mark.parametrize("most", [0, blocked_attention._MOST_BIASES], ids=["bias-by-token", "bias-by-block"])
@pytest.mark.parametrize(
    "causal",
    [True, pytest.param(False, marks=pytest.mark.slow("compiles another model: the same code with another mask"))],
    ids=["causal", "bidirectional"],
)
def test_blocks_equal_the_plain_form(causal, most, monkeypatch):
    """With the biases of all pairs of blocks computed in advance, or each when it is needed."""
    monkeypatch.setattr(blocked_attention, "_MOST_BIASES", most)
    _, loss, grads = case("adaptive_span", causal).run(PACKED)
    monkeypatch.setattr(blocked_attention, "SMALLEST", 8)
    monkeypatch.setattr(blocked_attention, "LARGEST", 8)
    blocked_loss, blocked_grads = Case("adaptive_span", causal, {}).run(PACKED)[1:]
    assert blocked_loss == pytest.approx(loss, rel=1e-5)
    assert_trees_close(blocked_grads, grads, 1e-5)


def test_blocks_beyond_the_largest_span_are_not_visited(monkeypatch):
    """Values of NaN in skipped blocks have no effect. The span is a traced number."""
    monkeypatch.setattr(blocked_attention, "SMALLEST", 8)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 64, 4))
    v = v.at[:, :, :16].set(jnp.nan)

    @jax.jit
    def attend(span_H):
        bias = lambda distance: log_mask(span_H, distance, 4)
        key_span = document_key_span(whole_row(64), causal=True, window=reach(span_H, 4))
        return banded_softmax.banded_softmax(q, k, v, key_span, scale=0.5, window=8, bias=bias).out_BxHxLxE

    out = np.asarray(attend(jnp.array([3.0, 11.5])))
    assert np.isfinite(out[:, :, 32:]).all()  # 15.5 positions before 32 is in the third block
    assert np.isnan(np.asarray(attend(jnp.array([3.0, 14.0])))[:, 1, 32:40]).any()


def test_a_token_always_sees_itself():
    """The authors' attention omits the current token; with span 0 and ramp 1 it is the only visible one."""
    np.testing.assert_array_equal(np.exp(log_mask(jnp.zeros(1), jnp.arange(-2, 3), 1)), [[0, 0, 1, 0, 0]])
    assert reach(jnp.zeros(1), 1) == 1


@pytest.mark.parametrize("span", [0.0, 2.0, 2.5, 1.9999999, 12.0])
def test_gradients_of_weights_are_finite(span):
    """At m = 0 log m has no derivative, but the weight m eˢ has one: that of the form without logs."""
    scores, distance = np.linspace(-2, 2, 8, dtype=np.float32), jnp.arange(-7, 1)

    def by_log_mask(span):
        return jax.nn.softmax(scores + log_mask(span[None], distance, 3)[0]) @ jnp.arange(8.0)

    def directly(span):
        mask = jnp.clip((3 + span - jnp.abs(distance).astype(jnp.float32)) / 3, 0, 1)
        return (mask * jnp.exp(scores)) @ jnp.arange(8.0) / (mask * jnp.exp(scores)).sum()

    gradient = jax.jit(jax.grad(by_log_mask))(jnp.float32(span))
    assert np.isfinite(gradient)
    if abs(span - round(span)) > 0.1:  # elsewhere the mask has a corner
        np.testing.assert_allclose(gradient, jax.jit(jax.grad(directly))(jnp.float32(span)), rtol=1e-5)


def test_the_ring_is_as_long_as_the_limit():
    """Independent of the capacity and the spans."""
    ring = jax.eval_shape(lambda: case("adaptive_span", True).init_state(2, 1000)).layers[0]
    assert ring.key_BxHxRxK.shape == (2, 2, 2, SHAPE["span.limit"], 16)  # layers, batch, heads, R, K


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"span.init": 13.0}, "at most model.span.limit=12"), ({"span.ramp": 0}, "model.span.ramp=0")],
)
def test_incompatible_keys(keys, message):
    with pytest.raises(InputError, match=message):
        Case("adaptive_span", True, keys)
