"""A softmax window with linear attention beyond it: shared heads of keys, its two ends, and long decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cases import BATCH, LENGTH, PACKED, Case, assert_close, case, real_tokens, tokens

pytestmark = pytest.mark.representatives("window_linear")

SHARED = {"num_heads": 4, "num_kv_heads": 2, "norm": "rms"}


def test_heads_that_share_keys():
    """Four heads of queries and two of keys equal the oracle, packed, with gradients of every part."""
    model = case("window_linear", True, **SHARED)
    logits, _, grads = model.run(PACKED)
    keep = real_tokens(PACKED)
    assert_close(np.asarray(logits)[keep], model.oracle(PACKED)[keep], 1e-5)
    core = grads["layers"]["sublayer_0"]["core"]
    assert core["key_features"].shape[1:] == (2, 8, 5)
    assert {name: np.abs(x).max() > 1e-5 for name, x in core.items()} == dict.fromkeys(core, True)


def test_prefill_and_steps_with_shared_heads():
    """A prefill that ends inside the window, then steps beyond it, give the logits of the parallel form."""
    model = case("window_linear", True, **SHARED)
    expected = np.asarray(model.logits(model.params, tokens()))
    state, lengths_B = model.init_state(), np.array([5, 13])
    logits, state = model.prefill(model.params, tokens()[:, :13], state, lengths_B)
    for b, length in enumerate(lengths_B):
        assert_close(np.asarray(logits)[b, :length], expected[b, :length], 1e-5)
    for t in range(LENGTH - 13):
        index_B = lengths_B + t
        logits, state = model.step(model.params, tokens()[np.arange(BATCH), index_B], state)
        assert_close(np.asarray(logits), expected[np.arange(BATCH), index_B], 1e-5)


@pytest.mark.parametrize("segment_ids", [None, PACKED], ids=["one document", "packed"])
def test_a_window_over_everything_is_softmax_attention(segment_ids):
    """With a window of all tokens it equals transformer_plus_plus at the same parameters."""
    wide = Case("window_linear", True, SHARED | {"window_linear.size": LENGTH})
    full = case("transformer_plus_plus", True, **SHARED)
    params = jax.tree.map(lambda x: x, full.params)
    params["layers"]["sublayer_0"]["core"] = wide.params["layers"]["sublayer_0"]["core"]
    logits, expected = (model.logits(x, tokens(), segment_ids) for model, x in ((wide, params), (full, full.params)))
    keep = real_tokens(segment_ids)
    assert_close(np.asarray(logits)[keep], np.asarray(expected)[keep], 1e-6)


def test_without_weight_the_linear_part_changes_nothing():
    """With γ = 1 it equals the window alone; its oracle sees only the window and the first tokens."""
    window = case("window_linear", True, **SHARED, **{"window_linear.linear_attention": False})
    assert "core" not in window.params["layers"]["sublayer_0"]
    logits = np.asarray(window.logits(window.params, tokens()))
    assert_close(logits, window.oracle(None), 1e-5)
    both = case("window_linear", True, **SHARED)
    core = both.params["layers"]["sublayer_0"]["core"]
    off = {**core, "window_factor": jnp.full_like(core["window_factor"], 40.0)}
    layers = both.params["layers"]
    params = {**both.params, "layers": {**layers, "sublayer_0": {**layers["sublayer_0"], "core": off}}}
    assert_close(np.asarray(both.logits(params, tokens())), logits, 1e-6)
