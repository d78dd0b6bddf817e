"""Mega's moving averages at the limits of their decay: all is forgotten from token to token, or nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.mega import moving_average
from flax import nnx
from models.cases import model_config
from oracles.attention import Row, silu
from oracles.segments import visibility

from flash_lm.config.experiment import parse_model
from flash_lm.families.family import FAMILIES, complete
from flash_lm.layers.context import make_context

LENGTH, WIDTH = 40, 16  # three chunks


@pytest.mark.slow("differentiates eagerly, operation by operation")
@pytest.mark.parametrize("decay", [-200.0, 200.0])
@pytest.mark.parametrize("damping", [-200.0, 200.0])
def test_ends(damping, decay):
    """σ is 0 or 1 in float32, and the logarithm of the decay must not be −∞."""
    config = complete(parse_model(model_config("mega", True, model_dim=WIDTH)))
    average = FAMILIES["mega"].sublayers[0](config, rngs=nnx.Rngs(0)).convolutions
    average.damping[...] = jnp.full_like(average.damping[...], damping)
    average.decay[...] = jnp.full_like(average.decay[...], decay)
    x = np.random.default_rng(0).normal(size=(1, LENGTH, WIDTH)).astype(np.float32)

    def run(average, x):
        return average({"averaged": x}, make_context(LENGTH, causal=True))["averaged"]

    p = {
        name: np.asarray(getattr(average, name)[...], np.float64) for name in ("damping", "decay", "into", "out", "own")
    }
    exact = x[0].astype(np.float64)
    row = Row(visibility([1] * LENGTH, True), list(range(LENGTH)))
    expected = silu(moving_average(exact, p, 0, list(range(LENGTH)), row) + p["own"] * exact)
    np.testing.assert_allclose(run(average, jnp.asarray(x))[0], expected, rtol=1e-5, atol=1e-5)
    grads = nnx.grad(lambda average, x: run(average, x).sum(), argnums=(0, 1))(average, jnp.asarray(x))
    assert jax.tree.all(jax.tree.map(lambda g: bool(np.isfinite(g).all()), grads))
