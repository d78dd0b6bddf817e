"""Closed forms: parameters, and forward FLOPs by counting the pairs that are visible."""

from types import SimpleNamespace

from oracles import counting
from oracles.families import FAMILIES
from oracles.row import Sublayer


def parameters(s: SimpleNamespace) -> int:
    """Of the whole model."""
    embeddings = s.vocab_size * s.model_dim * (1 if s.tie_embeddings else 2)
    positions = {"learned": s.max_length * s.model_dim, "scaled_sinusoid": 1}.get(s.absolute_positions, 0)
    norm = counting.norm(s)
    of_layers = [(of_layer, sublayer) for of_layer in s.layers for sublayer in FAMILIES[of_layer.family].sublayers]
    period = sum(norm + _of_sublayer(of_layer, sublayer) for of_layer, sublayer in of_layers)
    return embeddings + positions + s.num_layers // len(s.layers) * period + norm


def _of_sublayer(s: SimpleNamespace, sublayer: Sublayer) -> int:
    return sublayer.parameters(s) + s.short_convolution * sublayer.convolved(s)


def flops(s: SimpleNamespace, length: int) -> float:
    """Forward model FLOPs of one row: 2 for each multiply-add of a product, pairs of tokens only where visible."""
    total = 2 * length * s.model_dim * s.vocab_size
    for number in range(s.num_layers):
        of_layer = s.layers[number % len(s.layers)]
        of_layer.number = number
        total += sum(_sublayer_flops(of_layer, sublayer, length) for sublayer in FAMILIES[of_layer.family].sublayers)
    return total


def _sublayer_flops(s: SimpleNamespace, sublayer: Sublayer, length: int) -> float:
    read = counting.taps_read(s, s.short_convolution, length)
    return sublayer.flops(s, length) + 2 * read * sublayer.convolved(s)
