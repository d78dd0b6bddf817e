"""A model with an encoder: it reads the source, and each layer attends to its features."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from oracles.attention import Row, attend, heads, silu
from oracles.families import complete
from oracles.language_model import features_of
from oracles.linear import elu_plus_one
from oracles.segments import offsets, visibility


def encoder_decoder(
    params: dict,
    model: dict,
    inputs: np.ndarray,
    source: np.ndarray,
    segment_ids: np.ndarray,
    source_segment_ids: np.ndarray,
) -> np.ndarray:
    """B×L×V logits; those of padding have no meaning.

    Args:
        params: nested dict of float64 arrays in the model's names.
        model: `config.model` as a dict, with open keys.
        inputs: B×L token ids.
        source: B×M token ids.
        segment_ids: B×L, 0 = padding.
        source_segment_ids: B×M, the segment id of the tokens that see each.
    """
    settings = complete(model)
    layers = settings.encoder.num_layers or settings.num_layers
    of_encoder = {"family": settings.encoder.family, "pattern": (), "num_layers": layers, "causal": False}
    own = {key: getattr(settings.encoder, key) or model[key] for key in ("norm", "absolute_positions")}
    encoder = complete(model | own | of_encoder)
    rows = []
    for ids_L, source_M, own_L, own_M in zip(inputs, source, segment_ids, source_segment_ids, strict=True):
        row = Row(visibility(own_M.tolist(), False), offsets(own_M.tolist()))
        memory = features_of(params["encoder"] | {"embedding": params["embedding"]}, encoder, source_M, row)

        def cross(x_LxD: np.ndarray, p: dict, row: Row, s: SimpleNamespace, memory=memory, ids=(own_L, own_M)):
            sees = lambda t, m: ids[0][t] == ids[1][m] != 0
            return KINDS[s.cross.kind](x_LxD, memory, p, sees, s)

        row = Row(visibility(own_L.tolist(), True), offsets(own_L.tolist()))
        table = params["embedding" if settings.tie_embeddings else "output_embedding"]
        rows.append(features_of(params, settings, ids_L, row, cross=cross) @ table.T)
    return np.stack(rows)


def softmax_cross(x_LxD, memory_MxD, p: dict, sees: Callable, s: SimpleNamespace) -> np.ndarray:
    """Concat(softmax(q kᵀ / √K) v) W_o, queries from x, keys and values from the memory."""
    count = s.cross.heads or s.num_heads
    q, k, v = _projected(x_LxD, memory_MxD, p, count)
    outs = [_pairs(q[h], k[h], v[h], sees, "softmax") for h in range(count)]
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def linear_cross(x_LxD, memory_MxD, p: dict, sees: Callable, s: SimpleNamespace) -> np.ndarray:
    """Concat(Σ φ(q)·φ(k) v / Σ φ(q)·φ(k)) W_o, φ = elu + 1."""
    count = s.cross.heads or s.num_heads
    q, k, v = _projected(x_LxD, memory_MxD, p, count)
    outs = []
    for h in range(count):
        out = np.zeros((len(x_LxD), v[h].shape[1]))
        for t in range(len(out)):
            seen = [m for m in range(len(memory_MxD)) if sees(t, m)]
            weights = [elu_plus_one(q[h][t]) @ elu_plus_one(k[h][m]) for m in seen]
            if seen:
                out[t] = sum(w * v[h][m] for w, m in zip(weights, seen, strict=True)) / sum(weights)
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def gau_cross(x_LxD, memory_MxD, p: dict, sees: Callable, s: SimpleNamespace) -> np.ndarray:
    """(U ⊙ concat(f(q kᵀ / √S) / N · V_h)) W_o, U and q from x, V and k from the memory, N the keys that are seen."""
    count = s.cross.heads or 1
    u, z_q = (silu(x_LxD @ p[name]["kernel"]) for name in ("gate", "query"))
    v, z_k = (silu(memory_MxD @ p[name]["kernel"]) for name in ("value", "key"))
    width = z_q.shape[1]
    variant = lambda z, name, h: z * _of(p[name]["scale"], width)[h] + _of(p[name]["offset"], width)[h]
    outs = []
    for h, v_h in enumerate(heads(v, count)):
        q, k = variant(z_q, "query_variant", h), variant(z_k, "key_variant", h)
        outs.append(_pairs(q, k, v_h, sees, s.cross.attention_function))
    return (u * np.concatenate(outs, axis=1)) @ p["output"]["kernel"]


KINDS = {"softmax": softmax_cross, "linear": linear_cross, "gau": gau_cross}


def _of(parameter: np.ndarray, width: int) -> np.ndarray:
    return parameter.reshape(-1, width)


def _projected(x_LxD: np.ndarray, memory_MxD: np.ndarray, p: dict, count: int) -> list[list[np.ndarray]]:
    """Queries, keys and values of each head."""
    froms = {"query": x_LxD, "key": memory_MxD, "value": memory_MxD}
    return [heads(x @ p[name]["kernel"], count) for name, x in froms.items()]


def _pairs(q: np.ndarray, k: np.ndarray, v: np.ndarray, sees: Callable, function: str) -> np.ndarray:
    factor = 1 / math.sqrt(q.shape[1])
    return attend(q, k, v, sees, function=function, factor=factor, divisor=lambda n: n, bias=lambda t, m: 0.0)
