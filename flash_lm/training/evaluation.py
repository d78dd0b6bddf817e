"""Perplexity of a split: sums weighted by tokens, so that no figure depends on the batch size."""

import math

import jax
import numpy as np

from flash_lm.data.loader import Rows, evaluation_batches
from flash_lm.training.experiment import Experiment
from flash_lm.training.sharding import batch_sharding, place
from flash_lm.training.state import Params
from flash_lm.training.step import make_evaluation_step


class Evaluator:
    """Evaluates parameters of an experiment; used by the command and during training alike."""

    def __init__(self, experiment: Experiment):
        """Compiles nothing before the first call."""
        self._experiment = experiment
        step = make_evaluation_step(experiment.model, experiment.config.train.loss_chunk)
        self._step = jax.jit(step)
        self._bytes_per_token = np.zeros(experiment.config.model.vocab_size, np.int32)
        known = experiment.corpus.tokenizer.bytes_per_token()
        self._bytes_per_token[: len(known)] = known

    def __call__(self, params: Params, rows: Rows, batch_size: int, limit: int = 0) -> dict[str, float]:
        """Scores each row once; call it inside `jax.set_mesh`.

        Args:
            params: of the model.
            rows: of a split.
            batch_size: B; rounded up to divide over the devices.
            limit: number of batches; 0 = all.

        Returns:
            loss (nats a token), perplexity (a token), bits_per_byte, and nll (nats), tokens and bytes, the sums over all
            targets.
        """
        mesh = self._experiment.mesh
        parts = mesh.shape["data"] * mesh.shape["fsdp"]
        batch_size = -(-batch_size // parts) * parts
        sums = {"nll": 0.0, "tokens": 0.0, "bytes": 0.0}
        batches = evaluation_batches(rows, batch_size, limit=limit, host=jax.process_index(), hosts=jax.process_count())
        for batch in batches:
            parts_ = jax.device_get(self._step(params, place(batch, batch_sharding(mesh)), self._bytes_per_token))
            # Python floats: a float32 sum over a long split would lose the last tokens.
            sums = {name: sums[name] + float(parts_[name]) for name in sums}
        loss = sums["nll"] / sums["tokens"]
        bits_per_byte = sums["nll"] / math.log(2) / sums["bytes"] if sums["bytes"] else math.nan
        return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits_per_byte, **sums}
