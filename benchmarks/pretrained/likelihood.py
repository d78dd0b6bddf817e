"""The likelihood of held-out text under a model and its teacher, and how far their distributions are apart."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.pretrained.held_out import HeldOut
from flash_lm.inference.model import TrainedModel
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.runs.jsonl import Line
from flash_lm.training.train_state import ModelFunction, Params

EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192)  # of ranges of position
_SLICE = 128  # positions whose logits exist at the same time
_MOST_TOKENS = 2048  # of a batch


def measure_likelihood(model: TrainedModel, teacher: TrainedModel, text: HeldOut, rows: int, length: int) -> Line:
    """One line: both perplexities, the divergence and the agreement, in all and by position.

    `loss_gap` is the model's loss less the teacher's, nats a token, with its standard error over the rows.
    """
    ids_NxL = text.passages(model.tokenizer, rows, length)
    by_target = Comparison(model, teacher)(ids_NxL)
    gap_N = (by_target["loss"] - by_target["teacher_loss"]).mean(axis=1)
    return {
        "text": text.text,
        "split": text.split,
        "length": length,
        "rows": rows,
        **_scores({key: x.ravel() for key, x in by_target.items()}),
        "loss_gap": float(gap_N.mean()),
        "loss_gap_error": float(gap_N.std(ddof=1) / np.sqrt(rows)) if rows > 1 else None,
        "by_position": by_position(by_target),
    }


class Comparison:
    """A model beside its teacher, on the same rows."""

    def __init__(self, model: TrainedModel, teacher: TrainedModel):
        """Compiles nothing before the first call."""
        self._models = (model,) if teacher is model else (model, teacher)
        self._features = [jax.jit(functools.partial(_features, one.model)) for one in self._models]
        heads = [one.model for one in self._models]
        self._compare = jax.jit(functools.partial(_compare, heads[0], heads[-1]))

    def __call__(self, ids_NxL: np.ndarray) -> dict[str, np.ndarray]:
        """Scores of each token but the first, given those before it.

        Args:
            ids_NxL: begin-of-text and tokens, L + 1 a row.

        Returns:
            loss and teacher_loss, nats; kl, of the teacher's distribution from the model's, nats; agreement, whether
            both have the same likeliest token. N×L each.
        """
        with jax.set_mesh(self._models[0].mesh):
            return self._scores(ids_NxL)

    def _scores(self, ids_NxL: np.ndarray) -> dict[str, np.ndarray]:
        length, batch = ids_NxL.shape[1] - 1, max(1, _MOST_TOKENS // ids_NxL.shape[1])
        params, parts = [one.params for one in self._models], []
        for start in range(0, len(ids_NxL), batch):
            ids_BxL = ids_NxL[start : start + batch]
            features = [run(p, ids_BxL[:, :-1]) for run, p in zip(self._features, params, strict=True)]
            # The logits of a slice of positions at a time: those of a whole batch would be gigabytes.
            slices = [
                self._compare(params[0], params[-1], features[0][:, at], features[-1][:, at], ids_BxL[:, 1:][:, at])
                for at in (slice(i, i + _SLICE) for i in range(0, length, _SLICE))
            ]
            parts.append(jax.tree.map(lambda *x: np.concatenate(x, axis=1), *jax.device_get(slices)))
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _features(model: ModelFunction, params: Params, ids_BxL: jax.Array) -> jax.Array:
    return model.bind(params).features(ModelInputs(ids_BxL, packed=False))


def _compare(
    model: ModelFunction,
    teacher: ModelFunction,
    params: Params,
    teacher_params: Params,
    ours_BxSxD: jax.Array,
    theirs_BxSxD: jax.Array,
    targets_BxS: jax.Array,
) -> dict[str, jax.Array]:
    """The scores of a slice of positions."""
    ours_BxSxV = jax.nn.log_softmax(model.bind(params).logits(ours_BxSxD))
    theirs_BxSxV = jax.nn.log_softmax(teacher.bind(teacher_params).logits(theirs_BxSxD))
    of_targets = lambda x_BxSxV: -jnp.take_along_axis(x_BxSxV, targets_BxS[..., None], axis=-1)[..., 0]
    return {
        "loss": of_targets(ours_BxSxV),
        "teacher_loss": of_targets(theirs_BxSxV),
        "kl": (jnp.exp(theirs_BxSxV) * (theirs_BxSxV - ours_BxSxV)).sum(axis=-1),
        "agreement": (ours_BxSxV.argmax(axis=-1) == theirs_BxSxV.argmax(axis=-1)).astype(jnp.float32),
    }


def by_position(by_target: dict[str, np.ndarray], edges: Sequence[int] = EDGES) -> list[dict[str, Any]]:
    """The scores of ranges of position, N×L each; the last range ends with the rows."""
    length, ranges = len(by_target["loss"][0]), []
    for start, end in itertools.pairwise(edges):
        if start < length:
            part = {key: x_NxL[:, start:end].ravel() for key, x_NxL in by_target.items()}
            ranges.append({"from": start, "to": min(end, length), **_scores(part)})
    return ranges


def _scores(by_target: dict[str, np.ndarray]) -> dict[str, Any]:
    """The means over targets, in float64; perplexities in place of losses."""
    means = {key: float(x.mean(dtype=np.float64)) for key, x in by_target.items()}
    return {
        "tokens": len(by_target["loss"]),
        "perplexity": float(np.exp(means["loss"])),
        "teacher_perplexity": float(np.exp(means["teacher_loss"])),
        "kl": means["kl"],
        "agreement": means["agreement"],
    }
