"""Long-short range attention (Wu et al. 2020, section 4), its convolutions tap by tap (Wu et al. 2019, section 4)."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer

from families.transformer import softmax_attention


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


def _short_width(s: SimpleNamespace) -> int:
    return s.model_dim - attending(s) * s.model_dim // s.num_heads


def _maps(s: SimpleNamespace) -> int:
    short = _short_width(s)
    return 4 * (s.model_dim - short) ** 2 + 3 * short**2


def _scores_of_a_tap(s: SimpleNamespace) -> int:
    """A number for each head, or a map to one."""
    return (s.num_heads - attending(s)) * (_short_width(s) if s.lite.convolution == "dynamic" else 1)


def _flops(s: SimpleNamespace, length: int) -> int:
    """With the layer's own taps only."""
    short, taps = _short_width(s), layer_kernel(s, s.number)
    maps = _maps(s) + taps * _scores_of_a_tap(s) * (s.lite.convolution == "dynamic")
    attended = len(counting.pairs(s, length)) * 2 * (s.model_dim - short)
    return 2 * (length * maps + attended + counting.taps_read(s, taps, length) * short)


def _letters(s: SimpleNamespace) -> dict[str, int]:
    convolving = s.num_heads // 2  # half of the heads, of an odd number one less
    attended = s.model_dim - convolving * (s.model_dim // s.num_heads)
    return {"X": max(s.lite.kernels[:2]), "O": convolving, "J": attended}


LONG_SHORT = Sublayer(long_short_attention, lambda s: _maps(s) + most_taps(s) * _scores_of_a_tap(s), _flops)
ROWS = {
    "lite_transformer": Family(
        (LONG_SHORT, MLP),
        absolute="learned",
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(41, 8, s.model_dim)},
        small={"lite.kernels": (3, 6)},
        letters=_letters,
        sizes=({"lite.kernels": (7, 3)}, {"lite.kernels": (5, 8, 12)}),  # two layers, so not the last
        counted_at={"lite.kernels": (31,)},
        other_inputs=lambda s: (max(s.lite.kernels) - 1) * s.model_dim // 2,  # of the widest kernel of all layers
    )
}
