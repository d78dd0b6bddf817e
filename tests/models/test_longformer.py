"""Longformer: a window over the full sequence, global tokens, blocks, and bugs of other code."""

import jax
import numpy as np
import pytest

from flash_lm.errors import InputError
from flash_lm.ops import blocked_attention
from models.cases import (
    BATCH,
    LENGTH,
    PACKED,
    Case,
    assert_close,
    assert_trees_close,
    case,
    model_config,
    real_tokens,
    standard,
    tokens,
)
from models.test_oracle import assert_logits_equal
from models.test_visibility import assert_only_where_visible, connected_pairs

GLOBAL = {"window.global_tokens": 3}
CONVOLVED = {"short_convolution": 3, "convolution.activation": "silu"}
ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@pytest.mark.parametrize("options", [{}, GLOBAL], ids=["no-global-tokens", "global-tokens"])
@ways
def test_a_window_over_the_full_sequence_equals_full_attention(causal, options):
    """Global tokens have the same projections here; no key counts twice, and none is missing."""
    softmax = case("transformer_plus", causal)
    wide = case("longformer", causal, **{"window.size": LENGTH, "window.dilations": (1,)}, **options)
    params = jax.tree.map(lambda leaf: leaf, softmax.params)
    if options:
        attention = params["layers"]["sublayer_0"]
        attention |= {f"global_{name}": attention[name] for name in ("query", "key", "value")}
    expected = softmax.logits(softmax.params, tokens(), PACKED)
    keep = real_tokens(PACKED)
    assert_close(np.asarray(wide.logits(params, tokens(), PACKED))[keep], np.asarray(expected)[keep], 1e-5)


@pytest.mark.parametrize("segment_ids", [None, PACKED], ids=["one-document", "packed"])
@ways
def test_global_tokens_equal_the_oracle(causal, segment_ids):
    """Each document has its global tokens; also with convolutions."""
    model = case("longformer", causal, **GLOBAL, **CONVOLVED)
    assert_logits_equal(model, segment_ids, model.logits(model.params, tokens(), segment_ids))


@pytest.mark.slow("compiles the gradients of another model, and runs them for each of 29 tokens")
@ways
def test_global_tokens_connect_all_of_their_document(causal):
    model = case("longformer", causal, **GLOBAL)
    assert_only_where_visible(model.influence(PACKED), PACKED, causal, connected_pairs(model, PACKED))


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param(GLOBAL, marks=pytest.mark.slow("compiles the gradients of two more models"))],
    ids=["no-global-tokens", "global-tokens"],
)
@pytest.mark.parametrize(
    "causal",
    [True, pytest.param(False, marks=pytest.mark.slow("the bidirectional form"))],
    ids=["causal", "bidirectional"],
)
def test_blocks_equal_the_plain_form(causal, options, monkeypatch):
    """Lengths that are no multiple of a window or block, blocks of 8, dilation, growing windows, and documents."""
    _, loss, grads = case("longformer", causal, **options).run(PACKED)
    monkeypatch.setattr(blocked_attention, "SMALLEST", 8)
    monkeypatch.setattr(blocked_attention, "LARGEST", 8)
    blocked_loss, blocked_grads = Case("longformer", causal, options).run(PACKED)[1:]
    assert blocked_loss == pytest.approx(loss, rel=1e-5)
    assert_trees_close(blocked_grads, grads, 1e-5)


def test_the_ring_is_as_long_as_the_longest_window():
    """At any capacity; its length is a multiple of the dilations."""
    model = case("longformer", True)
    ring = jax.eval_shape(lambda: model.init_state(2, 1000)).layers[0].ring
    assert ring.key_BxHxRxK.shape == (2, 2, 2, 12, 16)  # layers, batch, heads, (6 − 1) · 2 + 1 rounded up to even, K


def test_decoding_in_blocks(monkeypatch):
    """A prefill that starts inside the ring, with queries in several blocks and sequences of different lengths."""
    monkeypatch.setattr(blocked_attention, "SMALLEST", 4)
    monkeypatch.setattr(blocked_attention, "LARGEST", 4)
    model = Case("longformer", True, {**GLOBAL, "dropout": 0.25})
    expected = np.asarray(case("longformer", True, **GLOBAL).logits(model.params, tokens()))
    state, starts = model.init_state(), np.zeros(2, int)
    for lengths in ((5, 1), (14, 7), (10, 21)):
        inputs = np.stack([np.resize(tokens()[b, starts[b] :], LENGTH) for b in range(2)])
        logits, state = model.prefill(model.params, inputs, state, np.array(lengths))
        for b, length in enumerate(lengths):
            assert_close(np.asarray(logits)[b, :length], expected[b, starts[b] : starts[b] + length], 1e-5)
        starts += lengths


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"window.dilations": (1, 2, 4)}, "at most model.num_layers=2 numbers"),
        ({"window.dilations": (0,)}, "positive integers"),
        ({"window.dilated_heads": 3}, "at most model.num_heads=2"),
        ({"window.size": 0}, "model.window.size=0"),
    ],
)
def test_incompatible_keys(keys, message):
    with pytest.raises(InputError, match=message):
        Case("longformer", True, keys)
    assert model_config("longformer", True).window.size == 4


def test_windows_grow_with_depth():
    """A token of the second layer sees further back than one of the first, by the oracle's mask."""
    model = case("longformer", True)
    reach = connected_pairs(model, np.ones((BATCH, LENGTH), int))[0]
    back = [np.flatnonzero(row).min() for row in reach]
    assert back[28] == 28 - (4 - 1) - (6 - 1) * 2
    assert standard("longformer", True)[1] > 0
