"""Closed forms: parameters, and forward FLOPs by counting the pairs that are visible."""

import math
from types import SimpleNamespace

from oracles.aft import aft_conv, aft_full, aft_local, aft_simple
from oracles.attention import gau_quadratic, softmax_attention
from oracles.based import taylor_attention
from oracles.conformer import closing_half_step, convolution_module, half_step
from oracles.cosformer import cosine_attention
from oracles.delta import gated_delta
from oracles.families import FAMILIES
from oracles.feed_forward import glu, mlp
from oracles.flow import flow_attention
from oracles.gated_linear import gated_linear
from oracles.linear import favor_attention, linear_attention
from oracles.linformer import linformer_attention
from oracles.log_sparse import at_offset, log_sparse_attention
from oracles.long_short import attending, layer_kernel, long_short_attention, most_taps
from oracles.lsh import lsh_attention
from oracles.mega import mega
from oracles.mixed_chunks import gau_mixed_chunk, softmax_mixed_chunk
from oracles.nystrom import nystrom_attention
from oracles.positions import T5_BUCKETS
from oracles.retention import retention
from oracles.rwkv import channel_mix, time_mix
from oracles.ssd import state_space
from oracles.transformer_xl import segment_attention, within_reach
from oracles.windows import adaptive_span_attention, gap_of, layer_window, longformer_attention


def parameters(s: SimpleNamespace) -> int:
    """Of the whole model."""
    embeddings = s.vocab_size * s.model_dim * (1 if s.tie_embeddings else 2)
    positions = {"learned": s.max_length * s.model_dim, "scaled_sinusoid": 1}.get(s.absolute_positions, 0)
    norm = _norm(s)
    period = sum(norm + _sublayer(of_layer, sublayer) for of_layer, sublayer in _sublayers(s))
    return embeddings + positions + s.num_layers // len(s.layers) * period + norm


def _norm(s: SimpleNamespace) -> int:
    return {"layer": 2 * s.model_dim, "rms": s.model_dim, "scale": 1}[s.norm]


def _sublayers(s: SimpleNamespace) -> list:
    return [(of_layer, sublayer) for of_layer in s.layers for sublayer in FAMILIES[of_layer.family].sublayers]


def _sublayer(s: SimpleNamespace, sublayer) -> int:
    return _without_convolutions(s, sublayer) + s.short_convolution * _convolved(s, sublayer)


def _convolved(s: SimpleNamespace, sublayer) -> int:
    """Channels with a filter: of queries, keys and values; of V and Z; of keys and values."""
    d = s.model_dim
    if sublayer in (gau_quadratic, gau_mixed_chunk):
        parts = 1 if sublayer is gau_quadratic else s.chunks.local_attention + s.chunks.global_attention
        return s.gau.expanded_dim + s.gau.shared_dim * (2 * parts * s.gau.heads if s.gau.query_key == "dense" else 1)
    nothing = (
        mlp,
        glu,
        mega,
        segment_attention,
        half_step,
        closing_half_step,
        convolution_module,
        long_short_attention,
    )
    if sublayer in nothing:
        return 0
    if sublayer is softmax_attention:
        return d + 2 * d // s.num_heads * s.num_kv_heads
    if sublayer is log_sparse_attention:  # of a full filter: weights of one tap
        return 2 * d * (d if s.log_sparse.convolution == "full" else 1)
    if sublayer is longformer_attention:
        return (6 if s.window.global_tokens else 3) * d
    if sublayer in (aft_full, aft_local, aft_simple, lsh_attention):
        return 2 * d
    if sublayer is gated_delta:
        return 2 * s.delta.key_dim + s.delta.value_dim
    if sublayer is gated_linear:
        return 2 * s.gla.key_dim + d
    if sublayer is taylor_attention:
        return 2 * s.num_heads * s.based.feature_dim + d
    if sublayer is state_space:
        return s.ssd.expanded_dim + 2 * (1 if s.causal else 2) * s.ssd.state_dim
    if sublayer is retention:
        return (2 + s.retention.value_expand) * d
    return d + s.num_heads if sublayer is aft_conv else 3 * d


