"""Linear families on long sequences: time and memory are linear in the length, and precision is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import families as oracle_families

from flash_lm.ops.aft import aft
from flash_lm.ops.aft_bias import PositionBias
from flash_lm.ops.favor import favor, log_features, orthogonal_frequencies
from flash_lm.ops.linear_attention import elu_plus_one, linear_attention
from flash_lm.ops.segments import whole_row
from models.cases import FORM, case

pytestmark = pytest.mark.slow("sequences of 8192 tokens")

LINEAR = [name for name, row in oracle_families.FAMILIES.items() if row.growth == "linear"]
# Quadratic time, but no array of all pairs.
BLOCKED = [name for name, row in oracle_families.FAMILIES.items() if row.growth == "memory"]
L = 8192


def compile_gradients(family: str, length: int):
    """Compiles loss and gradients of one sequence."""
    model = case(family, FORM[family], max_length=L, num_layers=1, **{"chunks.size": 128, "aft.window": 32})
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.params)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, length), jnp.float32)
    return model.loss_and_grads.lower(params, ids, ids, weights, None).compile()


@pytest.mark.parametrize("family", LINEAR + BLOCKED)
def test_memory_and_flops_grow_with_the_length(family):
    """Twice the length takes at most 2.2 times the temporary memory and operations, forward and backward."""
    half, full = (compile_gradients(family, length) for length in (L // 2, L))
    memory = [x.memory_analysis().temp_size_in_bytes for x in (half, full)]
    assert memory[1] <= oracle_families.FAMILIES[family].memory * memory[0]
    assert f"{L},{L}]" not in full.as_text()
    if family in LINEAR:
        flops = [x.cost_analysis()["flops"] for x in (half, full)]
        assert flops[1] <= 2.2 * flops[0]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def attend_by_blocks(attend_block, causal: bool) -> np.ndarray:
    """Applies attend_block(queries, visible) to 256 queries at a time, over all keys; L×E."""
    blocks = [np.arange(start, start + 256) for start in range(0, L, 256)]
    visible = lambda t: np.arange(L)[None] <= (t[:, None] if causal else L)
    return np.concatenate([attend_block(t, np.broadcast_to(visible(t), (256, L))) for t in blocks])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("kind", ["simple", "local", "full"])
def test_aft_of_keys_thirty_times_as_large(kind, causal):
    """Within 1e-4 of float64."""
    k, v, u, w = numbers(L, 3) * 30, numbers(1, L, 3)[0], numbers(2, L, 4)[0], numbers(3, L, 4)[0]
    window = {"simple": 0, "local": 32, "full": None}[kind]
    index = jnp.arange(L, dtype=jnp.int32)[None]
    bias = PositionBias(index, index, window, jnp.asarray(u)[None], jnp.asarray(w)[None]) if kind != "simple" else None
    run = jax.jit(lambda k, v, bias: aft(k, v, jnp.ones((1, L), jnp.int32), bias, causal=causal))
    out = np.asarray(run(k[None, None], v[None, None], bias))[0, 0]

    def attend_block(t, visible):
        pair = u[t].astype(float) @ w.astype(float).T if kind != "simple" else np.zeros((len(t), L))
        if window is not None:
            pair = np.where(np.abs(t[:, None] - np.arange(L)[None]) < window, pair, 0)
        rows = []
        for channel in range(3):
            logs = np.where(visible, k[None, :, channel] + pair, -np.inf)
            weights = np.exp(logs - logs.max(axis=1, keepdims=True))
            rows.append(weights @ v[:, channel].astype(float) / weights.sum(axis=1))
        return np.stack(rows, axis=1)

    expected = attend_by_blocks(attend_block, causal)
    assert np.isfinite(out).all()
    assert np.abs(out - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_linear_attention_of_keys_thirty_times_as_large(causal):
    """Within 1e-4 of float64."""
    q, k, v = numbers(L, 16), numbers(1, L, 16)[0] * 30, numbers(L, 3)
    features = [elu_plus_one(jnp.asarray(x))[None] for x in (q, k)]
    run = jax.jit(lambda q, k, v: linear_attention(q, k, v, whole_row(L), chunk_size=128, causal=causal, packed=False))
    out = np.asarray(run(*features, v[None]))[0]
    phi_q, phi_k = (np.where(x > 0, x + 1.0, np.exp(np.minimum(x, 0.0))) for x in (q.astype(float), k.astype(float)))

    def attend_block(t, visible):
        weights = np.where(visible, phi_q[t] @ phi_k.T, 0)
        return weights @ v.astype(float) / weights.sum(axis=1, keepdims=True)

    expected = attend_by_blocks(attend_block, causal)
    assert np.isfinite(out).all()
    assert np.abs(out - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("scale", [1, 30])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_performer(causal, scale):
    """Within 1e-4 of float64 in log space, also for keys thirty times as large."""
    q, k, v = numbers(L, 16), numbers(1, L, 16)[0] * scale, numbers(L, 3)
    omega = orthogonal_frequencies(jax.random.key(0), 24, 16)

    @jax.jit
    def run(q, k, v):
        features = (log_features(x[None, None], omega) for x in (q, k))
        return favor(*features, v[None, None], whole_row(L), block_size=128, causal=causal, packed=False)

    out = np.asarray(run(q, k, v))[0, 0]
    scaled = [x.astype(float) / 2 for x in (q, k)]  # 2 = 16^¼
    log_q, log_k = (x @ np.asarray(omega, float).T - np.square(x).sum(axis=1, keepdims=True) / 2 for x in scaled)

    def attend_block(t, visible):
        pairs = np.full((len(t), L), -np.inf)
        for feature in range(24):
            pairs = np.logaddexp(pairs, log_q[t, None, feature] + log_k[None, :, feature])
        pairs = np.where(visible, pairs, -np.inf)
        weights = np.exp(pairs - pairs.max(axis=1, keepdims=True))
        return weights @ v.astype(float) / weights.sum(axis=1, keepdims=True)

    assert np.isfinite(out).all()
    expected = attend_by_blocks(attend_block, causal)
    assert np.abs(out - expected).max() < 1e-4 * np.abs(expected).max()
