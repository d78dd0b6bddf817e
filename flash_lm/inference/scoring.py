"""Scores a run's checkpoint on a split of its own corpus, or of another text."""

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
from flash_lm.data.corpus import SPLITS, WHOLE
from flash_lm.data.slices import ALL, SLICES, SlicedRows, together
from flash_lm.data.splits import Splits, load_splits
from flash_lm.data.token_cache import OwnCorpus, TokenizedCorpus
from flash_lm.data.tokenized_text import TokenizedText
from flash_lm.errors import InputError
from flash_lm.inference.model import OF_A_TEXT, TrainedModel, load_model
from flash_lm.runs.jsonl import read_lines
from flash_lm.runs.provenance import provenance
from flash_lm.runs.run_name import RunName, run_name
from flash_lm.training.carried_evaluation import CarriedEvaluator
from flash_lm.training.evaluation import Evaluator, perplexity
from flash_lm.training.setup import evaluation_rows

Score = Callable[[int, int], list[dict[str, Any]]]  # of a row's length, and the rows of a batch
_log = logging.getLogger(__name__)


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
    """Scores a checkpoint on a whole split.

    Args:
        run: the checkpoint's name, such as runs/x or runs/x@best.
        split: train, validation or test; or whole: all of a text, or all of a data set's data.split.
        lengths: row lengths; empty: the length of training.
        carry: whole documents, whose rows have the state of the rows before; the result also has scores by position.
        first: with `carry`, tokens at the beginning of each document that are scored, in whole rows; None: all.
        slices: keys of `SLICES`, which are scored in one pass and get a result each, all targets and each slice of
            them, with the key in `slices` and the name in `slice`.
        rare: with the slices recall, see `recall_slices`.
        blocks: without `carry`: number of blocks of consecutive batches whose nll and tokens are returned, too; fewer
            if there are fewer batches.
        mesh_shape: devices along (data, fsdp, tensor); it may differ from that of training.
        overrides: words such as --config.data.path=…, which select a text other than the run's own.

    Returns:
        One flat result per length (and slice): what was evaluated, how it was trained, its scores, and their
        provenance (seed, hash of the config; device, versions and commit of the scoring, and of the training as
        trained_…). The value of `checkpoint` is newest, best or step; `ema` is true if it is the average of the
        parameters; `own_corpus` says whether the text is the run's own corpus. Scores of a masked model cover only the
        masked tokens; only a causal model of text has a perplexity per word; a model of labels has an interval of its
        accuracy, `majority`, and `cut`: the share of texts that do not fit into a row.

    Raises:
        InputError: there is no such run, checkpoint or split, or a length exceeds the model's positions.
    """
    _check_asked(split, carry, first, slices, rare, blocks)
    name = run_name(run)
    trained = load_model(name, mesh_shape=mesh_shape, overrides=overrides)
    corpus, task = load_text(trained, split), trained.task
    lengths = list(lengths) or [trained.config.data.length]
    for length in lengths:
        trained.model.abstract.check_length(length)
    if "recall" in slices and not task.of_each_token:
        raise InputError("--slices=recall is of models that predict the next token")
    if "recall" in slices and corpus.fingerprint != trained.facts["corpus"]:
        raise InputError("--slices=recall counts pairs in the text of training: score a split of the run's own corpus")
    if carry:
        score = _in_whole_documents(trained, corpus, split, first)
    else:
        score = _in_rows(trained, corpus, split, slices, rare, blocks)
    results = []
    in_part = first or not task.of_each_token
    text = None if in_part or not isinstance(corpus, TokenizedCorpus) else corpus.splits[split]
    for length, scores in _at_lengths(trained, lengths, score):
        if text is not None and text.bytes and "slice" not in scores:
            scores |= _of_text(scores["nll"], text)
        results.append(_result(trained, name, corpus, split, length, scores))
    return results


def _result(
    trained: TrainedModel, name: RunName, corpus: Splits, split: str, length: int, scores: dict[str, Any]
) -> dict[str, Any]:
    """The scores, between what was scored and where it comes from."""
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
        **{key: facts[key] for key in ("reached",) if key in facts},
        "seed": config.seed,
        "config_hash": trained.folder.hash,
        **provenance(jax.devices()[0].device_kind),
        **_origin(trained),
    }


