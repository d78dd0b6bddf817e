"""FLASH's mixed chunk attention (section 3.2), pair by pair, in a gated attention unit and in heads.

The linear part is computed as Σ_u (q_t·k_u) v_u / N over the tokens u of other chunks, without a running sum.
"""

import numpy as np

from oracles import normalizers
from oracles.attention import Row, attend
from oracles.positions import relative_bias


def local_part(q, k, v, row: Row, settings, *, function: str, bias_name: str, bias_p: dict | None) -> np.ndarray:
    """f(q kᵀ · factor + b) / divisor · v over the visible keys of the chunk, and of adjacent ones if overlapping."""
    chunk, overlap = settings.chunks.size, int(settings.chunks.overlapping)
    span = chunk * (1 + overlap * (1 if settings.causal else 2))
    bias = relative_bias(bias_name, chunk * (1 + overlap), settings.causal, bias_p)
    start = lambda t: (t // chunk - overlap) * chunk
    return attend(
        q,
        k,
        v,
        lambda t, u: abs(t // chunk - u // chunk) <= overlap and row.sees(t, u),
        function=function,
        factor=normalizers.score_factor(settings, function, q.shape[1], span),
        divisor=lambda visible: normalizers.local(settings, visible, span),
        # Positions relative to the chunk: a bias of the distance alone has the same values for them.
        bias=lambda t, u: bias(t - start(t), u - start(t)),
    )


def global_part(q, k, v, row: Row, settings) -> np.ndarray:
    """Σ (q_t·k_u) v_u / N over the visible u of earlier chunks if causal, else of the document."""
    out_LxE = np.zeros_like(v)
    for t in range(len(q)):
        earlier = lambda u, t=t: u // settings.chunks.size < t // settings.chunks.size
        visible = [u for u in range(len(k)) if row.sees(t, u) and (not settings.causal or earlier(u))]
        for u in visible:
            n = normalizers.linear(settings, len(visible), len(q))
            out_LxE[t] += (q[t] @ k[u]) * v[u] / n
    return out_LxE
