"""State space units pair by pair (Dao and Gu 2024, eq. 1 and section 7; Hydra: Hwang et al. 2024, section 3)."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, silu, split_heads
from oracles.convolution import project
from oracles.decayed import softplus
from oracles.norms import normalise
from oracles.row import Family, Sublayer


def state_space(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """norm((y + skip ⊙ x) ⊙ silu(z)) W_o."""
    x, shared = (silu(project(x_LxD, p, name, row, settings) + p[f"{name}_bias"]) for name in ("value", "shared"))
    count, length = len(p["skip"]), len(x_LxD)
    skip = p["skip"] if settings.causal else p["skip"] + x @ p["skip_map"]["kernel"]
    out = x * np.repeat(np.broadcast_to(skip, (length, count)), x.shape[1] // count, axis=1)
    ways = 1 if settings.causal else 2
    raw = [(x_LxD @ p["step_size"]["kernel"])[:, way::ways] for way in range(ways)]
    for way, bc in enumerate(np.split(shared, ways, axis=1)):
        b, c = np.split(bc, 2, axis=1)
        steps = softplus(raw[way] + p["step_bias"])
        logs = -np.exp(p["log_rate"]) * steps
        for h, values in enumerate(split_heads(x, count)):
            for t in range(length):
                # Causal: the token reads the sum up to itself. Hydra: that of its neighbour in the same document.
                reader = t if settings.causal else t + (-1, 1)[way]
                if not (0 <= reader < length and row.sees(t, reader)):
                    continue
                for u in range(reader + 1) if way == 0 else range(reader, length):
                    if row.sees(reader, u):
                        between = slice(u + 1, reader + 1) if way == 0 else slice(reader, u)
                        weight = np.exp(logs[between, h].sum()) * (c[reader] @ b[u]) * steps[u, h]
                        out[t, h * values.shape[1] : (h + 1) * values.shape[1]] += weight * values[u]
    gated = out * silu(x_LxD @ p["gate"]["kernel"])
    return normalise("rms", gated, p["norm"], settings.norm_epsilon) @ p["output"]["kernel"]


def _convolved_channels(s: SimpleNamespace) -> int:
    return s.ssd.expanded_dim + 2 * (1 if s.causal else 2) * s.ssd.state_dim


def _maps(s: SimpleNamespace) -> int:
    """Gate, values and output; B, C and Δ in one or two directions; Hydra's map to the skip."""
    d, e, ways = s.model_dim, s.ssd.expanded_dim, 1 if s.causal else 2
    count = e // s.ssd.head_width
    return d * (3 * e + ways * (2 * s.ssd.state_dim + count)) + (0 if s.causal else e * count)


def _parameters(s: SimpleNamespace) -> int:
    """Maps, biases, a gain, and three parameters per head."""
    return _maps(s) + _convolved_channels(s) + 3 * s.ssd.expanded_dim // s.ssd.head_width + s.ssd.expanded_dim


def _flops(s: SimpleNamespace, length: int) -> int:
    """Sums and scores per direction; all heads share the scores."""
    count, states = s.ssd.expanded_dim // s.ssd.head_width, s.ssd.state_dim
    inside, entering, reading = counting.count_chunk_terms(length, s.ssd.chunk_size)
    sums = inside * (states + s.ssd.expanded_dim) + (entering + reading) * count * states * s.ssd.head_width
    return 2 * length * _maps(s) + 2 * sums * (1 if s.causal else 2)


SSD = Sublayer(state_space, _parameters, _flops, _convolved_channels)
ROWS = {
    "mamba2": Family(
        (SSD, SSD),
        defaults={
            "ssd.expanded_dim": lambda s: 2 * s.model_dim,
            "ssd.head_width": lambda s: min(64, 2 * s.model_dim),
            "short_convolution": lambda s: 4 if s.causal else 7,
        },
        small={"ssd.chunk_size": 8, "ssd.head_width": 16, "ssd.state_dim": 8},
        letters=lambda s: {"N": s.ssd.state_dim, "G": 2 * s.model_dim // s.ssd.head_width},
        sizes=({"ssd.state_dim": 12}, {"ssd.state_dim": 20}),
        xla_counts_flops=False,  # XLA also counts the masked half of the pairs in causal chunks, which both forms have
        kernels=(True,),
        constant_state=True,
        decays=True,
        recomputes_products=True,
        # Its gates come before its norm: a relative change of 6e-8 of the parameters moves gradients by 2e-5.
        remat_rtol=3e-5,
        # A gate before a norm is as ill-conditioned as a norm per head: with the usual ε the gradient norm differs by
        # 1.1e-5.
        mesh={"ssd": {"head_width": 16, "state_dim": 8}, "norm_epsilon": 0.1},
    )
}
