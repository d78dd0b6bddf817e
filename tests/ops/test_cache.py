"""Writing to a KV cache against a loop; a loop over tokens updates it without a copy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.kv_cache import write


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 3), (1, 2, 1), (3, 2, 4)], ids=str)
def test_new_tokens_are_written_to_their_slots_or_dropped_without_one(shape):
    batch, heads, length = shape
    capacity, rng = 9, np.random.default_rng(0)
    cache = rng.normal(size=(batch, heads, capacity, 5)).astype(np.float32)
    for slots in (np.arange(length), capacity - 1 + np.arange(length)):
        slots = np.stack([np.roll(slots, b) for b in range(batch)])
        new = rng.normal(size=(batch, heads, length, 5)).astype(np.float32)
        expected = cache.copy()
        for b, row in enumerate(slots):
            for i, slot in enumerate(row):
                if slot < capacity:
                    expected[b, :, slot] = new[b, :, i]
        np.testing.assert_array_equal(jax.jit(write)(cache, new, slots), expected)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_loop_over_tokens_copies_no_cache(heads):
    """A product that reads the cache could make XLA copy it, see `write`."""

    def one_token(loop):
        i, cache, x_BxHx1xK = loop
        cache = write(cache, x_BxHx1xK, jnp.full((1, 1), i))
        scores = jax.lax.dot_general(x_BxHx1xK[0], cache.reshape(heads, 57, 5), (((2,), (2,)), ((0,), (0,))))
        return i + 1, cache, x_BxHx1xK + jnp.tanh(scores).sum()

    def loop(cache, x):
        return jax.lax.while_loop(lambda loop: loop[0] < 57, one_token, (jnp.int32(0), cache, x))

    shapes = (jax.ShapeDtypeStruct((1, heads, n, 5), jnp.float32) for n in (57, 1))
    text = jax.jit(loop, donate_argnums=0).lower(*shapes).compile().as_text()
    assert not re.findall(r"= f32\[1,\d,57,5\]\S* copy\(", text)
