"""Key spans (masks) against their definition pair by pair, in every form of attention."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.segments import visibility

from flash_lm.ops import blocked_attention
from flash_lm.ops.kernels.chunks import attend_in_chunks
from flash_lm.ops.kernels.programs import Form
from flash_lm.ops.mixed_chunk_attention import local_attention
from flash_lm.ops.quadratic_attention import quadratic_attention
from flash_lm.ops.segments import find_segments
from flash_lm.ops.visibility import KeySpan, causal_key_span, document_key_span
from ops.test_segments import LENGTH, random_ids

CHUNK = 5
PREFIX = 4
POSITIONS = np.arange(LENGTH)


def visible_pairs(ids: list[int], causal: bool, window: int | None, prefix: int) -> np.ndarray:
    """Mask of the visible pairs, L×L, pair by pair."""
    same_document = visibility(ids, False)
    visible = np.zeros((LENGTH, LENGTH), bool)
    for t, u in itertools.product(range(LENGTH), repeat=2):
        if not same_document(t, u):
            continue
        begin = min(x for x in range(LENGTH) if same_document(t, x))
        visible[t, u] = (not causal or u <= t or u - begin < prefix) and (window is None or abs(t - u) < window)
    return visible


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def key_span(ids: np.ndarray, causal: bool, window: int | None, prefix: int) -> KeySpan:
    prefix_1x1 = jnp.full((1, 1), prefix, jnp.int32) if prefix else None
    return document_key_span(find_segments(jnp.asarray(ids)), causal=causal, window=window, prefix_BxL=prefix_1x1)


KINDS = [(True, None, 0), (False, None, 0), (True, 3, 0), (False, 3, 0), (True, None, PREFIX), (True, 6, PREFIX)]
NAMES = ["causal", "both_ways", "causal_window", "window", "prefix", "prefix_and_window"]
kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


@kinds
@pytest.mark.parametrize("seed", range(4))
def test_masks_and_counts(seed, kind):
    ids = random_ids(seed)
    span = key_span(ids, *kind)
    visible = np.asarray(span.visible(jnp.arange(LENGTH, dtype=jnp.int32)))
    expected = np.stack([visible_pairs(row.tolist(), *kind) for row in ids])
    np.testing.assert_array_equal(visible, expected)
    chunk_index = POSITIONS // CHUNK
    for reach in ((0,), (-1, 0), (-1, 0, 1)):
        inside = np.isin(chunk_index[None] - chunk_index[:, None], reach)
        np.testing.assert_array_equal(span.clip_to_chunks(CHUNK, reach).count(), (expected & inside).sum(axis=-1))
    before, after = chunk_index[None] < chunk_index[:, None], chunk_index[None] > chunk_index[:, None]
    np.testing.assert_array_equal(span.count(), expected.sum(axis=-1))
    np.testing.assert_array_equal(span.before_chunk(CHUNK), (expected & before).sum(axis=-1))
    np.testing.assert_array_equal(span.after_chunk(CHUNK), (expected & after).sum(axis=-1))


@pytest.mark.parametrize("window", [None, 4])
def test_decoded_tokens_see_earlier_tokens(window):
    """Sequences at different positions, padded on the right."""
    index = np.array([[3, 4, 5, 6], [9, 10, 11, 12]], np.int32)
    real = np.array([[True] * 4, [True, True, False, False]])
    span = causal_key_span(jnp.asarray(index), jnp.asarray(real), window)
    visible = np.asarray(span.visible(jnp.arange(LENGTH, dtype=jnp.int32)))
    back = index[..., None] - POSITIONS
    np.testing.assert_array_equal(visible, real[..., None] & (back >= 0) & (back < (window or LENGTH)))


@pytest.fixture(scope="module")
def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((4, 1, LENGTH, width)).astype(np.float32) for width in (3, 3, 2)]


def plain(q, k, v, ids, key_span_BxL: KeySpan, chunk: int):
    return quadratic_attention(q, k, v, key_span_BxL, function="relu2", scale=0.7, divisor_BxL=jnp.ones((1, LENGTH)))


def blocked(q, k, v, ids, key_span_BxL: KeySpan, chunk: int):
    divisor = jnp.ones((1, LENGTH))
    return quadratic_attention(q, k, v, key_span_BxL, function="relu2", scale=0.7, divisor_BxL=divisor, blocked=True)


def local(q, k, v, ids, key_span_BxL: KeySpan, chunk: int):
    q, k, v = (x[:, 0] for x in (q, k, v))
    settings = {"chunk_size": chunk, "function": "relu2", "scale": 0.7, "divisor_BxL": jnp.ones((1, LENGTH))}
    return local_attention(q, k, v, key_span_BxL, **settings)[:, None]


def kernel(q, k, v, ids, key_span_BxL: KeySpan, chunk: int):
    runs, divisor = find_segments(jnp.asarray(ids)).runs_BxL, jnp.ones((1, LENGTH))
    form = Form("relu2", 0.7, "interpreted")
    return attend_in_chunks(form, q, k, v, runs, key_span_BxL, chunk_size=chunk, divisor_BxL=divisor)


@functools.cache
def compile_form(form, chunk: int):
    """Compiles one form for all kinds."""
    return jax.jit(functools.partial(form, chunk=chunk))


@kinds
@pytest.mark.parametrize(
    ("form", "chunk"),
    [(plain, LENGTH), (blocked, LENGTH), (local, LENGTH), (local, CHUNK), (kernel, LENGTH), (kernel, 8)],
)
def test_every_form_obeys_the_key_span(form, chunk, kind, arrays, monkeypatch):
    # Of the blocked form; the others do not read them.
    monkeypatch.setattr(blocked_attention, "SMALLEST", 4)
    monkeypatch.setattr(blocked_attention, "LARGEST", 4)
    ids = random_ids(7)
    q, k, v = (x.astype(np.float64) for x in arrays)
    visible = np.stack([visible_pairs(row.tolist(), *kind) for row in ids]) & (
        POSITIONS[:, None] // chunk == POSITIONS // chunk
    )
    scores = np.einsum("bhik,bhjk->bhij", q, k) * 0.7
    expected = np.where(visible[:, None], np.square(np.maximum(scores, 0)), 0) @ v
    actual = compile_form(form, chunk)(*arrays, ids, key_span(ids, *kind))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