def _without_convolutions(s: SimpleNamespace, sublayer) -> int:
    d, e = s.model_dim, s.gau.expanded_dim
    # Each with a q and a k, each of which has a scale and an offset.
    parts = s.chunks.local_attention + s.chunks.global_attention
    return {
        softmax_attention: 2 * d * d + 2 * d * d // s.num_heads * s.num_kv_heads,
        linear_attention: 4 * d * d,
        favor_attention: 4 * d * d,
        cosine_attention: 4 * d * d,
        flow_attention: 4 * d * d,
        aft_full: 4 * d * d + 2 * s.max_length * s.aft.bias_dim,
        aft_local: 4 * d * d + 2 * s.max_length * s.aft.bias_dim,
        aft_simple: 4 * d * d,
        aft_conv: 3 * d * d + s.num_heads * (d + (s.aft.window if s.causal else 2 * s.aft.window - 1) + 2),
        linformer_attention: 4 * d * d + s.max_length * s.linformer.slots * (1 + (s.linformer.share_slots == "none")),
        nystrom_attention: 4 * d * d + s.nystrom.kernel_size * s.num_heads,
        longformer_attention: (7 if s.window.global_tokens else 4) * d * d,
        adaptive_span_attention: 4 * d * d + s.num_heads,
        log_sparse_attention: (2 if s.log_sparse.convolution == "full" else 4) * d * d,
        lsh_attention: 3 * d * d,
        retention: (2 + 3 * s.retention.value_expand) * d * d,
        # Of bias, gain, and three numbers a head.
        state_space: _maps_of_states(s)
        + _convolved(s, state_space)
        + 3 * s.ssd.expanded_dim // s.ssd.head_width
        + s.ssd.expanded_dim,
        # A gain for all heads, and two numbers a head.
        gated_delta: _maps_of_delta(s) + s.delta.value_dim // s.num_heads + 2 * s.num_heads * s.delta.decay,
        taylor_attention: 2 * d * d + 2 * d * s.num_heads * s.based.feature_dim,
        # A bias of the decays, and a gain for all heads.
        gated_linear: _maps_of_gates(s) + s.gla.key_dim + d // s.num_heads,
        # Two scales and offsets, a bias, one number for the token itself, and four for each sum of the averages.
        mega: _maps_of_mega(s)
        + 4 * s.mega.shared_dim
        + _bias_of(s.mega, s.chunks.size * (1 + s.chunks.overlapping))
        + d
        + 4 * _sums_of_mega(s),
        segment_attention: 5 * d * d + 2 * d,
        time_mix: 4 * d * d + 5 * d,
        channel_mix: d * d + 2 * d * s.mlp_dim + 2 * d,
        half_step: 2 * d * s.mlp_dim,
        # The model counts one of its two norms.
        closing_half_step: 2 * d * s.mlp_dim + _norm(s),
        convolution_module: 3 * d * d + s.conformer.kernel * d + _norm(s),
        long_short_attention: _maps_of_long_short(s) + most_taps(s) * _scores_of_a_tap(s),
        mlp: 2 * d * s.mlp_dim,
        glu: 3 * d * s.mlp_dim,
        gau_quadratic: 3 * d * e + _queries_and_keys(s, 1) + _bias(s, s.max_length),
        gau_mixed_chunk: 3 * d * e
        + _queries_and_keys(s, parts)
        + (_bias(s, s.chunks.size * (1 + s.chunks.overlapping)) if s.chunks.local_attention else 0),
        softmax_mixed_chunk: 4 * d * d + 4 * d * parts,
    }[sublayer]


def _maps_of_delta(s: SimpleNamespace) -> int:
    return s.model_dim * (2 * s.delta.key_dim + 3 * s.delta.value_dim + (1 + s.delta.decay) * s.num_heads)


def _maps_of_mega(s: SimpleNamespace) -> int:
    return s.model_dim * (3 * s.mega.expanded_dim + s.mega.shared_dim + 2 * s.model_dim)


def _sums_of_mega(s: SimpleNamespace) -> int:
    return (1 if s.causal else 2) * s.model_dim * s.mega.ema_dim


