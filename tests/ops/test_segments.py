"""Runs of segment ids, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.segments import PADDING, documents, offsets

from flash_lm.ops import segments

LENGTH = 23


def random_ids(seed: int) -> np.ndarray:
    """Segment ids with runs of random length and id; ids repeat, and 0 is among them."""
    rng = np.random.default_rng(seed)
    rows = [np.repeat(rng.integers(4, size=LENGTH), rng.integers(1, 9, size=LENGTH))[:LENGTH] for _ in range(4)]
    return np.stack(rows).astype(np.int32)


@pytest.mark.parametrize("seed", range(20))
def test_find_segments(seed):
    ids = random_ids(seed)
    result = jax.tree.map(np.asarray, segments.find_segments(jnp.asarray(ids)))
    for b, row in enumerate(ids.tolist()):
        document = documents(row)
        for t in range(LENGTH):
            assert result.offsets_BxL[b, t] == offsets(row)[t]
            assert (result.runs_BxL[b, t] == 0) == (document[t] == PADDING)
            for u in range(LENGTH):
                together = result.runs_BxL[b, t] == result.runs_BxL[b, u]
                assert bool(together) == (document[t] == document[u])
            if document[t] != PADDING:
                assert result.lengths_BxL[b, t] == document.count(document[t])


@pytest.mark.parametrize("length", [1, 7])
def test_whole_row_equals_one_document(length):
    direct = segments.whole_row(length)
    actual = segments.find_segments(jnp.ones((1, length), jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, direct, actual)
