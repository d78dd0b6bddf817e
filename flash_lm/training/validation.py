"""Scores of the validation split during training."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from flash_lm.config.registry import TASKS
from flash_lm.data.batches import chosen_rows
from flash_lm.data.packing import Rows
from flash_lm.data.slices import SomeRows
from flash_lm.training.carried_evaluation import CarriedEvaluator
from flash_lm.training.evaluation import Evaluator, compute_scores
from flash_lm.training.setup import Experiment
from flash_lm.training.train_state import Params


def make_validation(experiment: Experiment, rows: Rows) -> Callable[[Params], dict[str, Any]]:
    """Makes a function of parameters that returns their scores on the validation split.

    It scores packed sequences, or complete documents if training carries a state. The text depends on
    `data.tokens_per_batch` and `train.eval_steps`, not on microbatches or the mesh. "split_share" is the share of the
    split that is scored, in sequences or in tokens of documents.

    Args:
        experiment: the run.
        rows: packed sequences of the validation split.
    """
    # The settings of both evaluators; a batch of training is scored in as many parts as it is trained in.
    config, corpus = experiment.config, experiment.corpus
    settings = config.train.loss_chunk, TASKS[config.task]
    batch_size, parts, limit = config.data.batch_size, config.train.microbatches, config.train.eval_steps

    # Documents, with a carried state.
    if config.train.carry_state:
        document_evaluator = CarriedEvaluator(experiment.model, corpus.tokenizer, experiment.mesh, *settings, parts)
        text: Any = corpus.splits["validation"]
        targets = len(text.tokens) - (len(text.starts) - 1)  # all tokens but those that begin a document

        def score_documents(params: Params) -> dict[str, Any]:
            scores = document_evaluator(params, text, config.data.length, batch_size, limit)
            return scores | {"carried": True, "split_share": scores["tokens"] / targets}

        return score_documents

    # Packed sequences of one corpus.
    evaluator = Evaluator(experiment.model, corpus.tokenizer, experiment.mesh, *settings)
    arguments = batch_size // parts, limit, 0, parts

    def scored_share(row_sets: Sequence[Rows]) -> dict[str, float]:
        chosen = (sum(map(len, chosen_rows(len(part), batch_size, limit))) for part in row_sets)
        return {"split_share": sum(chosen) / sum(map(len, row_sets))}

    if not corpus.parts:
        share = scored_share([rows])
        return lambda params: evaluator(params, rows, *arguments) | share

    # A mixture: each source is scored alone, for its loss, and the sums are added.
    mixed: Any = rows
    sources = {name: SomeRows(mixed, part) for name, part in zip(corpus.parts, mixed.ranges, strict=True)}
    share = scored_share([*sources.values()])

    def score_sources(params: Params) -> dict[str, float]:
        sums = {name: evaluator.sums(params, source, *arguments) for name, source in sources.items()}
        losses = {f"loss/{name}": compute_scores(source_sums)["loss"] for name, source_sums in sums.items()}
        return compute_scores(sum(sums.values(), collections.Counter())) | losses | share

    return score_sources