def _maps_of_gates(s: SimpleNamespace) -> int:
    d, keys = s.model_dim, s.gla.key_dim
    return d * (2 * keys + 3 * d) + s.gla.gate_rank * (d + keys)


def _short_width(s: SimpleNamespace) -> int:
    return s.model_dim - attending(s) * s.model_dim // s.num_heads


def _maps_of_long_short(s: SimpleNamespace) -> int:
    short = _short_width(s)
    return 4 * (s.model_dim - short) ** 2 + 3 * short**2


def _scores_of_a_tap(s: SimpleNamespace) -> int:
    """A number for each head, or a map to one."""
    return (s.num_heads - attending(s)) * (_short_width(s) if s.lite.convolution == "dynamic" else 1)


def _taps_read(s: SimpleNamespace, taps: int, length: int) -> int:
    """How many taps of a row's tokens read one of its tokens."""
    own = taps - 1 if s.causal else taps // 2
    return sum(0 <= t + i - own < length for t in range(length) for i in range(taps))


def _maps_of_states(s: SimpleNamespace) -> int:
    """Gate, values and output; B, C and Δ in one or two directions; Hydra's map to the skip."""
    d, e, ways = s.model_dim, s.ssd.expanded_dim, 1 if s.causal else 2
    heads = e // s.ssd.head_width
    return d * (3 * e + ways * (2 * s.ssd.state_dim + heads)) + (0 if s.causal else e * heads)


def _queries_and_keys(s: SimpleNamespace, parts: int) -> int:
    """Of a gated attention unit."""
    arrays = 2 * parts * s.gau.heads
    projections = arrays if s.gau.query_key == "dense" else 1
    return projections * s.model_dim * s.gau.shared_dim + 2 * arrays * s.gau.shared_dim


def _bias(s: SimpleNamespace, reach: int) -> int:
    return _bias_of(s.gau, reach)


def _bias_of(unit: SimpleNamespace, reach: int) -> int:
    return {"none": 0, "toeplitz": 2 * reach - 1, "t5": T5_BUCKETS, "rope": 2 * unit.shared_dim}[unit.relative_bias]


def flops(s: SimpleNamespace, length: int) -> float:
    """Forward model FLOPs of one row: 2 for each multiply-add of a product, pairs of tokens only where visible."""
    total = 2 * length * s.model_dim * s.vocab_size
    for number in range(s.num_layers):
        of_layer = s.layers[number % len(s.layers)]
        of_layer.number = number
        total += sum(_sublayer_flops(of_layer, sublayer, length) for sublayer in FAMILIES[of_layer.family].sublayers)
    return total


def _sublayer_flops(s: SimpleNamespace, sublayer, length: int) -> float:
    read, channels = _taps_read(s, s.short_convolution, length), _convolved(s, sublayer)
    return _flops_without_convolutions(s, sublayer, length) + 2 * read * channels


