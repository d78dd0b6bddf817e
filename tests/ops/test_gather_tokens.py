"""Gathering chosen tokens to the front of a sequence, against loops."""

import jax
import numpy as np

from flash_lm.ops.gather_tokens import index_chosen
from flash_lm.ops.segments import find_segments
from flash_lm.ops.visibility import document_key_span
from ops.test_segments import LENGTH, random_ids


def test_tokens_queries_and_keys():
    random, ids = np.random.default_rng(3), random_ids(3)
    batch = len(ids)
    chosen = (random.random((batch, LENGTH)) < 0.3) & (ids > 0)
    most = int(chosen.sum(axis=1).max())
    x = random.standard_normal((batch, 2, LENGTH, 3)).astype(np.float32)

    @jax.jit
    def gather(ids, chosen, x):
        compact, key_span = index_chosen(chosen, most), document_key_span(find_segments(ids), causal=True)
        taken, queries = compact.take(x), compact.queries(key_span)
        return key_span, taken, queries, queries.count(), compact.keys(key_span), compact.put_back(taken)

    key_span, taken, queries, counts, keys, back = jax.tree.map(np.asarray, gather(ids, chosen, x))
    first, stop = key_span.first_BxL, key_span.stop_BxL
    for b in range(batch):
        positions = np.flatnonzero(chosen[b])
        np.testing.assert_array_equal(taken[b, :, : len(positions)], x[b][:, positions])
        np.testing.assert_array_equal(back[b][:, positions], x[b][:, positions])
        np.testing.assert_array_equal(queries.first_BxL[b, : len(positions)], first[b, positions])
        np.testing.assert_array_equal(queries.stop_BxL[b, : len(positions)], stop[b, positions])
        assert not counts[b, len(positions) :].any()
        for t in range(LENGTH):
            expected = np.flatnonzero(chosen[b] & (np.arange(LENGTH) >= first[b, t]) & (np.arange(LENGTH) < stop[b, t]))
            key_positions = positions[int(keys.first_BxL[b, t]) : int(keys.stop_BxL[b, t])]
            np.testing.assert_array_equal(key_positions, expected)
