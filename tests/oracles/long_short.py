"""Long-short range attention (Wu et al. 2020, section 4), its convolutions tap by tap (Wu et al. 2019, section 4)."""

from types import SimpleNamespace

import numpy as np

from oracles.attention import Row, softmax_attention


def attending(settings: SimpleNamespace) -> int:
    """How many heads attend: their share, and of two whole numbers as near the larger."""
    return int(np.floor(settings.lite.attention_share * settings.num_heads + 0.5))


def layer_kernel(settings: SimpleNamespace, number: int) -> int:
    """Taps of a layer."""
    kernels = settings.lite.kernels
    return kernels[min(number, len(kernels) - 1)]


def most_taps(settings: SimpleNamespace) -> int:
    """Taps that each layer's parameters have."""
    return max(layer_kernel(settings, number) for number in range(settings.num_layers))


def long_short_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Attention on the first channels ‖ (Σ_i w_i g_(t+i)) W on the others, g = GLU(x), w = softmax over the taps."""
    long = attending(settings)
    width = long * settings.model_dim // settings.num_heads
    own = SimpleNamespace(**{**vars(settings), "num_heads": long, "num_kv_heads": long})
    attended = softmax_attention(x_LxD[:, :width], p, row, own)
    short = x_LxD[:, width:]
    glu = short @ p["short_value"]["kernel"] / (1 + np.exp(-short @ p["short_gate"]["kernel"]))
    heads = settings.num_heads - long
    convolved = np.zeros_like(glu)
    for t in range(len(glu)):
        scores = (glu[t] @ p["taps"]["kernel"] if settings.lite.convolution == "dynamic" else p["taps"]).reshape(
            heads, -1
        )
        for h in range(heads):
            channels = slice(h * glu.shape[1] // heads, (h + 1) * glu.shape[1] // heads)
            convolved[t, channels] = _convolved(glu[:, channels], scores[h], t, row, settings)
    return np.concatenate([attended, convolved @ p["short_output"]["kernel"]], axis=1)


def _convolved(x_LxE: np.ndarray, scores_W: np.ndarray, t: int, row: Row, settings: SimpleNamespace) -> np.ndarray:
    """Of one token and head. The layer's taps are the last ones, or those in the middle."""
    taps, most = layer_kernel(settings, settings.number), len(scores_W)
    first = most - taps if settings.causal else most // 2 - taps // 2
    weights = np.exp(scores_W[first : first + taps] - scores_W[first : first + taps].max())
    weights /= weights.sum()
    out = np.zeros(x_LxE.shape[1])
    for i, weight in enumerate(weights):
        u = t + i - (taps - 1 if settings.causal else taps // 2)
        if 0 <= u < len(x_LxE) and row.sees(t, u):  # what no tap reads is zero, and keeps its weight
            out += weight * x_LxE[u]
    return out
