"""Reformer's attention, from the paper's section 2, with ranks: softmax over the set of keys that any round sees."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, heads
from oracles.convolution import mapped
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def hashes(x_LxK: np.ndarray, rotations_RxKxF: np.ndarray) -> tuple[np.ndarray, float]:
    """h_r(x) = argmax [x̂ R_r; −x̂ R_r], R×L, and the least distance of a largest entry to the second one."""
    found, margin = [], np.inf
    for rotation in rotations_RxKxF:
        found.append([])
        for x in x_LxK:
            projected = x / np.linalg.norm(x) @ rotation
            entries = np.concatenate([projected, -projected])
            second, first = np.sort(entries)[-2:]
            margin = min(margin, first - second)
            found[-1].append(int(entries.argmax()))
    return np.array(found), margin


def seen(x_LxK: np.ndarray, rotations_RxKxF: np.ndarray, row: Row, window: int) -> np.ndarray:
    """L×L: whether query t sees key u in some round, itself only if it sees nothing else."""
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
    q, v = (heads(mapped(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "value"))
    outs = []
    for h in range(settings.num_heads):
        sees, out = seen(q[h], p["core"]["rotations"], row, settings.lsh.window), np.zeros_like(v[h])
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
    of_heads = heads(mapped(x_LxD, p, "query", row, settings), settings.num_heads)
    return np.any([seen(q, p["core"]["rotations"], row, settings.lsh.window) for q in of_heads], axis=0)


def lsh_margin(x_LxD: np.ndarray, p: dict, row: Row, settings) -> float:
    """How far the tokens are from having other hashes."""
    of_heads = heads(mapped(x_LxD, p, "query", row, settings), settings.num_heads)
    return min(hashes(q, p["core"]["rotations"])[1] for q in of_heads)


def _flops(s: SimpleNamespace, length: int) -> int:
    """Hashes, and the pairs of each round that are near in the sorted row."""
    d, hashed = s.model_dim, length * s.model_dim * s.lsh.num_buckets // 2
    near = counting.near(s, length, s.lsh.window)
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
        grows="linear",
        hashes=True,
    )
}
