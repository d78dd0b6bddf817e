"""How far the output of each layer's token mixer is from the teacher's, at the teacher's own input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.pretrained.held_out import HeldOut
from flash_lm.inference.model import TrainedModel
from flash_lm.models.layer_pairs import mixer_of, walk_layers
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.runs.jsonl import Line
from flash_lm.training.train_state import Params


def measure_layers(model: TrainedModel, teacher: TrainedModel, text: HeldOut, rows: int, length: int) -> Line:
    """One line: ‖ŷ − y‖² / ‖y‖² by layer, over all tokens of the rows, and the share of the linear part, if it has one.

    The share is that of the far tokens in the weights of a token, on average over tokens and heads. Neither model may
    have `model.pattern`.
    """

    @jax.jit
    def sums(params: Params, teacher_params: Params, ids_BxL: jax.Array) -> dict[str, jax.Array]:
        """Squares of the difference and of the teacher's output, and the share, of each layer."""
        inputs, student = ModelInputs(ids_BxL, packed=False), model.model.bind(params)
        _, context = student.embed(inputs)
        graph, stacked = nnx.split(student.layers)

        def mix(apply: Any, h_BxLxD: jax.Array, parameters: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            y_BxLxD = apply(h_BxLxD)
            mixer: Any = mixer_of(nnx.merge(graph, parameters), student.config.family).sublayer
            by, v, _ = mixer.project(h_BxLxD, context)
            # With values of one, the part of a term is the sum of its weights.
            far = mixer.core.terms(by, jnp.ones_like(v), context).get("global", jnp.zeros(()))
            error = jnp.square(mixer(h_BxLxD, context) - y_BxLxD).sum()
            return y_BxLxD, {"error": error, "output": jnp.square(y_BxLxD).sum(), "share": far.mean()}

        return walk_layers(teacher.model.bind(teacher_params), inputs, mix, stacked)[1]

    with jax.set_mesh(model.mesh):
        ids = text.passages(teacher.tokenizer, rows, length)[:, :-1]
        by_row = [jax.device_get(sums(model.params, teacher.params, ids[i : i + 1])) for i in range(rows)]
    total = {name: np.sum([one[name] for one in by_row], axis=0) for name in by_row[0]}
    errors = total["error"] / total["output"]
    return {
        "text": text.text,
        "split": text.split,
        "length": length,
        "rows": rows,
        "mean_error": float(errors.mean()),
        "errors": errors.tolist(),
        "far_share": (total["share"] / rows).tolist(),
    }
