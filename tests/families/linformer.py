"""Linformer's attention (Wang et al. 2020, eq. 7), with projections summed token by token."""

import math
from types import SimpleNamespace

import numpy as np
from oracles.attention import Row, apply_rotary, attend, split_heads
from oracles.convolution import project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def linformer_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, head_h = softmax(q (E k)ᵀ / √K) F v, with E and F shared by all heads."""
    q, k, v = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    core = p["core"]
    key_projection, value_projection = core["key_slots"], core.get("value_slots", core["key_slots"])
    outs = []
    for h in range(settings.num_heads):
        out, keys = np.zeros_like(v[h]), apply_rotary(k[h], row, settings)
        for t, query in enumerate(apply_rotary(q[h], row, settings)):
            document = [u for u in range(len(x_LxD)) if row.sees(t, u)]
            if not document:
                continue
            key_slots, value_slots = np.zeros((2, settings.linformer.slots, v[h].shape[1]))
            for position, u in enumerate(document):
                key_slots += np.outer(key_projection[position], keys[u])
                value_slots += np.outer(value_projection[position], v[h][u])
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
    # Each token is added to each slot, and each query attends to each slot.
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
        xla_keys={"linformer.slots": 128},
        both_ways=True,  # no causal form
        limits_length=True,
        one_pass=True,
        growth="linear",
    )
}
