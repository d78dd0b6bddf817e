"""Reformer's LSH attention (section 2), with windows over ranks: softmax over the keys visible in any round."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, split_heads
from oracles.convolution import project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def hashes(x_LxK: np.ndarray, rotations_RxKxF: np.ndarray) -> tuple[np.ndarray, float]:
    """h_r(x) = argmax [x̂ R_r; −x̂ R_r], R×L, and the smallest margin of the largest entry over the second."""
    buckets, margin = [], np.inf
    for rotation in rotations_RxKxF:
        buckets.append([])
        for x in x_LxK:
            projected = x / np.linalg.norm(x) @ rotation
            entries = np.concatenate([projected, -projected])
            second, first = np.sort(entries)[-2:]
            margin = min(margin, first - second)
            buckets[-1].append(int(entries.argmax()))
    return np.array(buckets), margin


def visible_pairs(x_LxK: np.ndarray, rotations_RxKxF: np.ndarray, row: Row, window: int) -> np.ndarray:
    """L×L: whether query t sees key u in some round; a token sees itself only if it sees nothing else."""
    length = len(x_LxK)
    sees, pairs = np.zeros((length, length), bool), [(t, u) for t in range(length) for u in range(length)]
    visible = {(t, u) for t, u in pairs if row.sees(t, u)}
    for buckets in hashes(x_LxK, rotations_RxKxF)[0]:
        together = {(t, u) for t, u in visible if buckets[t] == buckets[u]}
        ranks = [sum((t, u) in together for u in range(t)) for t in range(length)]
        for t, u in together:
            sees[t, u] |= abs(ranks[t] - ranks[u]) < window
    for t in range(length):
        sees[t, t] = sees[t, t] and sees[t].sum() == 1
    return sees


def lsh_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, head_h = softmax(q k̂ᵀ) v with k̂ = q / ‖q‖."""
    q, v = (split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "value"))
    outs = []
    for h in range(settings.num_heads):
        sees, out = visible_pairs(q[h], p["core"]["rotations"], row, settings.lsh.window), np.zeros_like(v[h])
        for t in range(len(x_LxD)):
            keys = np.flatnonzero(sees[t])
            if len(keys):
                scores = np.array([q[h][t] @ q[h][u] / np.linalg.norm(q[h][u]) for u in keys])
                weights = np.exp(scores - scores.max())
                out[t] = weights @ v[h][keys] / weights.sum()
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def lsh_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether some head's query t has a weight for key u."""
    head_queries = split_heads(project(x_LxD, p, "query", row, settings), settings.num_heads)
    return np.any([visible_pairs(q, p["core"]["rotations"], row, settings.lsh.window) for q in head_queries], axis=0)


def lsh_margin(x_LxD: np.ndarray, p: dict, row: Row, settings) -> float:
    """Smallest margin of any token's hash."""
    head_queries = split_heads(project(x_LxD, p, "query", row, settings), settings.num_heads)
    return min(hashes(q, p["core"]["rotations"])[1] for q in head_queries)


def _flops(s: SimpleNamespace, length: int) -> int:
    """Hashes, and in each round the pairs that are close in sorted order."""
    d, hashed = s.model_dim, length * s.model_dim * s.lsh.num_buckets // 2
    near = counting.count_near_pairs(s, length, s.lsh.window)
    return 2 * length * 3 * d * d + 2 * s.lsh.num_hashes * (hashed + near * 2 * d)


LSH = Sublayer(lsh_attention, lambda s: 3 * s.model_dim**2, _flops, lambda s: 2 * s.model_dim)
ROWS = {
    "reformer": Family(
        (LSH, MLP),
        absolute="learned",
        # Its keys take no D² parameters.
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(9, 2, s.model_dim)},
        small={"lsh.num_buckets": 4, "lsh.window": 3},
        connects=lsh_pairs,
        growth="linear",
        hashes_tokens=True,
    )
}
