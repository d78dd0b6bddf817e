"""LogSparse: visible tokens, full convolutions, restarts, and bugs of other code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.errors import InputError
from flash_lm.ops.offset_attention import attend_at_offsets, log_sparse_offsets
from flash_lm.ops.segments import whole_row
from flash_lm.ops.visibility import document_key_span
from models.cases import LENGTH, PACKED, Case, assert_close, case, real_tokens, tokens
from models.test_oracle import assert_logits_equal

ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def test_the_papers_offsets():
    """I_l = {l − 2^⌊log₂ l⌋, …, l − 2⁰, l} with one local token; with more, distances count from the last one."""
    assert log_sparse_offsets(17, 1, 0, causal=True) == (0, 1, 2, 4, 8, 16)
    assert log_sparse_offsets(17, 3, 0, causal=True) == (0, 1, 2, 3, 4, 6, 10)
    assert log_sparse_offsets(17, 1, 6, causal=True) == (0, 1, 2, 4, 6, 7, 8, 10, 12, 13, 14, 16)
    assert log_sparse_offsets(4, 2, 0, causal=False) == (-3, -2, -1, 0, 1, 2, 3)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 1000])
def test_visible_offsets_do_not_depend_on_the_length(length):
    """In the authors' code the first rows of the mask are dense; their number depends on the length."""
    longer = log_sparse_offsets(2 * length + 5, 8, 0, causal=True)
    assert log_sparse_offsets(length, 8, 0, causal=True) == tuple(o for o in longer if o < length)


def test_the_offsets_are_few():
    """L log L pairs in total, so no L×L array is needed."""
    assert len(log_sparse_offsets(1 << 20, 8, 0, causal=True)) == 8 + 20


def test_all_offsets_equal_full_attention():
    """With enough local tokens, and without convolutions."""
    softmax = case("transformer", True)
    dense = case("log_sparse", True, **{"log_sparse.local": LENGTH}, short_convolution=0)
    logits, expected = (np.asarray(x.logits(softmax.params, tokens(), PACKED)) for x in (dense, softmax))
    assert_close(logits[real_tokens(PACKED)], expected[real_tokens(PACKED)], 1e-5)


@pytest.mark.parametrize("options", [{"log_sparse.restart": 7}, {"log_sparse.convolution": "full"}], ids=str)
@ways
def test_options_equal_the_oracle(causal, options):
    model = case("log_sparse", causal, **options)
    if "log_sparse.convolution" in options:  # scaled as the linear maps that they replace
        taps = model.params["layers"]["sublayer_0"]["convolutions"]
        taps |= {name: x / np.sqrt(x.shape[1] * x.shape[2] / 4) for name, x in taps.items() if np.abs(x).max() > 1}
    assert_logits_equal(model, PACKED, model.logits(model.params, tokens(), PACKED))


def test_gradients_are_those_of_the_plain_form():
    """Our custom derivatives equal JAX's of the plain form with an L×L array."""
    q, k, v, pull = np.random.default_rng(0).normal(size=(4, 2, 2, 40, 4)).astype(np.float32)
    key_span = document_key_span(whole_row(40), causal=False)
    offsets = log_sparse_offsets(40, 3, 11, causal=False)
    visible = np.isin(np.subtract.outer(np.arange(40), np.arange(40)), offsets)

    def plain(q, k, v):
        return jax.nn.softmax(jnp.where(visible, q @ k.mT / 2, -jnp.inf), axis=-1) @ v

    ours = lambda *x: attend_at_offsets(*x, key_span, offsets, scale=0.5)
    with jax.numpy_rank_promotion("allow"):
        actual, expected = (jax.jit(lambda *x, f=f: jax.vjp(f, *x)[1](pull))(q, k, v) for f in (ours, plain))
    for mine, other in zip(actual, expected, strict=True):
        assert_close(np.asarray(mine), np.asarray(other), 1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"log_sparse.restart": 2}, "at least model.log_sparse.local=3"),
        ({"log_sparse.convolution": "full", "short_convolution": 0}, "needs model.short_convolution"),
    ],
)
def test_incompatible_keys(keys, message):
    with pytest.raises(InputError, match=message):
        Case("log_sparse", True, keys)
