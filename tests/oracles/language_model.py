"""Language model: embed → [norm → sublayer → +] × pattern × num_layers → norm → logits."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from oracles.attention import Row
from oracles.families import sublayers
from oracles.norms import normalise
from oracles.positions import absolute_position
from oracles.segments import offsets, visibility


def language_model(
    params: dict,
    settings: SimpleNamespace,
    inputs: np.ndarray,
    segment_ids: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    visit: Callable | None = None,
    prefix: np.ndarray | None = None,
) -> np.ndarray:
    """Logits, B×L×V.

    Args:
        params: nested dict of float64 arrays in the model's names, layers stacked along the first dimension.
        settings: from `oracles.families.complete`.
        inputs: B×L token ids.
        segment_ids: B×L; None: one document per sequence.
        positions: B×L; None: each token's position in its document.
        visit: called with the arguments of each layer's first sublayer, for each sequence.
        prefix: B×L, how many first tokens of its document are visible to all of the document; None: none.

    Returns:
        Logits; those of padding have no meaning.
    """
    if segment_ids is None:
        segment_ids = np.ones_like(inputs)
    table = params["embedding" if settings.tie_embeddings else "output_embedding"]
    rows = []
    for b in range(len(inputs)):
        ids = segment_ids[b].tolist()
        positions_L = offsets(ids) if positions is None else positions[b].tolist()
        sees = visibility(ids, settings.causal, None if prefix is None else prefix[b].tolist())
        features = final_features(params, settings, inputs[b], Row(sees, positions_L), visit)
        rows.append(features @ table.T)
    return np.stack(rows)


def cross_entropy(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """Σ weight · −log softmax(logits)[target]."""
    loss = 0.0
    for index in np.ndindex(targets.shape):
        shifted = logits[index] - logits[index].max()
        loss += weights[index] * (np.log(np.exp(shifted).sum()) - shifted[targets[index]])
    return loss


def final_features(
    params: dict,
    s: SimpleNamespace,
    inputs_L: np.ndarray,
    row: Row,
    visit: Callable | None = None,
    cross: Callable | None = None,
) -> np.ndarray:
    """Features after the last norm, L×D; `cross`, if not None, is inserted after the first sublayer of each layer."""
    x = np.stack(
        [
            params["embedding"][token]
            + absolute_position(s.absolute_positions, position, s.model_dim, params.get("positions"))
            for token, position in zip(inputs_L, row.positions, strict=True)
        ]
    )
    for period in range(s.num_layers // len(s.layers)):
        layer_params, i = select(params["layers"], period), 0
        for index, layer in enumerate(s.layers):
            layer.number = period * len(s.layers) + index
            first, *rest = sublayers(layer)
            for number, sublayer in enumerate([first, *([cross] if cross else []), *rest]):
                replaces_residual, name = sublayer is not cross and sublayer.owns_residual, f"sublayer_{i}"
                if sublayer is cross:
                    name = f"cross_{index}"
                else:
                    i += 1
                before = x if replaces_residual else normalise(s.norm, x, layer_params[f"norm_{name}"], s.norm_epsilon)
                arguments = before, {"core": {}} | layer_params[name], row, layer
                if visit and number == 0:
                    visit(*arguments)
                x = sublayer(*arguments) + (0 if replaces_residual else x)
    return normalise(s.norm, x, params["norm"], s.norm_epsilon)


def select(stacked: dict, n: int) -> dict:
    """Selects the parameters of layer n, or of the n-th repetition of a pattern."""
    return {name: select(value, n) if isinstance(value, dict) else value[n] for name, value in stacked.items()}
