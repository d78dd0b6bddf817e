"""Longformer: growing and dilated windows, global tokens, pair by pair (Beltagy et al. 2020, sections 3.1 and 3.2)."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, attend, pair_matrix, split_heads
from oracles.convolution import project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def layer_window(settings: SimpleNamespace) -> int:
    """One-sided window of an undilated head in layer `settings.number`, in tokens."""
    window = settings.window
    return min(round(window.size * window.growth**settings.number), max(settings.max_length, window.size))


def head_dilation(settings: SimpleNamespace, head: int) -> int:
    """Distance between visible tokens of a head; the last heads are dilated."""
    gaps = settings.window.dilations
    dilated = head >= settings.num_heads - settings.window.dilated_heads
    return gaps[settings.number * len(gaps) // settings.num_layers] if dilated else 1


def in_window(settings: SimpleNamespace, head: int, t: int, u: int) -> bool:
    """Whether u is in the window of t."""
    gap = head_dilation(settings, head)
    return abs(t - u) % gap == 0 and abs(t - u) // gap < layer_window(settings)


def is_global(row: Row, settings: SimpleNamespace, t: int) -> bool:
    """Whether t is one of the first tokens of its (contiguous) document."""
    begin = next((u for u in range(t + 1) if row.sees(t, u)), t)
    return t - begin < settings.window.global_tokens


def longformer_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether some head's query t has a weight for key u."""
    del p

    def connected(t: int, u: int) -> bool:
        near = any(in_window(settings, h, t, u) for h in range(settings.num_heads))
        return row.sees(t, u) and (near or is_global(row, settings, t) or is_global(row, settings, u))

    return pair_matrix(connected, len(x_LxD))


def longformer_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o; global tokens use separate projections for queries, keys and values."""

    def attend_head(head: int, prefix: str, sees) -> np.ndarray:
        q, k, v = (
            split_heads(project(x_LxD, p, prefix + name, row, settings), settings.num_heads)[head]
            for name in ("query", "key", "value")
        )
        return attend(
            *(apply_rotary(x, row, settings) for x in (q, k)),
            v,
            sees,
            function="softmax",
            factor=1 / math.sqrt(q.shape[1]),
            divisor=lambda visible: 1,
            bias=lambda t, u: 0.0,
        )

    global_L = np.array([is_global(row, settings, t) for t in range(len(x_LxD))])
    outs = []
    for h in range(settings.num_heads):
        sees = lambda t, u, h=h: row.sees(t, u) and (global_L[u] or in_window(settings, h, t, u))
        out = attend_head(h, "", sees)
        outs.append(np.where(global_L[:, None], attend_head(h, "global_", row.sees), out) if global_L.any() else out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def _maps(s: SimpleNamespace) -> int:
    return (7 if s.window.global_tokens else 4) * s.model_dim**2


def _flops(s: SimpleNamespace, length: int) -> int:
    first, visible = s.window.global_tokens, 0
    for h in range(s.num_heads):
        sees = lambda t, u, h=h: t < first or u < first or in_window(s, h, t, u)
        visible += sum(sees(t, u) for t, u in counting.visible_pairs(s, length))
    return 2 * length * _maps(s) + 2 * visible * 2 * s.model_dim // s.num_heads


WINDOW = Sublayer(longformer_attention, _maps, _flops, lambda s: (6 if s.window.global_tokens else 3) * s.model_dim)
ROWS = {
    "longformer": Family(
        (WINDOW, MLP),
        rotary=True,
        small={
            "window.size": 4,
            "window.growth": 1.5,
            "window.dilations": (1, 2),
            "window.dilated_heads": 1,
        },
        xla_keys={"window.size": 512, "window.dilations": (1,)},
        constant_state=True,
        connects=longformer_pairs,
    )
}
