"""Perplexity of a split: sums weighted by tokens, so that no figure depends on the batch size."""

import collections
import math
import pathlib
import statistics
from typing import Any

import jax
import numpy as np

from flash_lm.data.loader import evaluation_batches
from flash_lm.data.packing import Rows
from flash_lm.data.token_cache import TokenizedCorpus
from flash_lm.errors import InputError
from flash_lm.provenance import config_hash, provenance
from flash_lm.training import workdir as run_folder
from flash_lm.training.checkpoint import open_checkpoints
from flash_lm.training.experiment import Experiment, build_experiment
from flash_lm.training.metrics import read_lines
from flash_lm.training.sharding import batch_sharding, place, rows_that_divide
from flash_lm.training.state import Params
from flash_lm.training.step import make_evaluation_step

_LARGEST_EXPONENT = 709  # exp overflows above it


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
            loss (nats a token), perplexity (a token), accuracy (share of the targets that are the likeliest token; none
            of images), bits_per_byte; and nll (nats), tokens and bytes, the sums over all targets.
        """
        mesh = self._experiment.mesh
        batch_size = rows_that_divide(batch_size, mesh)
        sums = collections.Counter()
        batches = evaluation_batches(rows, batch_size, limit=limit, host=jax.process_index(), hosts=jax.process_count())
        for batch in batches:
            here = jax.device_get(self._step(params, place(batch, batch_sharding(mesh)), self._bytes_per_token))
            # Python floats: a float32 sum over a long split would lose the last tokens.
            sums.update({name: float(x) for name, x in here.items()})
        of = lambda what, each: sums[what] / sums[each] if sums[each] else math.nan
        return {
            "loss": of("nll", "tokens"),
            "perplexity": perplexity(sums["nll"], sums["tokens"]),
            **({"accuracy": of("hits", "tokens")} if "hits" in sums else {}),
            "bits_per_byte": of("nll", "bytes") / math.log(2),
            **{name: sums[name] for name in ("nll", "tokens", "bytes")},
        }


def evaluate(workdir: pathlib.Path, split: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Scores the newest checkpoint of a run on a whole split.

    Args:
        workdir: of the run.
        split: train, validation or test.
        lengths: of the rows; empty: the length that the run trained with.

    Returns:
        One flat result a length: what was evaluated, how it was trained, its scores, and where they come from (seed,
        hash of the config; device, versions and commit of the scoring, and as trained_… of the checkpoint). Scores of
        a masked model are of the masked tokens alone; only a causal one of text has a perplexity a word.

    Raises:
        InputError: no run, no such split, or a length that the model's positions do not reach.
    """
    config = run_folder.read_config(workdir)
    origin = {"seed": config["seed"], "config_hash": config_hash(run_folder.without_places(config))}
    origin |= provenance(jax.devices()[0].device_kind)
    # The devices that are here now, whatever it was trained on.
    config.update_from_flattened_dict({"mesh.shape": (-1, 1, 1)})
    experiment = build_experiment(config)
    run_folder.check_tokenizer(workdir, experiment.corpus.tokenizer)
    if split not in experiment.corpus.splits:
        raise InputError(f"no split {split}: --split is one of {', '.join(experiment.corpus.splits)}")
    data, accumulate = experiment.config.data, experiment.config.train.accumulate
    lengths = lengths or [data.length]
    for length in lengths:
        experiment.model.abstract.check_length(length)
    with open_checkpoints(workdir) as checkpoints:
        state, facts = checkpoints.restore_newest(experiment.abstract)
    run_folder.check_corpus(facts["corpus"], experiment.corpus)
    origin |= {f"trained_{name}": value for name, value in facts.get("code", {}).items()}
    results, evaluator = [], Evaluator(experiment)
    for length in lengths:
        rows = experiment.evaluation_rows(split, length)
        with jax.set_mesh(experiment.mesh):
            scores = evaluator(state.params, rows, max(1, data.tokens_per_batch // accumulate // length))
        if experiment.config.task == "causal_lm" and isinstance(experiment.corpus, TokenizedCorpus):
            store = experiment.corpus.splits[split]
            # A tokenizer that was given may change the text, so the bytes are those of the split itself.
            scores["bytes"] = float(store.bytes)
            scores["bits_per_byte"] = scores["nll"] / math.log(2) / store.bytes
            scores["word_perplexity"] = perplexity(scores["nll"], store.words)
            # As WikiText's published figures have it, whose lines each end with a word </s>.
            scores["word_perplexity_eos"] = perplexity(scores["nll"], store.words + store.lines)
        results.append(
            {
                "run": workdir.name,
                "task": experiment.config.task,
                "family": experiment.config.model.family,
                "parameters": experiment.model.parameter_count(),
                "corpus": experiment.corpus.name,
                "pack": data.pack,
                "split": split,
                "length": length,
                "step": int(state.step),
                "trained_length": data.length,
                "batch_tokens": data.tokens_per_batch,
                "train_seconds": facts["train_seconds"],
                **_speed(workdir / "metrics.jsonl"),
                **scores,
                **origin,
            }
        )
    return results


def perplexity(nll: float, count: float) -> float:
    """exp(nll / count); infinite where that overflows, NaN without anything to count."""
    if not count:
        return math.nan
    return math.exp(nll / count) if nll / count < _LARGEST_EXPONENT else math.inf


def _speed(metrics: pathlib.Path) -> dict[str, float]:
    """Medians over the train lines of a run."""
    train = [line for line in read_lines(metrics) if line["split"] == "train"]
    names = ("step_ms", "tokens_per_second")
    return {f"train_{name}": statistics.median(line[name] for line in train) for name in names} if train else {}
