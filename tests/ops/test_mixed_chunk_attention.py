"""The sum over earlier chunks against a loop over tokens, with more chunks than one product adds up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.mixed_chunk_attention import global_attention
from flash_lm.ops.segments import find_segments

CHUNK, CHUNKS, WIDTH, VALUES = 3, 71, 4, 5
LENGTH = CHUNK * CHUNKS - 1


@pytest.mark.parametrize("documents", [(LENGTH,), (1, 2, 100, 3, 3, 40, 50)], ids=["one", "several"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["new", "goes_on"])
def test_long_sequences(documents, goes_on):
    random = np.random.default_rng(0)
    ids = np.repeat(1 + np.arange(len(documents)), documents)
    ids = np.pad(ids, (0, LENGTH - ids.size))[None]
    q, k, v = (random.standard_normal((2, LENGTH, width)) for width in (WIDTH, WIDTH, VALUES))
    weight = random.uniform(0.5, 2, (1, LENGTH))
    initial = random.standard_normal((2, WIDTH, VALUES)) if goes_on else np.zeros((2, WIDTH, VALUES))
    expected = np.zeros((2, LENGTH, VALUES))
    for i in range(LENGTH):
        earlier = [j for j in range(i // CHUNK * CHUNK) if ids[0, j] == ids[0, i]]
        total = np.einsum("njk,nje->nke", k[:, earlier], v[:, earlier])
        total += initial * (ids[0, i] == 1)
        expected[:, i] = weight[0, i] * np.einsum("nk,nke->ne", q[:, i], total)
    out, entering = jax.jit(global_attention, static_argnames="chunk_size")(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        jax.jit(find_segments)(jnp.asarray(ids, jnp.int32)).runs_BxL,
        chunk_size=CHUNK,
        weight_BxL=jnp.asarray(weight, jnp.float32),
        initial_NxKxE=jnp.asarray(initial, jnp.float32) if goes_on else None,
    )
    assert entering.shape == (2, CHUNKS, WIDTH, VALUES)
    # In a layer, queries whose document starts in their chunk have weight 0.
    enters = [ids[0, i // CHUNK * CHUNK - 1] if i >= CHUNK else 1 for i in range(LENGTH)]
    read = [i for i in range(LENGTH) if ids[0, i] == enters[i] > 0]
    assert len(read) > LENGTH / 2
    np.testing.assert_allclose(np.asarray(out)[:, read], expected[:, read], rtol=1e-4, atol=1e-4)
