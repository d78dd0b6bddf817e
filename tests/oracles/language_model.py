"""The whole model: embed → [norm → sublayer → +] × pattern × num_layers → norm → logits."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from oracles.attention import Row
from oracles.families import FAMILIES
from oracles.norms import normalise
from oracles.positions import absolute
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
    """B×L×V logits.

    Args:
        params: nested dict of float64 arrays in the model's names, layers stacked along the first dimension.
        settings: from `oracles.families.complete`.
        inputs: B×L token ids.
        segment_ids: B×L; None: one document a row.
        positions: B×L; None: each token's place in its document.
        visit: called with the arguments of each layer's first sublayer, row by row.
        prefix: B×L, number of first tokens of a token's document that all of it sees; None: none.

    Returns:
        Logits; those of padding have no meaning.
    """
    if segment_ids is None:
        segment_ids = np.ones_like(inputs)
    table = params["embedding" if settings.tie_embeddings else "output_embedding"]
    rows = []
    for b in range(len(inputs)):
        ids = segment_ids[b].tolist()
        places = offsets(ids) if positions is None else positions[b].tolist()
        sees = visibility(ids, settings.causal, None if prefix is None else prefix[b].tolist())
        features = features_of(params, settings, inputs[b], Row(sees, places), visit)
        rows.append(features @ table.T)
    return np.stack(rows)


def cross_entropy(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """Σ weight · −log softmax(logits)[target]."""
    loss = 0.0
    for place in np.ndindex(targets.shape):
        shifted = logits[place] - logits[place].max()
        loss += weights[place] * (np.log(np.exp(shifted).sum()) - shifted[targets[place]])
    return loss


def features_of(
    params: dict,
    s: SimpleNamespace,
    inputs_L: np.ndarray,
    row: Row,
    visit: Callable | None = None,
    cross: Callable | None = None,
) -> np.ndarray:
    """L×D after the last norm; `cross`, if given, is one more sublayer after the first of each layer."""
    x = np.stack(
        [
            params["embedding"][token] + absolute(s.absolute_positions, position, s.model_dim, params.get("positions"))
            for token, position in zip(inputs_L, row.positions, strict=True)
        ]
    )
    for period in range(s.num_layers // len(s.layers)):
        here, i = select(params["layers"], period), 0
        for place, of_layer in enumerate(s.layers):
            of_layer.number = period * len(s.layers) + place
            first, *rest = FAMILIES[of_layer.family].sublayers
            for number, sublayer in enumerate([first, *([cross] if cross else []), *rest]):
                own, name = sublayer is not cross and sublayer.owns_residual, f"sublayer_{i}"
                if sublayer is cross:
                    name = f"cross_{place}"
                else:
                    i += 1
                before = x if own else normalise(s.norm, x, here[f"norm_{name}"], s.norm_epsilon)
                arguments = before, {"core": {}} | here[name], row, of_layer
                if visit and number == 0:
                    visit(*arguments)
                x = sublayer(*arguments) + (0 if own else x)
    return normalise(s.norm, x, params["norm"], s.norm_epsilon)


def select(stacked: dict, n: int) -> dict:
    """The parameters of layer n, or of the n-th repetition of a pattern."""
    return {name: select(value, n) if isinstance(value, dict) else value[n] for name, value in stacked.items()}