def _flops_without_convolutions(s: SimpleNamespace, sublayer, length: int) -> float:
    d, e, k = s.model_dim, s.gau.expanded_dim, s.gau.shared_dim
    of_sums = sublayer in (
        linear_attention,
        favor_attention,
        cosine_attention,
        flow_attention,
        retention,
        taylor_attention,
    )
    size = s.ssd.chunk_size if sublayer is state_space else s.linear.chunk_size if of_sums else s.chunks.size
    chunk = lambda t: t // size
    pairs = [(t, u) for t in range(length) for u in range(length) if u <= t or not s.causal]
    quadratic = sublayer is gau_quadratic
    parts = 1 if quadratic else s.chunks.local_attention + s.chunks.global_attention
    unit = 2 * length * (3 * d * e + d * k * (2 * parts * s.gau.heads if s.gau.query_key == "dense" else 1))
    if sublayer is softmax_attention:
        return 2 * length * _without_convolutions(s, sublayer) + 2 * len(pairs) * 2 * d
    if sublayer is linformer_attention:  # each token enters each slot, and each query sees each
        return 2 * length * (4 * d * d + 2 * s.linformer.slots * 2 * d)
    if sublayer is nystrom_attention:
        m, width, taps = s.nystrom.landmarks, d // s.num_heads, s.nystrom.kernel_size
        read = sum(0 <= t + i - taps // 2 < length for t in range(length) for i in range(taps))
        if length <= m:
            attention = len(pairs) * 2 * width
        else:  # means of queries and keys, tokens with landmarks twice, and landmarks with each other
            products = [(m, length, 2 * width), (length, m, width), (m, length, width), (m, m, width)]
            products += [(m, length, width), (m, m, width), (length, m, width)]
            attention = sum(a * b * c for a, b, c in products) + 4 * s.nystrom.pinv_steps * m**3
        return 2 * length * 4 * d * d + 2 * s.num_heads * (attention + read * width)
    if sublayer is longformer_attention:
        first, visible = s.window.global_tokens, 0
        for h in range(s.num_heads):
            reach = (layer_window(s) - 1) * gap_of(s, h)
            near = lambda t, u, h=h, reach=reach: abs(t - u) <= reach and (t - u) % gap_of(s, h) == 0
            visible += sum(t < first or u < first or near(t, u) for t, u in pairs)
        return 2 * length * _without_convolutions(s, sublayer) + 2 * visible * 2 * d // s.num_heads
    if sublayer is log_sparse_attention:
        read = sum(at_offset(s, t, u) for t, u in pairs)
        return 2 * length * _without_convolutions(s, sublayer) + 2 * read * 2 * d
    if sublayer is adaptive_span_attention:  # of the largest spans
        near = sum(abs(t - u) < s.span.limit for t, u in pairs)
        return 2 * length * 4 * d * d + 2 * near * 2 * d
    if sublayer is lsh_attention:  # hashes, and the pairs of each round that are near in the sorted row
        near = sum(abs(t - u) < s.lsh.window for t, u in pairs)
        hashes = length * d * s.lsh.num_buckets // 2
        return 2 * length * 3 * d * d + 2 * s.lsh.num_hashes * (hashes + near * 2 * d)
    if sublayer is mega:  # pairs inside a chunk; every token enters its channels' sums and reads them
        inside = sum(abs(chunk(t) - chunk(u)) <= s.chunks.overlapping for t, u in pairs)
        sums = length * 2 * _sums_of_mega(s)
        return 2 * (length * _maps_of_mega(s) + inside * (s.mega.shared_dim + s.mega.expanded_dim) + sums)
    if sublayer is segment_attention:  # two scores and a value of a pair; each distance is mapped once
        near = [(t, u) for t, u in pairs if within_reach(s, t, u)]
        return 2 * (length * 4 * d * d + len(near) * 3 * d + len({t - u for t, u in near}) * d * d)
    if sublayer is time_mix:
        return 2 * length * 4 * d * d
    if sublayer is channel_mix:
        return 2 * length * (d * d + 2 * d * s.mlp_dim)
    if sublayer in (half_step, closing_half_step):
        return 2 * length * 2 * d * s.mlp_dim
    if sublayer is convolution_module:
        return 2 * length * 3 * d * d + 2 * _taps_read(s, s.conformer.kernel, length) * d
    if sublayer is long_short_attention:  # with the layer's own taps only
        short, taps = _short_width(s), layer_kernel(s, s.number)
        maps = _maps_of_long_short(s) + taps * _scores_of_a_tap(s) * (s.lite.convolution == "dynamic")
        return 2 * (length * maps + len(pairs) * 2 * (d - short) + _taps_read(s, taps, length) * short)
    if sublayer is mlp:
        return 2 * length * 2 * d * s.mlp_dim
    if sublayer is glu:
        return 2 * length * 3 * d * s.mlp_dim
    if quadratic:
        return unit + 2 * len(pairs) * (s.gau.heads * k + e)
    inside = sum(chunk(t) == chunk(u) for t, u in pairs)
    # A token enters a sum if another chunk reads it, and reads one if another chunk is before it.
    if s.causal:
        products = sum(chunk(t) < chunk(length - 1) for t in range(length)) + sum(chunk(t) > 0 for t in range(length))
    else:
        products = 2 * length
    if sublayer is aft_simple:
        return 2 * length * 4 * d * d
    if sublayer in (aft_full, aft_local):  # numerator and denominator of each channel, and w itself
        near = sum(abs(t - u) < s.aft.window or sublayer is aft_full for t, u in pairs)
        return 2 * length * 4 * d * d + 2 * near * (2 * d + s.aft.bias_dim)
    if sublayer is aft_conv:
        near = sum(abs(t - u) < s.aft.window for t, u in pairs)
        return 2 * length * (3 * d * d + d * s.num_heads) + 2 * near * (d + s.num_heads)
    if sublayer is gated_delta:  # queries and values with keys; k kᵀ and the substitution below the diagonal; the sum
        key, value = s.delta.key_dim // s.num_heads, s.delta.value_dim // s.num_heads
        chunked = lambda t: t // s.delta.chunk_size
        before = sum(chunked(t) == chunked(u) for t in range(length) for u in range(t + 1))
        reading = sum(chunked(t) > 0 for t in range(length))
        crossing = sum(chunked(t) < chunked(length - 1) for t in range(length))
        inside = before * (key + value) + (before - length) * (key + key + value)
        return 2 * length * _maps_of_delta(s) + 2 * s.num_heads * (inside + (2 * reading + crossing) * key * value)
    if sublayer is gated_linear:  # chunks end where the decays may have added up to -80
        key, value = s.gla.key_dim // s.num_heads, d // s.num_heads
        chunked = lambda t: t // min(s.linear.chunk_size, math.floor(80 / -s.gla.gate_floor))
        before = sum(chunked(t) == chunked(u) for t in range(length) for u in range(t + 1))
        across = sum(chunked(t) > 0 for t in range(length)) + sum(
            chunked(t) < chunked(length - 1) for t in range(length)
        )
        return 2 * length * _maps_of_gates(s) + 2 * s.num_heads * (before * (key + value) + across * key * value)
    if sublayer is state_space:  # each direction has its own sums, and scores that all heads share
        heads, states = s.ssd.expanded_dim // s.ssd.head_width, s.ssd.state_dim
        before = sum(chunk(t) == chunk(u) for t in range(length) for u in range(t + 1))
        across = sum(chunk(t) < chunk(length - 1) for t in range(length)) + sum(chunk(t) > 0 for t in range(length))
        sums = before * (states + s.ssd.expanded_dim) + across * heads * states * s.ssd.head_width
        return 2 * length * _maps_of_states(s) + 2 * sums * (1 if s.causal else 2)
    if sublayer is retention:  # bidirectional: sums from either side
        width, values = d // s.num_heads, s.retention.value_expand * d // s.num_heads
        across = sum(chunk(t) < chunk(length - 1) for t in range(length)) + sum(chunk(t) > 0 for t in range(length))
        inside = sum(chunk(t) == chunk(u) for t, u in pairs)
        sums = inside * (width + values) + across * width * values * (1 if s.causal else 2)
        return 2 * length * _without_convolutions(s, sublayer) + 2 * s.num_heads * sums
    if of_sums:
        width = d // s.num_heads
        features = {favor_attention: s.favor.features, cosine_attention: 2 * width}.get(sublayer, width)
        if sublayer is taylor_attention:  # one, the numbers, the squares, and the products of two
            features = 1 + 2 * s.based.feature_dim + math.comb(s.based.feature_dim, 2)
        values = width if sublayer is flow_attention else width + 1  # the denominator is one more value
        inside = inside if s.causal else 0
        sums = inside * (features + values) + products * features * values
        # Features that are products; in flow attention incoming and outgoing flows, as they are and conserved.
        making = {favor_attention: 2 * features * width, flow_attention: 4 * width}.get(sublayer, 0) * length
        return 2 * length * _without_convolutions(s, sublayer) + 2 * s.num_heads * (making + sums)
    local, global_ = s.chunks.local_attention, s.chunks.global_attention
    inside = sum(abs(chunk(t) - chunk(u)) <= s.chunks.overlapping for t, u in pairs)
    if sublayer is gau_mixed_chunk:
        return unit + 2 * (local * inside * (s.gau.heads * k + e) + global_ * products * k * e)
    assert sublayer is softmax_mixed_chunk
    width = d // s.num_heads
    return 2 * length * 4 * d * d + 2 * (local * inside * 2 * d + global_ * products * s.num_heads * width * width)
