"""Scores of the validation split while a run trains."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from flash_lm.config.registry import TASKS
from flash_lm.data.batches import chosen_rows
from flash_lm.data.packing import Rows
from flash_lm.data.slices import SomeRows
from flash_lm.training.carried_evaluation import CarriedEvaluator
from flash_lm.training.evaluation import Evaluator, scores_of
from flash_lm.training.setup import Experiment
from flash_lm.training.train_state import Params


def make_validation(experiment: Experiment, rows: Rows) -> Callable[[Params], dict[str, Any]]:
    """A function of parameters: their scores on the validation split.

    It reads rows, or whole documents if training carries a state. The text depends on `data.tokens_per_batch` and
    `train.eval_steps`, not on how a batch is cut into microbatches or over the mesh. "split_share" is the part of the
    split that is scored, of its rows or of its documents' tokens.

    Args:
        experiment: the run.
        rows: rows of the validation split.
    """
    config, corpus = experiment.config, experiment.corpus
    settings = config.train.loss_chunk, TASKS[config.task]
    batch_size, parts, limit = config.data.batch_size, config.train.accumulate, config.train.eval_steps
    if config.train.carry_state:
        in_documents = CarriedEvaluator(experiment.model, corpus.tokenizer, experiment.mesh, *settings, parts)
        text: Any = corpus.splits["validation"]
        targets = len(text.tokens) - (len(text.starts) - 1)  # all tokens but those that begin a document

        def of_documents(params: Params) -> dict[str, Any]:
            scores = in_documents(params, text, config.data.length, batch_size, limit)
            return scores | {"carried": True, "split_share": scores["tokens"] / targets}

        return of_documents

    by_rows = Evaluator(experiment.model, corpus.tokenizer, experiment.mesh, *settings)
    of_a_part = batch_size // parts, limit, 0, parts

    def share_of(several: Sequence[Rows]) -> dict[str, float]:
        chosen = (sum(map(len, chosen_rows(len(some), batch_size, limit))) for some in several)
        return {"split_share": sum(chosen) / sum(map(len, several))}

    if not corpus.parts:
        share = share_of([rows])
        return lambda params: by_rows(params, rows, *of_a_part) | share
    mixed: Any = rows
    sources = {name: SomeRows(mixed, part) for name, part in zip(corpus.parts, mixed.ranges, strict=True)}
    share = share_of([*sources.values()])

    def of_sources(params: Params) -> dict[str, float]:
        sums = {name: by_rows.sums(params, source, *of_a_part) for name, source in sources.items()}
        losses = {f"loss/{name}": scores_of(found)["loss"] for name, found in sums.items()}
        return scores_of(sum(sums.values(), collections.Counter())) | losses | share

    return of_sources