def _at_lengths(trained: TrainedModel, lengths: Sequence[int], score: Score) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each length, with each of its scores."""
    batch_tokens = trained.config.data.tokens_per_batch // trained.config.train.accumulate
    for length in lengths:
        with jax.set_mesh(trained.mesh):
            found = score(length, max(1, batch_tokens // length))
        yield from ((length, scores) for scores in found)


def _check_asked(
    split: str, carry: bool, first: int | None, slices: Sequence[str], rare: int | None, blocks: int
) -> None:
    """Checks that the arguments of `evaluate` go together, before a model is loaded."""
    if blocks and carry:
        raise InputError("blocks are of rows, and carry scores documents: leave one of them out")
    if first is not None and not carry:
        raise InputError("--first counts tokens of whole documents: add --carry")
    known, in_parts = slices and {*slices} <= {*SLICES}, [*slices] != [ALL]
    if not known or (in_parts and carry) or (rare is not None and "recall" not in slices):
        raise InputError(
            f"--slices is some of {', '.join(SLICES)}, without --carry, and --rare belongs to --slices=recall"
        )
    if split not in (*SPLITS, WHOLE):
        raise InputError(f"no split {split}: --split is one of {', '.join((*SPLITS, WHOLE))}")


def _evaluator(trained: TrainedModel, corpus: Splits) -> Evaluator:
    config, model = trained.config, trained.model.replace_packing(packed=trained.config.data.packed)
    return Evaluator(model, corpus.tokenizer, trained.mesh, config.train.loss_chunk, trained.task)


def _in_rows(
    trained: TrainedModel, corpus: Splits, split: str, kinds: Sequence[str], rare: int | None, blocks: int
) -> Score:
    evaluator, text = _evaluator(trained, corpus), corpus.splits[split]
    makers = {kind: SLICES[kind](corpus, split, rare) for kind in kinds}

    def score(length: int, batch_size: int) -> list[dict[str, Any]]:
        rows = evaluation_rows(trained.config, corpus, split, length)
        slices = {kind: of(rows) for kind, of in makers.items()}
        marks = [{"slices": kind, "slice": name} for kind, of in slices.items() for name in of.names]
        found = evaluator.evaluate_slices(
            trained.params, SlicedRows(rows, together(slices.values())), batch_size, blocks
        )
        for mark, scores in zip(marks, found, strict=True):
            if mark["slices"] == ALL:
                scores |= more_of_all(length, len(rows), scores["tokens"])
            elif scores["tokens"]:
                scores |= mark
            else:
                raise InputError(
                    f"the slice {mark['slice']} of the {split} split has no target: change --rare or --split"
                )
        return found

    def more_of_all(length: int, count: int, tokens: float) -> dict[str, float]:
        more: dict[str, float] = {}
        if hasattr(text, "best_nll"):
            made: Any = text
            more["best_loss"] = sum(made.best_nll(i, length) for i in range(count)) / tokens
        return more | trained.task.answers.about_rows(text, length)

    return score


def _in_whole_documents(trained: TrainedModel, corpus: Splits, split: str, first: int | None) -> Score:
    config = trained.config
    task = trained.task
    if not task.of_each_token:
        raise InputError("--carry scores whole documents with a model that predicts the next token: leave it out here")
    if not isinstance(corpus, TokenizedCorpus):
        if first:
            raise InputError("--first is of documents of text, and examples are scored as a whole: leave it out here")
        if getattr(corpus.splits[split], "size", None) is None:
            raise InputError(
                f"--carry scores documents, and the examples of {corpus.name} have no length of their own: set "
                f"--config.data.needle.length or data.bigrams.length, or leave --carry out"
            )
    settings = config.train.loss_chunk, task
    evaluator = CarriedEvaluator(trained.model, corpus.tokenizer, trained.mesh, *settings)
    text, marks = corpus.splits[split], {"carried": True} | ({"first": first} if first else {})
    of = lambda length, rows: evaluator(trained.params, text, length, rows, first=first, by_position=True)
    return lambda length, rows: [of(length, rows) | marks]


def load_text(trained: TrainedModel, split: str) -> Splits:
    """Loads a run's corpus, or the other text that its config now selects, tokenised with the run's tokenizer.

    Raises:
        InputError: it cannot be loaded, has no such split, or has a tokenizer of its own.
    """
    data = trained.config.data
    raw = flatten_dict(trained.folder.config.data.to_dict(), sep=".")
    known = trained.facts["corpus"]  # None for an imported model
    own_text = known is not None and all(data.get(key) == raw[key] for key in OF_A_TEXT)
    examples = CORPORA[data.corpus].examples
    whole = split == WHOLE and not examples
    own = OwnCorpus(trained.tokenizer, known if own_text else None)
    corpus = load_splits(data, own, unsplit=whole)
    if trained.task.labels and corpus.labels != trained.labels:
        raise InputError(
            f"corpus {corpus.name} has the labels {', '.join(corpus.labels) or '(none)'}, and {trained.name} was "
            f"trained on {', '.join(trained.labels)}"
        )
    if split not in corpus.splits:
        names = [*corpus.splits, *([] if examples else [WHOLE])]
        raise InputError(f"no split {split}: --split is one of {', '.join(names)}")
    if corpus.tokenizer.fingerprint != trained.tokenizer.fingerprint:
        raise InputError(f"corpus {corpus.name} has its own tokens, and {trained.name} was trained on others")
    if own_text and corpus.fingerprint != known:
        _log.warning(
            "corpus %s has changed since training, and its old tokens are gone: the scored text may contain training "
            "text, so the results are marked own_corpus=false",
            corpus.name,
        )
    return corpus


def _of_text(nll: float, store: TokenizedText) -> dict[str, float]:
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
    """The provenance of the training, and the run from which it began, if there is one: its name, not its place."""
    found = {f"trained_{key}": value for key, value in trained.facts.get("code", {}).items()}
    if not (parent := trained.facts.get("parent")):
        return found
    name = pathlib.Path(parent["run"]).name  # a line is read on other machines
    return found | {"parent_run": name, "parent_step": parent["step"], "parent_params": parent["params"]}


def _speed(metrics: pathlib.Path) -> dict[str, float]:
    """Medians of speed over a run's train lines."""
    train = [line for line in read_lines(metrics) if line["split"] == "train"]
    names = ("step_ms", "tokens_per_second")
    return {f"train_{name}": statistics.median(line[name] for line in train) for name in names} if train else {}
