"""The Conformer's sublayers besides attention (Gulati et al. 2020, section 2); a norm per token replaces batch norm."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, silu
from oracles.convolution import convolve
from oracles.norms import normalise
from oracles.row import Family, Sublayer

from families.transformer import SOFTMAX


def half_step(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """½ swish(x W_up) W_down."""
    return 0.5 * (silu(x_LxD @ p["up"]["kernel"]) @ p["down"]["kernel"])


def closing_half_step(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Norm(x + ½ FFN(Norm(x)))."""
    normal = normalise(settings.norm, x_LxD, p["norm"], settings.norm_epsilon)
    residual = x_LxD + half_step(normal, p, row, settings)
    return normalise(settings.norm, residual, p["closing_norm"], settings.norm_epsilon)


def convolution_module(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """swish(Norm(depthwise(GLU(x)))) W."""
    glu = x_LxD @ p["value"]["kernel"] / (1 + np.exp(-(x_LxD @ p["gate"]["kernel"])))
    convolved = convolve(glu, p["convolutions"]["value"], row.sees, settings.causal)
    normal = normalise(settings.norm, convolved, p["norm"], settings.norm_epsilon)
    return silu(normal) @ p["output"]["kernel"]


def _feed_forward(s: SimpleNamespace) -> int:
    return 2 * s.model_dim * s.mlp_dim


def _module_flops(s: SimpleNamespace, length: int) -> int:
    d = s.model_dim
    return 2 * length * 3 * d * d + 2 * counting.count_tap_reads(s, s.conformer.kernel, length) * d


HALF_STEP = Sublayer(half_step, _feed_forward, lambda s, length: 2 * length * _feed_forward(s))
CONVOLUTION_MODULE = Sublayer(
    convolution_module,
    lambda s: 3 * s.model_dim**2 + s.conformer.kernel * s.model_dim + counting.norm_parameters(s),
    _module_flops,
)
CLOSING_HALF_STEP = Sublayer(
    closing_half_step,
    lambda s: _feed_forward(s) + counting.norm_parameters(s),  # `sizes.parameters` adds the other of its two norms
    lambda s, length: 2 * length * _feed_forward(s),
    owns_residual=True,
)
ROWS = {
    "conformer": Family(
        (HALF_STEP, SOFTMAX, CONVOLUTION_MODULE, CLOSING_HALF_STEP),
        rotary=True,
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(5, 4, s.model_dim)},  # two feed-forward sublayers
        small={"conformer.kernel": 5},
        letters=lambda s: {"X": s.conformer.kernel},
        sizes=({"conformer.kernel": 9}, {"conformer.kernel": 4}),
        xla_keys={"model_dim": 1024, "conformer.kernel": 31},  # many elementwise operations
        other_inputs=lambda s: (s.conformer.kernel - 1) * s.model_dim,
        ends_with_norm=True,
    )
}
