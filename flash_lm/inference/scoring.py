"""Scores a run's checkpoint on a split of its training corpus, or of another text."""

import logging
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from flash_lm.config.registry import CORPORA
from flash_lm.data.corpus import SPLITS, UNSPLIT
from flash_lm.data.slices import ALL, SLICES, SlicedRows, merge_slices
from flash_lm.data.splits import Splits, load_splits
from flash_lm.data.token_cache import KnownCorpus, TokenizedCorpus
from flash_lm.data.tokenized_text import TokenizedText
from flash_lm.errors import InputError
from flash_lm.inference.model import TEXT_KEYS, TrainedModel, load_model
from flash_lm.ops.implementations import recorded
from flash_lm.ops.on_mesh import row_shards
from flash_lm.runs.jsonl import read_lines
from flash_lm.runs.provenance import provenance
from flash_lm.runs.run_name import RunName, run_name
from flash_lm.training.carried_evaluation import CarriedEvaluator
from flash_lm.training.evaluation import Evaluator, perplexity
from flash_lm.training.setup import evaluation_rows
from flash_lm.training.train_state import ModelFunction

Score = Callable[[int, int], list[dict[str, Any]]]  # (sequence length, batch size) -> results
_log = logging.getLogger(__name__)
_MOST_TOKENS = 1 << 15  # of a batch on each device, if training left the number of microbatches open


