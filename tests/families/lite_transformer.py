"""Long-short range attention (Wu et al. 2020, section 4), its convolutions tap by tap (Wu et al. 2019, section 4)."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer

from families.transformer import softmax_attention


def attention_heads(settings: SimpleNamespace) -> int:
    """Number of heads that attend: their share of all heads, rounded half up."""
    return int(np.floor(settings.lite.attention_share * settings.num_heads + 0.5))


def layer_kernel(settings: SimpleNamespace, number: int) -> int:
    """Number of taps of a layer."""
    kernels = settings.lite.kernels
    return kernels[min(number, len(kernels) - 1)]


def max_taps(settings: SimpleNamespace) -> int:
    """Number of taps in each layer's parameters: that of the widest layer."""
    return max(layer_kernel(settings, number) for number in range(settings.num_layers))


def long_short_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Attention on the first channels ‖ (Σ_i w_i g_(t+i)) W on the others, g = GLU(x), w = softmax over the taps."""
    long = attention_heads(settings)
    width = long * settings.model_dim // settings.num_heads
    attention_settings = SimpleNamespace(**{**vars(settings), "num_heads": long, "num_kv_heads": long})
    attended = softmax_attention(x_LxD[:, :width], p, row, attention_settings)
    short = x_LxD[:, width:]
    glu = short @ p["short_value"]["kernel"] / (1 + np.exp(-(short @ p["short_gate"]["kernel"])))
    short_heads = settings.num_heads - long
    convolved = np.zeros_like(glu)
    for t in range(len(glu)):
        scores = (glu[t] @ p["taps"]["kernel"] if settings.lite.convolution == "dynamic" else p["taps"]).reshape(
            short_heads, -1
        )
        for h in range(short_heads):
            channels = slice(h * glu.shape[1] // short_heads, (h + 1) * glu.shape[1] // short_heads)
            convolved[t, channels] = _convolve_token(glu[:, channels], scores[h], t, row, settings)
    return np.concatenate([attended, convolved @ p["short_output"]["kernel"]], axis=1)


def _convolve_token(x_LxE: np.ndarray, scores_W: np.ndarray, t: int, row: Row, settings: SimpleNamespace) -> np.ndarray:
    """Output of one token and head. The layer uses the last taps if causal, else those in the middle."""
    taps, max_width = layer_kernel(settings, settings.number), len(scores_W)
    first = max_width - taps if settings.causal else max_width // 2 - taps // 2
    weights = np.exp(scores_W[first : first + taps] - scores_W[first : first + taps].max())
    weights /= weights.sum()
    out = np.zeros(x_LxE.shape[1])
    for i, weight in enumerate(weights):
        u = t + i - (taps - 1 if settings.causal else taps // 2)
        if 0 <= u < len(x_LxE) and row.sees(t, u):  # invisible tokens count as zero, with their weight
            out += weight * x_LxE[u]
    return out


def _short_width(s: SimpleNamespace) -> int:
    return s.model_dim - attention_heads(s) * s.model_dim // s.num_heads


def _maps(s: SimpleNamespace) -> int:
    short = _short_width(s)
    return 4 * (s.model_dim - short) ** 2 + 3 * short**2


def _parameters_per_tap(s: SimpleNamespace) -> int:
    """One parameter per head, or a linear map to one if dynamic."""
    return (s.num_heads - attention_heads(s)) * (_short_width(s) if s.lite.convolution == "dynamic" else 1)


def _flops(s: SimpleNamespace, length: int) -> int:
    """Counts the taps of this layer only."""
    short, taps = _short_width(s), layer_kernel(s, s.number)
    maps = _maps(s) + taps * _parameters_per_tap(s) * (s.lite.convolution == "dynamic")
    attended = len(counting.visible_pairs(s, length)) * 2 * (s.model_dim - short)
    return 2 * (length * maps + attended + counting.count_tap_reads(s, taps, length) * short)


def _letters(s: SimpleNamespace) -> dict[str, int]:
    convolving = s.num_heads // 2  # half of the heads, rounded down
    attended = s.model_dim - convolving * (s.model_dim // s.num_heads)
    return {"X": max(s.lite.kernels[:2]), "O": convolving, "J": attended}


LONG_SHORT = Sublayer(long_short_attention, lambda s: _maps(s) + max_taps(s) * _parameters_per_tap(s), _flops)
ROWS = {
    "lite_transformer": Family(
        (LONG_SHORT, MLP),
        absolute="learned",
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(41, 8, s.model_dim)},
        small={"lite.kernels": (3, 6)},
        letters=_letters,
        sizes=({"lite.kernels": (7, 3)}, {"lite.kernels": (5, 8, 12)}),  # two layers, so the third kernel is unused
        xla_keys={"lite.kernels": (31,)},
        other_inputs=lambda s: (max(s.lite.kernels) - 1) * s.model_dim // 2,  # the widest kernel of all layers
    )
}
