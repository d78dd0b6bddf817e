"""Closed forms: parameters, and forward FLOPs by counting the visible pairs."""

from types import SimpleNamespace

from oracles import counting, families
from oracles.row import Sublayer


def parameters(s: SimpleNamespace) -> int:
    """Counts the parameters of the model."""
    embeddings = s.vocab_size * s.model_dim * (1 if s.tie_embeddings else 2)
    positions = {"learned": s.max_length * s.model_dim, "scaled_sinusoid": 1}.get(s.absolute_positions, 0)
    norm = counting.norm_parameters(s)
    sublayers = [(layer, sublayer) for layer in s.layers for sublayer in families.sublayers(layer)]
    period = sum(norm + _sublayer_parameters(layer, sublayer) for layer, sublayer in sublayers)
    return embeddings + positions + s.num_layers // len(s.layers) * period + norm


def _sublayer_parameters(s: SimpleNamespace, sublayer: Sublayer) -> int:
    return sublayer.parameters(s) + s.short_convolution * sublayer.convolved(s)


def flops(s: SimpleNamespace, length: int) -> float:
    """Forward model FLOPs of one sequence: 2 per multiply-add of a product, over visible pairs only."""
    total = 2 * length * s.model_dim * s.vocab_size
    for number in range(s.num_layers):
        layer = s.layers[number % len(s.layers)]
        layer.number = number
        total += sum(_sublayer_flops(layer, sublayer, length) for sublayer in families.sublayers(layer))
    return total


def _sublayer_flops(s: SimpleNamespace, sublayer: Sublayer, length: int) -> float:
    read = counting.count_tap_reads(s, s.short_convolution, length)
    return sublayer.flops(s, length) + 2 * read * sublayer.convolved(s)