def evaluate(
    run: str | os.PathLike[str] | RunName,
    split: str,
    lengths: Sequence[int] = (),
    *,
    carry: bool = False,
    first: int | None = None,
    slices: Sequence[str] = (ALL,),
    rare: int | None = None,
    blocks: int = 0,
    mesh_shape: tuple[int, ...] = (-1, 1, 1),
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Scores a checkpoint on all of a split.

    >>> (line,) = evaluate("runs/mine", "validation")
    >>> line["step"], line["split"], line["perplexity"] > 1
    (2, 'validation', True)

    Args:
        run: the checkpoint's name, such as runs/x or runs/x@best.
        split: train, validation or test; or whole: all of a text, or all of a data set's data.split.
        lengths: sequence lengths; empty: the training length.
        carry: score complete documents, with the state carried from one segment to the next; the result also has
            scores by position.
        first: with `carry`, the number of tokens of each document to score, in complete segments; None: all.
        slices: keys of `SLICES`, which are scored in one pass; each has a result for all targets and one for each of
            its slices, with the key in `slices` and the name in `slice`.
        rare: threshold of the slices recall, see `recall_slices`.
        blocks: without `carry`: number of blocks of consecutive batches whose nll and tokens are returned, too; at most
            one per batch.
        mesh_shape: devices along (data, fsdp, tensor); it may differ from that of training.
        overrides: words such as --config.data.path=…, which select another text.

    Returns:
        One flat result per length (and slice): the text, the training, the scores, and their provenance (seed, hash of
        the config; device, versions and commit of the scoring, and those of the training as trained_…). The value of
        `checkpoint` is newest, best or step; `ema` is true if it is the average of the parameters; `own_corpus` says
        whether the text is the training corpus. Scores of a masked model cover only the masked tokens; only a causal
        model of text has a perplexity per word; a model of labels has an interval of its accuracy, `majority`, and
        `cut`: the share of texts that are longer than a sequence.

    Raises:
        InputError: no such run, checkpoint or split, or a length exceeds the model's positions.
    """
    # The model and the text, and checks of what is asked for.
    _check_arguments(split, carry, first, slices, rare, blocks)
    name = run_name(run)
    trained = load_model(name, mesh_shape=mesh_shape, overrides=overrides)
    corpus, task = load_text(trained, split), trained.task
    lengths = list(lengths) or [trained.config.data.length]
    for length in lengths:
        trained.model.abstract.check_length(length)
    if "recall" in slices and not task.of_each_token:
        raise InputError("--slices=recall is of models that predict the next token")
    if "recall" in slices and corpus.fingerprint != trained.facts["corpus"]:
        raise InputError("--slices=recall counts pairs in the text of training: score a split of the run's corpus")

    # Score each length; only full splits of text have scores per byte and per word.
    if carry:
        score = _make_document_scorer(trained, corpus, split, first)
    else:
        score = _make_row_scorer(trained, corpus, split, slices, rare, blocks)
    results = []
    is_partial = first or not task.of_each_token
    text = None if is_partial or not isinstance(corpus, TokenizedCorpus) else corpus.splits[split]
    for length, scores in _score_lengths(trained, lengths, score):
        if text is not None and text.bytes and "slice" not in scores:
            scores |= _text_scores(scores["nll"], text)
        results.append(_result(trained, name, corpus, split, length, scores))
    return results


def _result(
    trained: TrainedModel, name: RunName, corpus: Splits, split: str, length: int, scores: dict[str, Any]
) -> dict[str, Any]:
    """A result line: text and training, scores, provenance."""
    # Flat and in a fixed order: lines are read by people, too.
    config, facts = trained.config, trained.facts
    return {
        "run": trained.name,
        "checkpoint": name.which if isinstance(name.which, str) else "step",
        **({"ema": True} if name.ema else {}),
        "task": config.task,
        "family": config.model.label,
        "parameters": trained.model.parameter_count(),
        "corpus": corpus.name,
        "corpus_hash": corpus.fingerprint[:12],
        "own_corpus": corpus.fingerprint == facts["corpus"],
        "pack": config.data.pack,
        "split": split,
        "length": length,
        "step": trained.step,
        "trained_length": config.data.length,
        "batch_tokens": config.data.tokens_per_batch,
        "train_seconds": facts["train_seconds"],
        **_speed(name.workdir / "metrics.jsonl"),
        **scores,
        **{key: facts[key] for key in ("reached", "vmapped_runs") if key in facts},
        "seed": config.seed,
        "config_hash": trained.folder.hash,
        **provenance(jax.devices()[0].device_kind),
        **_origin(trained),
    }


def _score_lengths(trained: TrainedModel, lengths: Sequence[int], score: Score) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each length with each of its results; a batch has the tokens of a microbatch of training.

    Results name the implementations that their length has got.
    """
    tokens, microbatches = trained.config.data.tokens_per_batch, trained.config.train.accumulate
    batch_tokens = tokens // microbatches if microbatches else min(tokens, _MOST_TOKENS * row_shards(trained.mesh))
    for length in lengths:
        with jax.set_mesh(trained.mesh), recorded() as implementations:
            results = score(length, max(1, batch_tokens // length))
        yield from ((length, scores | implementations.line()) for scores in results)


def _check_arguments(
    split: str, carry: bool, first: int | None, slices: Sequence[str], rare: int | None, blocks: int
) -> None:
    """Checks the arguments of `evaluate` before a model is loaded."""
    # Options of packed sequences and those of documents exclude each other.
    if blocks and carry:
        raise InputError("blocks are of sequences, and carry scores documents: leave one of them out")
    if first is not None and not carry:
        raise InputError("--first counts tokens of documents: add --carry")
    known, is_sliced = slices and {*slices} <= {*SLICES}, [*slices] != [ALL]
    if not known or (is_sliced and carry) or (rare is not None and "recall" not in slices):
        raise InputError(
            f"--slices is some of {', '.join(SLICES)}, without --carry, and --rare belongs to --slices=recall"
        )
    if split not in (*SPLITS, UNSPLIT):
        raise InputError(f"no split {split}: --split is one of {', '.join((*SPLITS, UNSPLIT))}")


def _evaluator(trained: TrainedModel, corpus: Splits) -> Evaluator:
    chunk = trained.config.train.loss_chunk
    return Evaluator(_model_of_rows(trained), corpus.tokenizer, trained.mesh, chunk, trained.task)


def _model_of_rows(trained: TrainedModel) -> ModelFunction:
    """The model, for what the rows of its corpus hold."""
    config = trained.config
    return trained.model.replace_packing(packed=config.data.packed, few_targets=config.few_targets)


def _make_row_scorer(
    trained: TrainedModel, corpus: Splits, split: str, kinds: Sequence[str], rare: int | None, blocks: int
) -> Score:
    """Makes the function that scores packed sequences of a length, with all slices in one pass."""
    evaluator, text = _evaluator(trained, corpus), corpus.splits[split]
    makers = {kind: SLICES[kind](corpus, split, rare) for kind in kinds}

    def score(length: int, batch_size: int) -> list[dict[str, Any]]:
        # Slices are masks over the targets of these sequences.
        rows = evaluation_rows(trained.config, corpus, split, length)
        slices = {kind: make_slices(rows) for kind, make_slices in makers.items()}
        marks = [{"slices": kind, "slice": name} for kind, make_slices in slices.items() for name in make_slices.names]
        results = evaluator.evaluate_slices(
            trained.params, SlicedRows(rows, merge_slices(slices.values())), batch_size, blocks
        )
        # Name each result by its slice; an empty one would have a perplexity of NaN.
        for mark, scores in zip(marks, results, strict=True):
            if mark["slices"] == ALL:
                scores |= extra_scores(length, len(rows), scores["tokens"])
            elif scores["tokens"]:
                scores |= mark
            else:
                raise InputError(
                    f"the slice {mark['slice']} of the {split} split has no target: change --rare or --split"
                )
        return results

    # The best possible loss of a synthetic corpus, and what the output type adds.
    def extra_scores(length: int, count: int, tokens: float) -> dict[str, float]:
        extra: dict[str, float] = {}
        if hasattr(text, "best_nll"):
            corpus_text: Any = text
            extra["best_loss"] = sum(corpus_text.best_nll(i, length) for i in range(count)) / tokens
        return extra | trained.task.answers.about_rows(text, length)

    return score


def _make_document_scorer(trained: TrainedModel, corpus: Splits, split: str, first: int | None) -> Score:
    """Makes the function that scores documents from their beginning to their end, with a carried state."""
    # Documents of text may have any length; examples need one known length.
    config = trained.config
    task = trained.task
    if not task.of_each_token:
        raise InputError("--carry scores documents with a model that predicts the next token: leave it out here")
    if not isinstance(corpus, TokenizedCorpus):
        if first:
            raise InputError("--first is of documents of text, and examples are scored completely: leave it out here")
        if getattr(corpus.splits[split], "size", None) is None:
            raise InputError(
                f"--carry scores documents, and the examples of {corpus.name} have no fixed length: set "
                f"--config.data.needle.length or data.bigrams.length, or leave --carry out"
            )

    # All scores are also returned by position.
    settings = config.train.loss_chunk, task
    evaluator = CarriedEvaluator(_model_of_rows(trained), corpus.tokenizer, trained.mesh, *settings)
    text, marks = corpus.splits[split], {"carried": True} | ({"first": first} if first else {})
    score_documents = lambda length, batch_size: evaluator(
        trained.params, text, length, batch_size, first=first, by_position=True
    )
    return lambda length, batch_size: [score_documents(length, batch_size) | marks]


def load_text(trained: TrainedModel, split: str) -> Splits:
    """Loads a run's corpus, or the text that the overrides select, tokenised with the run's tokenizer.

    Raises:
        InputError: it cannot be loaded, has no such split, or has another tokenizer.
    """
    # The fingerprint of the training corpus is expected only if all keys that select a text are unchanged.
    data = trained.config.data
    raw = flatten_dict(trained.folder.config.data.to_dict(), sep=".")
    known = trained.facts["corpus"]  # None for an imported model
    is_own_text = known is not None and all(data.get(key) == raw[key] for key in TEXT_KEYS)
    examples = CORPORA[data.corpus].examples
    unsplit = split == UNSPLIT and not examples
    known_corpus = KnownCorpus(trained.tokenizer, known if is_own_text else None)
    corpus = load_splits(data, known_corpus, unsplit=unsplit)

    # Labels, split and tokenizer must be those of the model.
    if trained.task.labels and corpus.labels != trained.labels:
        raise InputError(
            f"corpus {corpus.name} has the labels {', '.join(corpus.labels) or '(none)'}, and {trained.name} was "
            f"trained on {', '.join(trained.labels)}"
        )
    if split not in corpus.splits:
        names = [*corpus.splits, *([] if examples else [UNSPLIT])]
        raise InputError(f"no split {split}: --split is one of {', '.join(names)}")
    if corpus.tokenizer.fingerprint != trained.tokenizer.fingerprint:
        raise InputError(f"corpus {corpus.name} has other tokens, and {trained.name} was trained on others")
    if is_own_text and corpus.fingerprint != known:
        _log.warning(
            "corpus %s has changed since training, and its old tokens are gone: the scored text may contain training "
            "text, so the results are marked own_corpus=false",
            corpus.name,
        )
    return corpus


def _text_scores(nll: float, store: TokenizedText) -> dict[str, float]:
    """Scores of a split of text per byte and per word."""
    return {
        # A user's tokenizer may change the text, so the bytes are counted in the split itself.
        "bytes": float(store.bytes),
        "bits_per_byte": nll / math.log(2) / store.bytes,
        "word_perplexity": perplexity(nll, store.words),
        # As in WikiText's published figures, which count a word </s> at the end of each line.
        "word_perplexity_eos": perplexity(nll, store.words + store.lines),
    }


def _origin(trained: TrainedModel) -> dict[str, Any]:
    """The provenance of the training, and the name of the parent run, if it has one."""
    code = {f"trained_{key}": value for key, value in trained.facts.get("code", {}).items()}
    if not (parent := trained.facts.get("parent")):
        return code
    name = pathlib.Path(parent["run"]).name  # a line is read on other machines
    return code | {"parent_run": name, "parent_step": parent["step"], "parent_params": parent["params"]}


def _speed(metrics: pathlib.Path) -> dict[str, float]:
    """Medians of speed over a run's train lines."""
    train = [line for line in read_lines(metrics) if line["split"] == "train"]
    names = ("step_ms", "tokens_per_second")
    return {f"train_{name}": statistics.median(line[name] for line in train) for name in names} if train else {}
