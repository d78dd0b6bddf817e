"""Encoder-decoder model: the encoder reads the source, and each decoder layer attends to its features."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from oracles.attention import Row, attend, silu, split_heads
from oracles.biases import with_biases
from oracles.families import complete
from oracles.language_model import final_features
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
    """Logits, B×L×V; those of padding have no meaning.

    Args:
        params: nested dict of float64 arrays in the model's names.
        model: `config.model` as a dict, with open keys.
        inputs: B×L token ids.
        source: B×M token ids.
        segment_ids: B×L, 0 = padding.
        source_segment_ids: B×M, the segment id of the decoder tokens that see each source token.
    """
    settings, params = complete(model), with_biases(params)
    layers = settings.encoder.num_layers or settings.num_layers
    encoder_keys = {"family": settings.encoder.family, "pattern": (), "num_layers": layers, "causal": False}
    inherited = {key: getattr(settings.encoder, key) or model[key] for key in ("norm", "absolute_positions")}
    encoder = complete(model | inherited | encoder_keys)
    rows = []
    for ids_L, source_M, segments_L, segments_M in zip(inputs, source, segment_ids, source_segment_ids, strict=True):
        row = Row(visibility(segments_M.tolist(), False), offsets(segments_M.tolist()))
        memory = final_features(params["encoder"] | {"embedding": params["embedding"]}, encoder, source_M, row)

        def cross(
            x_LxD: np.ndarray, p: dict, row: Row, s: SimpleNamespace, memory=memory, ids=(segments_L, segments_M)
        ):
            sees = lambda t, m: ids[0][t] == ids[1][m] != 0
            return KINDS[s.cross.kind](x_LxD, memory, p, sees, s)

        row = Row(visibility(segments_L.tolist(), True), offsets(segments_L.tolist()))
        table = params["embedding" if settings.tie_embeddings else "output_embedding"]
        rows.append(final_features(params, settings, ids_L, row, cross=cross) @ table.T)
    return np.stack(rows)


def softmax_cross(x_LxD, memory_MxD, p: dict, sees: Callable, s: SimpleNamespace) -> np.ndarray:
    """Concat(softmax(q kᵀ / √K) v) W_o, queries from x, keys and values from the memory."""
    count = s.cross.heads or s.num_heads
    q, k, v = _project_heads(x_LxD, memory_MxD, p, count)
    outs = [_attend(q[h], k[h], v[h], sees, "softmax") for h in range(count)]
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def linear_cross(x_LxD, memory_MxD, p: dict, sees: Callable, s: SimpleNamespace) -> np.ndarray:
    """Concat(Σ φ(q)·φ(k) v / Σ φ(q)·φ(k)) W_o, φ = elu + 1."""
    count = s.cross.heads or s.num_heads
    q, k, v = _project_heads(x_LxD, memory_MxD, p, count)
    outs = []
    for h in range(count):
        out = np.zeros((len(x_LxD), v[h].shape[1]))
        for t in range(len(out)):
            visible = [m for m in range(len(memory_MxD)) if sees(t, m)]
            weights = [elu_plus_one(q[h][t]) @ elu_plus_one(k[h][m]) for m in visible]
            if visible:
                out[t] = sum(w * v[h][m] for w, m in zip(weights, visible, strict=True)) / sum(weights)
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def gau_cross(x_LxD, memory_MxD, p: dict, sees: Callable, s: SimpleNamespace) -> np.ndarray:
    """(U ⊙ concat(f(q kᵀ / √S) / N · V_h)) W_o, U and q from x, V and k from the memory, N visible keys."""
    count = s.cross.heads or 1
    u, z_q = (silu(x_LxD @ p[name]["kernel"]) for name in ("gate", "query"))
    v, z_k = (silu(memory_MxD @ p[name]["kernel"]) for name in ("value", "key"))
    width = z_q.shape[1]
    variant = lambda z, name, h: (
        z * _split_parameter(p[name]["scale"], width)[h] + _split_parameter(p[name]["offset"], width)[h]
    )
    outs = []
    for h, v_h in enumerate(split_heads(v, count)):
        q, k = variant(z_q, "query_variant", h), variant(z_k, "key_variant", h)
        outs.append(_attend(q, k, v_h, sees, s.cross.attention_function))
    return (u * np.concatenate(outs, axis=1)) @ p["output"]["kernel"]


KINDS = {"softmax": softmax_cross, "linear": linear_cross, "gau": gau_cross}


def _split_parameter(parameter: np.ndarray, width: int) -> np.ndarray:
    return parameter.reshape(-1, width)


def _project_heads(x_LxD: np.ndarray, memory_MxD: np.ndarray, p: dict, count: int) -> list[list[np.ndarray]]:
    """Returns queries, keys and values, each as a list over heads."""
    inputs = {"query": x_LxD, "key": memory_MxD, "value": memory_MxD}
    return [split_heads(x @ p[name]["kernel"], count) for name, x in inputs.items()]


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, sees: Callable, function: str) -> np.ndarray:
    factor = 1 / math.sqrt(q.shape[1])
    return attend(q, k, v, sees, function=function, factor=factor, divisor=lambda n: n, bias=lambda t, m: 0.0)
