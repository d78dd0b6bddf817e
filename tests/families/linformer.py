"""Linformer's attention (Wang et al. 2020, eq. 7): slots are filled token by token."""

import math
from types import SimpleNamespace

import numpy as np
from oracles.attention import Row, attend, heads, rotated
from oracles.convolution import mapped
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def linformer_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, head_h = softmax(q (E k)ᵀ / √K) F v, with the E and F of all heads."""
    q, k, v = (heads(mapped(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value"))
    core = p["core"]
    for_keys, for_values = core["key_slots"], core.get("value_slots", core["key_slots"])
    outs = []
    for h in range(settings.num_heads):
        out, keys = np.zeros_like(v[h]), rotated(k[h], row, settings)
        for t, query in enumerate(rotated(q[h], row, settings)):
            document = [u for u in range(len(x_LxD)) if row.sees(t, u)]
            if not document:
                continue
            key_slots, value_slots = np.zeros((2, settings.linformer.slots, v[h].shape[1]))
            for place, u in enumerate(document):
                key_slots += np.outer(for_keys[place], keys[u])
                value_slots += np.outer(for_values[place], v[h][u])
            out[t] = attend(
                query[None],
                key_slots,
                value_slots,
                lambda _, slot: True,
                function="softmax",
                factor=1 / math.sqrt(len(query)),
                divisor=lambda visible: 1,
                bias=lambda _, slot: 0.0,
            )[0]
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def _tables(s: SimpleNamespace) -> int:
    return s.max_length * s.linformer.slots * (1 + (s.linformer.share_slots == "none"))


SLOTS = Sublayer(
    linformer_attention,
    lambda s: 4 * s.model_dim**2 + _tables(s),
    # Each token enters each slot, and each query sees each.
    lambda s, length: 2 * length * (4 * s.model_dim**2 + 2 * s.linformer.slots * 2 * s.model_dim),
    lambda s: 3 * s.model_dim,
)
ROWS = {
    "linformer": Family(
        (SLOTS, MLP),
        absolute="learned",
        small={"linformer.slots": 6},
        letters=lambda s: {"M": s.linformer.slots},
        sizes=({"linformer.slots": 3}, {"linformer.slots": 11}),
        tables=_tables,
        counted_at={"linformer.slots": 128},
        both_ways=True,  # there is no causal form
        ends=True,
        one_pass=True,
        grows="linear",
    )
}
