"""A look inside: what each token takes of each other's values, in every layer of a model."""

import dataclasses

import jax

from flash_lm.layers.attention import AttentionSublayer
from flash_lm.models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class AttentionMap:
    """Of one part of a sublayer.

    Attributes:
        layer: from 0.
        sublayer: of the layer, from 0.
        part: "attention"; or "local" and "global" of mixed chunks; and "exp(w)", AFT's position bias.
        weights_BxHxLxL: float32, of each query, the row, on each key; what is not seen is zero. A value is multiplied
            by them: they sum to one after a softmax, and need not elsewhere. Of AFT, the mean of a head's channels.
    """

    layer: int
    sublayer: int
    part: str
    weights_BxHxLxL: jax.Array


def attention_weights(
    model: LanguageModel, inputs_BxL: jax.Array, segment_ids: jax.Array | None = None
) -> list[AttentionMap]:
    """The maps of all layers, from the first to the last.

    Their memory grows with the square of the length, and their time with that and the length once more.

    Args:
        model: of any family.
        inputs_BxL: token ids, few.
        segment_ids: B×L; None: one document a row.

    Raises:
        InputError: rows longer than the positions allow.
    """
    x_BxLxD, context = model.embed(inputs_BxL, segment_ids)
    found = []
    for n, period in enumerate(model.periods_apart()):
        for i, residual in enumerate(period.residuals()):
            before_BxLxD, sublayer = residual.before(x_BxLxD), residual.sublayer
            if isinstance(sublayer, AttentionSublayer):
                layer, number = period.place(i)
                layer += n * len(period.ends)
                found += [AttentionMap(layer, number, *one) for one in sublayer.weights(before_BxLxD, context).items()]
            x_BxLxD = residual.after(x_BxLxD, sublayer(before_BxLxD, context))
    return found
