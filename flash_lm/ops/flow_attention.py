"""Flow attention ("Flowformer: Linearizing Transformers with Conservation Flows", Wu et al. 2022, eq. 4–8).

Queries are sinks and keys sources of a flow φ(q)·φ(k), φ = σ. With each sink's incoming flow I and each source's
outgoing flow O set to one, what is left of the other side, Ô and Î, makes the sources compete and opens the sinks:

    I_i = φq_i·Σ φk_j        Î_i = φq_i·Σ φk_j / O_j        out_i = σ(Î_i) φq_i/I_i · Σ φk_j c_j v_j
    O_j = φk_j·Σ φq_i        Ô_j = φk_j·Σ φq_i / I_i        c_j = n softmax_j(Ô)

Causal: every sum is over the tokens up to the current one, n is their number, 1/O and 1/I count n times, and Ô and Î
    are
divided by n (the authors' code). Then all but the sums depends on one token alone, and a state of sums decodes it.
Sums, flows and features are float32, and start again with each document. No sum is the difference of two others.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.ops.linear_attention import linear_sums, prefill_sums
from flash_lm.ops.mixed_chunk_attention import heads_into_batch
from flash_lm.ops.segments import Segments

_CHUNK = 32  # of plain sums, which have no products of queries with keys that a larger chunk would serve

# Sums arrays B×H×L×F over the tokens that each token may see; a name for each sum that a state holds.
Sum = Callable[[str, jax.Array], jax.Array]


class FlowState(NamedTuple):
    """Decode state: sums over the tokens so far, float32.

    flows_BxHx2K: of φk and φq.
    shares_BxHx2K: of n φk / O and n φq / I.
    competition_BxHx1: of e^Ô.
    values_BxHxKxE: of φk c v.
    """

    flows_BxHx2K: jax.Array
    shares_BxHx2K: jax.Array
    competition_BxHx1: jax.Array
    values_BxHxKxE: jax.Array


def no_flows(batch: int, heads: int, key_width: int, value_width: int) -> FlowState:
    """The state before the first token."""
    zeros = lambda *widths: jnp.zeros((batch, heads, *widths), jnp.float32)
    return FlowState(zeros(2 * key_width), zeros(2 * key_width), zeros(1), zeros(key_width, value_width))


def flow_attention(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    segments: Segments,
    *,
    chunk_size: int,
    clamp: float,
    causal: bool,
    packed: bool,
) -> jax.Array:
    """Flow attention (competition and allocation) inside each document.

    Args:
        q_BxHxLxK: queries.
        k_BxHxLxK: keys.
        v_BxHxLxE: values.
        segments: the documents of each sequence.
        chunk_size: C, of the last sum.
        clamp: Ô counts no more than this.
        causal: sums are over the tokens up to the current one.
        packed: a sequence may hold several documents.

    Returns:
        B×H×L×E, dtype of v. Padding gets zeros.
    """
    over = functools.partial(linear_sums, segments=segments, causal=causal, packed=packed)

    def sum_document(name: str, x_BxHxLxF: jax.Array) -> jax.Array:
        x_BxLxF, heads = _beside(x_BxHxLxF), x_BxHxLxF.shape[1]
        ones_BxLx1 = jnp.ones_like(x_BxLxF[..., :1])
        return _apart(over(ones_BxLx1, ones_BxLx1, x_BxLxF, chunk_size=_CHUNK), heads)

    def mix_values(q: jax.Array, k: jax.Array, values: jax.Array) -> jax.Array:
        arrays = (heads_into_batch(x) for x in (q, k, values))
        return over(*arrays, chunk_size=chunk_size).reshape(values.shape)

    count_BxL = segments.offsets_BxL + 1 if causal else segments.lengths_BxL
    q, k = (jax.nn.sigmoid(x.astype(jnp.float32)) for x in (q_BxHxLxK, k_BxHxLxK))
    return _flow(q, k, v_BxHxLxE, count_BxL, clamp, sum_document, mix_values)


def prefill_flow(
    q_BxHxLxK: jax.Array,
    k_BxHxLxK: jax.Array,
    v_BxHxLxE: jax.Array,
    state: FlowState,
    positions_BxL: jax.Array,
    real_BxL: jax.Array,
    *,
    chunk_size: int,
    clamp: float,
) -> tuple[jax.Array, FlowState]:
    """Causal flow attention that continues from a state.

    Args:
        q_BxHxLxK: queries.
        k_BxHxLxK: keys.
        v_BxHxLxE: values.
        state: sums over the tokens before these.
        positions_BxL: number of tokens before each.
        real_BxL: which tokens are not padding; padding is at the end.
        chunk_size: C, of the last sum.
        clamp: Ô counts no more than this.

    Returns:
        B×H×L×E, dtype of v; and the state after the real tokens.
    """
    after, before, heads = {}, state._asdict(), v_BxHxLxE.shape[1]
    real_Bx1xLx1 = real_BxL[:, None, :, None]
    # Padding may be NaN, and zero times NaN is NaN.
    q, k = (jnp.where(real_Bx1xLx1, jax.nn.sigmoid(x.astype(jnp.float32)), 0) for x in (q_BxHxLxK, k_BxHxLxK))
    v = jnp.where(real_Bx1xLx1, v_BxHxLxE, 0)
    ones_BxLx1 = real_BxL.astype(jnp.float32)[..., None]

    def sum_document(name: str, x_BxHxLxF: jax.Array) -> jax.Array:
        last = before[name]
        sums, total_Bx1xF = prefill_sums(
            ones_BxLx1, ones_BxLx1, _beside(x_BxHxLxF), last.reshape(len(last), 1, -1), real_BxL, chunk_size=_CHUNK
        )
        after[name] = total_Bx1xF.reshape(last.shape)
        return _apart(sums, heads)

    def mix_values(q: jax.Array, k: jax.Array, values: jax.Array) -> jax.Array:
        *arrays, last = (heads_into_batch(x) for x in (q, k, values, before["values_BxHxKxE"]))
        real_NxL = jnp.repeat(real_BxL, heads, axis=0)
        sums, total = prefill_sums(*arrays, state_NxKxE=last, real_NxL=real_NxL, chunk_size=chunk_size)
        after["values_BxHxKxE"] = total.reshape(before["values_BxHxKxE"].shape)
        return sums.reshape(values.shape)

    # The same equations as in training; the sums continue from the state and store it in `after`.
    out = _flow(q, k, v, positions_BxL + 1, clamp, sum_document, mix_values)
    return out, FlowState(**after)


def _flow(q, k, v, count_BxL: jax.Array, clamp: float, sum_document: Sum, mix_values: Callable) -> jax.Array:
    """The equations of flow attention, given how to sum: q, k B×H×L×K features, v B×H×L×E."""
    # Incoming flow of the sinks (queries) and outgoing flow of the sources (keys).
    n = count_BxL.astype(jnp.float32)[:, None, :, None]
    both = lambda name, *arrays: jnp.split(sum_document(name, jnp.concatenate(arrays, axis=-1)), 2, axis=-1)
    all_k, all_q = both("flows_BxHx2K", k, q)
    incoming, outgoing = _dot(q, all_k), _dot(k, all_q)
    # Conserved flows: with the other side normalised to 1.
    shares_k, shares_q = both("shares_BxHx2K", _over(k, outgoing) * n, _over(q, incoming) * n)
    allocation = jax.nn.sigmoid(_dot(q, shares_k) / n)
    strength = jnp.exp(jnp.minimum(_dot(k, shares_q) / n, clamp))
    # Competition among the sources is a softmax over their conserved outgoing flow; the sinks allocate by σ.
    competition = _over(strength, sum_document("competition_BxHx1", strength)) * n
    out = mix_values(_over(q, incoming), k, competition * v.astype(jnp.float32))
    return (allocation * out).astype(v.dtype)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x * y).sum(axis=-1, keepdims=True)


def _over(x: jax.Array, total: jax.Array) -> jax.Array:
    """Quotient x / total without an ε, which would bias small features; padding has 0 / 0."""
    return x / jnp.where(total > 0, total, 1)


def _beside(x_BxHxLxF: jax.Array) -> jax.Array:
    """B×L×(H·F): all heads share one sum, since what a token sees is the same for all."""
    x_BxLxHxF = jnp.swapaxes(x_BxHxLxF, 1, 2)
    return x_BxLxHxF.reshape(*x_BxLxHxF.shape[:2], -1)


def _apart(x_BxLxHF: jax.Array, heads: int) -> jax.Array:
    """The inverse of `_beside`."""
    return jnp.swapaxes(x_BxLxHF.reshape(*x_BxLxHF.shape[:2], heads, -1), 1, 2)
