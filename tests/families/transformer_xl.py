"""Transformer-XL's attention (section 3.3), pair by pair, over the query's segment and the previous one."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, pair_matrix, split_heads
from oracles.feed_forward import MLP
from oracles.positions import sinusoid
from oracles.row import Family, Sublayer


def in_adjacent_segments(settings, t: int, u: int) -> bool:
    """Whether t and u are in the same or in adjacent segments."""
    return abs(t // settings.xl.segment - u // settings.xl.segment) <= 1


def segment_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether t has a weight for u."""
    del p
    return pair_matrix(lambda t, u: row.sees(t, u) and in_adjacent_segments(settings, t, u), len(x_LxD))


def segment_attention(x_LxD: np.ndarray, p: dict, row: Row, settings, memory_LxD: np.ndarray | None = None):
    """Concat(head_h) W_o with A_ij = (q_i + u)·k_j + (q_i + v)·W_r R_(i−j).

    Args:
        x_LxD: the input.
        p: parameters.
        row: visibility and positions.
        settings: settings of the model.
        memory_LxD: input at tokens of other segments; None: the same input.
    """
    memory_LxD = x_LxD if memory_LxD is None else memory_LxD
    width = x_LxD.shape[1] // settings.num_heads
    project_heads = lambda x, name: split_heads(x @ p[name]["kernel"], settings.num_heads)
    q, k, v, far_k, far_v = (
        project_heads(x_LxD, "query"),
        *(project_heads(x, name) for x in (x_LxD, memory_LxD) for name in ("key", "value")),
    )
    outs = []
    for h in range(settings.num_heads):
        out = np.zeros((len(x_LxD), width))
        for t in range(len(x_LxD)):
            keys = [u for u in range(len(x_LxD)) if row.sees(t, u) and in_adjacent_segments(settings, t, u)]
            if not keys:
                continue
            scores, values = [], []
            for u in keys:
                same_segment = u // settings.xl.segment == t // settings.xl.segment
                distance = (sinusoid(t - u, x_LxD.shape[1]) @ p["distance"]["kernel"])[h * width : (h + 1) * width]
                content = (q[h][t] + p["content_bias"][h]) @ (k if same_segment else far_k)[h][u]
                scores.append((content + (q[h][t] + p["position_bias"][h]) @ distance) / math.sqrt(width))
                values.append((v if same_segment else far_v)[h][u])
            weights = np.exp(np.array(scores) - max(scores))
            out[t] = weights @ np.array(values) / weights.sum()
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def _flops(s: SimpleNamespace, length: int) -> int:
    """Two scores and a value per pair; each distance is mapped once."""
    d, visible = s.model_dim, [(t, u) for t, u in counting.visible_pairs(s, length) if in_adjacent_segments(s, t, u)]
    return 2 * (length * 4 * d * d + len(visible) * 3 * d + len({t - u for t, u in visible}) * d * d)


SEGMENTS = Sublayer(segment_attention, lambda s: 5 * s.model_dim**2 + 2 * s.model_dim, _flops)
ROWS = {
    "transformer_xl": Family(
        (SEGMENTS, MLP),
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(7, 2, s.model_dim)},
        # With a gradient through the memory, derivatives are those of the logits; test_transformer_xl has the default.
        small={"xl.segment": 8, "xl.memory_gradient": True},
        xla_counts_flops=False,  # the first and last segment have a neighbour outside the sequence
        constant_state=True,
        connects=segment_pairs,
        # At large inputs two keys have nearly the same score: a difference of 6e-8 moves the oracle by 4e-5.
        ill_conditioned=("bidirectional",),
    )
}
