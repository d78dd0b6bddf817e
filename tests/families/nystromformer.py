"""Nyström attention (Xiong et al. 2021, eq. 13 and 14) by segments, and its convolution tap by tap."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, split_heads
from oracles.convolution import convolve, project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def softmax(scores_LxM: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    exponentials = np.exp(scores_LxM - scores_LxM.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def inverse(a: np.ndarray, steps: int) -> np.ndarray:
    """Iterative pseudo-inverse of one matrix."""
    z, eye = a.T / (np.linalg.norm(a, 1) * np.linalg.norm(a, np.inf)), np.eye(len(a))
    for _ in range(steps):
        z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
    return z


def segments(length: int, count: int) -> list[list[int]]:
    """Tokens of a document in each of `count` segments: token t is in segment ⌊t · count / length⌋."""
    members: list[list[int]] = [[] for _ in range(count)]
    for t in range(length):
        members[t * count // length].append(t)
    return members


def nystrom(q_LxK: np.ndarray, k_LxK: np.ndarray, v_LxE: np.ndarray, landmarks: int, steps: int) -> np.ndarray:
    """One head of one document; exact softmax attention if the document has at most as many tokens as landmarks."""
    root = math.sqrt(q_LxK.shape[1])
    if len(q_LxK) <= landmarks:
        return softmax(q_LxK @ k_LxK.T / root) @ v_LxE
    means = lambda x: np.stack([np.mean([x[t] for t in segment], axis=0) for segment in segments(len(x), landmarks)])
    q_means, k_means = means(q_LxK), means(k_LxK)
    first, between, last = (
        softmax(x @ y.T / root) for x, y in ((q_LxK, k_means), (q_means, k_means), (q_means, k_LxK))
    )
    return first @ inverse(between, steps) @ last @ v_LxE


def nystrom_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o; each head's values are also convolved with its taps and added."""
    q, k, v = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    options, outs = settings.nystrom, []
    for h in range(settings.num_heads):
        queries, keys, out = apply_rotary(q[h], row, settings), apply_rotary(k[h], row, settings), np.zeros_like(v[h])
        for t in range(len(x_LxD)):
            document = [u for u in range(len(x_LxD)) if row.sees(t, u)]
            if document and document[0] == t:
                out[document] = nystrom(
                    queries[document], keys[document], v[h][document], options.landmarks, options.pinv_steps
                )
        if options.kernel_size:
            taps = np.repeat(p["core"]["taps"][:, h : h + 1], v[h].shape[1], axis=1)
            out += convolve(v[h], taps, row.sees, causal=False)
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def _flops(s: SimpleNamespace, length: int) -> int:
    m, width, taps = s.nystrom.landmarks, s.model_dim // s.num_heads, s.nystrom.kernel_size
    read = sum(0 <= t + i - taps // 2 < length for t in range(length) for i in range(taps))
    if length <= m:
        attention = len(counting.visible_pairs(s, length)) * 2 * width
    else:  # means of queries and keys, tokens with landmarks twice, and landmarks with each other
        products = [(m, length, 2 * width), (length, m, width), (m, length, width), (m, m, width)]
        products += [(m, length, width), (m, m, width), (length, m, width)]
        attention = sum(a * b * c for a, b, c in products) + 4 * s.nystrom.pinv_steps * m**3
    return 2 * length * 4 * s.model_dim**2 + 2 * s.num_heads * (attention + read * width)


NYSTROM = Sublayer(
    nystrom_attention,
    lambda s: 4 * s.model_dim**2 + s.nystrom.kernel_size * s.num_heads,
    _flops,
    lambda s: 3 * s.model_dim,
)
ROWS = {
    "nystromformer": Family(
        (NYSTROM, MLP),
        absolute="learned",
        small={"nystrom.landmarks": 4, "nystrom.kernel_size": 5},
        letters=lambda s: {"P": s.nystrom.kernel_size},
        sizes=({"nystrom.kernel_size": 9}, {"nystrom.kernel_size": 2}),
        xla_keys={"nystrom.landmarks": 64, "nystrom.kernel_size": 33},
        both_ways=True,  # no causal form
        one_pass=True,
        growth="linear",
    )
}
