"""Resolves a config: fills in every open key.

An open key takes its value from the run that is resumed, from the parent of a branch or the model of train.init_from,
from other keys (`config.experiment.fill_open_keys`), from the corpus, or from the family, in this order.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict

from flash_lm.config.experiment import Config, add_sections, fill_open_keys, parse, sections_of_other_tasks, unread_keys
from flash_lm.config.keys import type_problems
from flash_lm.config.model import ModelConfig
from flash_lm.config.plugins import import_plugins, plugin_names
from flash_lm.config.registry import CORPORA, HEADS, TASKS
from flash_lm.data.expected import Expected
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.errors import InputError
from flash_lm.families.family import complete, unused_keys
from flash_lm.models.classifier import ClassOptions
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training.hub import download
from flash_lm.training.schedule import same_until

# Keys that may change when a run is resumed: they change nothing of the model, or only its rounding.
_CHANGEABLE = (
    "mesh.",
    "model.remat",
    "model.scan_layers",
    "model.kernels",
    "model.state_dtype",
    "model.quadratic.",
    "model.ssd.chunk_size",
    "data.path",  # the content is checked
    "data.cache_dir",
    "train.loss_chunk",
    "train.on_nonfinite",
    "train.best_metric",
    "train.log_every",
    "train.log_to",
    "train.project",
    "train.sample_",
    "train.eval_",
    "train.stop_accuracy",
    "train.checkpoint_every",
    "train.keep",
)
# Keys that a branch may change besides: its schedule.
_BRANCH_KEYS = (
    "train.branch_from",
    "train.steps",
    "train.tokens",
    "train.learning_rate",
    "train.end_learning_rate",
    "train.warmup_steps",
    "train.schedule",
    "train.decay_steps",
    "train.boundaries",
)
# Keys that a run's number of steps changes.
_STEP_KEYS = {"train.steps", "train.tokens", "train.warmup_steps"}
# Keys that a branch does not use, since its state comes from its parent.
_INIT_KEYS = ("train.init_from", "train.init_positions")
_TASK_KEYS = ("max_length", "causal", "head")  # keys of config.model that train.init_from does not fill in
Changes = dict[str, tuple[Any, Any]]  # by key: the value of the run, the value asked for


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The config of a run.

    Attributes:
        record: the config for config.json: the user's, with open keys from the run that is resumed or from the parent.
        config: the same, checked, with the keys that follow from others. Keys of the model that the corpus or the
            family defines are still open, see `fill_from_corpus`.
        changes: the keys that a resume changes.
    """

    record: Any
    config: Config
    changes: Changes


def normalize(asked: Any) -> Any:
    """Returns a copy of a user's config with every key and checked types, so that it can be compared.

    Raises:
        InputError: values have other types, or plugins cannot be imported.
    """
    config = asked.copy_and_resolve_references()
    import_plugins(plugin_names(config.to_dict()))
    add_sections(config)
    if any(type_problems(config.to_dict(), Config)):
        parse(config)  # raises, with every problem
    return config


def resolve(
    asked: Any, run: RunFolder | None, parent: RunFolder | None, init_from: str | None, done: int = 0
) -> Resolved:
    """Fills in the open keys that do not depend on the corpus.

    Args:
        asked: a config from `normalize`, with the keys open that the user left open.
        run: the run that is resumed; None: a new run.
        parent: the run that a new branch starts from.
        init_from: the model that a new run starts from.
        done: number of steps that the run has done.

    Raises:
        InputError: the config is wrong, with one problem per line; or the run or the parent has another config.
    """
    record, changes = asked.copy_and_resolve_references(), {}
    if init_from:
        parse(asked)  # raises before a model is downloaded
        record = fill_from_parent(record, init_from)
    if run:
        record, changes = continue_run(record, run, done)
    if parent:
        record = _branch_config(record, parent)
    config = parse(record)
    # An open batch size depends on the devices, and the run keeps it when it continues on others.
    record.data.tokens_per_batch = config.data.tokens_per_batch
    return Resolved(record, config, changes)


def fill_from_corpus(config: Config, tokenizer: Tokenizer | Expected, labels: Sequence[str]) -> Config:
    """Fills in the keys of the model that the corpus and the families define.

    Args:
        config: a checked config.
        tokenizer: tokenizer of the corpus, or what is known of it before the corpus is read.
        labels: names of the corpus's labels; empty: it has none.

    Raises:
        InputError: a set number is too small for the corpus, or widths do not fit together.
    """
    return dataclasses.replace(config, model=_resolve_classes(config, _resolve_vocabulary(config, tokenizer), labels))


def _resolve_vocabulary(config: Config, tokenizer: Tokenizer | Expected) -> ModelConfig:
    """The config of the model with its vocabulary size and its families' defaults."""
    return complete(dataclasses.replace(config.model, vocab_size=choose_vocab_size(config, tokenizer)))


def choose_vocab_size(config: Config, tokenizer: Tokenizer | Expected) -> int:
    """The vocabulary size that is set, or else the one that the tokenizer needs.

    Raises:
        InputError: the set size is too small.
    """
    needed = TASKS[config.task].vocabulary(tokenizer)
    vocab_size = config.model.vocab_size or needed
    if vocab_size < needed:
        raise InputError(f"model.vocab_size={vocab_size} is smaller than the tokenizer's {needed}: leave it open")
    values = CORPORA[config.data.corpus].ends_in_values and vocab_size == needed
    if HEADS[config.model.head].of_values and not values:
        raise InputError(
            f"model.head={config.model.head} is for images, whose values are the last words, but got data.corpus="
            f"{config.data.corpus} and model.vocab_size={vocab_size}: use data.corpus=images with vocab_size open"
        )
    return vocab_size


def _resolve_classes(config: Config, model: ModelConfig, labels: Sequence[str]) -> ModelConfig:
    """The config of the model with its number of labels: the one that is set, or else the corpus's.

    Raises:
        InputError: the corpus has no labels, or the set number is too small.
    """
    if not TASKS[config.task].labels:
        return model
    if not labels:
        raise InputError(f"task={config.task} needs labels, and the corpus {config.data.corpus} at its place has none")
    count = model[ClassOptions].count or len(labels)
    if count < len(labels):
        raise InputError(f"the corpus has {len(labels)} labels, but got model.classes.count={count}: leave it open")
    return model.put("classes.count", count)


def fill_from_parent(config: Any, name: str) -> Any:
    """Fills in the open keys of a config's model from the model of train.init_from.

    A family's defaults depend on the objective, and the parameters were trained with these values.

    Raises:
        InputError: no such model.
    """
    folder = download(name).workdir
    parent, tokenizer = parse(RunFolder(folder).config), load_tokenizer(folder / "tokenizer")
    model = _resolve_vocabulary(parent, tokenizer)
    if (config.model.get("family"), tuple(config.model.get("pattern", ()))) != (model.family, model.pattern):
        return config
    config = config.copy_and_resolve_references()
    # The values for the open keys, without those that belong to the task: this run may have another one.
    left_open = [key for key, value in flatten_dict(config.model.to_dict(), sep=".").items() if value is None]
    known = {key: model.get(key) for key in left_open if key not in _TASK_KEYS}
    others = sections_of_other_tasks(TASKS[config.task])
    known = {key: x for key, x in known.items() if f"model.{key.partition('.')[0]}" not in others}
    if "vocab_size" in known and TASKS[config.task].vocabulary(tokenizer) > model.vocab_size:
        del known["vocab_size"]  # too small for this task
    config.model.update_from_flattened_dict({key: value for key, value in known.items() if value is not None})
    return config


def continue_run(asked: Any, run: RunFolder, done: int | None = None) -> tuple[Any, Changes]:
    """The config to continue a run with, and the keys that it changes.

    Args:
        asked: a config from `normalize`.
        run: the run.
        done: number of steps that the run has done; None: unknown, and its number of steps may not change.

    Raises:
        InputError: the run has another config: a key differs that may not change.
    """
    record, changes = _fill_and_compare(asked, run)
    allowed, reason = set(), ""
    if done is not None and "train.steps" in changes:
        record, changes = _keep_warmup(record, run)
        reason = _why_not_these_steps(record, run, done)
        allowed = set() if reason else _STEP_KEYS
    if differing := {
        key: change for key, change in changes.items() if key not in allowed and not _may_change(key, change, record)
    }:
        parse(asked)  # raises first if the config itself is wrong
        branch_possible = set(differing) <= set(_BRANCH_KEYS)
        advice = f", or continue in a new one with --config.train.branch_from={run.path}" if branch_possible else ""
        raise InputError(
            f"{run.path} holds a run of another config ({_format_changes(differing)}){reason}"
            f": choose another --workdir{advice}"
        )
    return record, changes


def _keep_warmup(record: Any, run: RunFolder) -> tuple[Any, Changes]:
    """The config with the run's warm-up if that is open, and all keys that then differ.

    The warm-up is recorded with them: left open, it would follow from the new number of steps.
    """
    record, before = record.copy_and_resolve_references(), parse(run.config).train.warmup_steps
    if record.train.warmup_steps is not None:
        return _fill_and_compare(record, run)
    record.train.warmup_steps = before
    record, changes = _fill_and_compare(record, run)
    return record, changes | {"train.warmup_steps": (before, before)}


def _why_not_these_steps(record: Any, run: RunFolder, done: int) -> str:
    """Why a run that has done so many steps cannot have a config's number of steps; empty: it can."""
    before, now = parse(run.config).train, parse(record).train
    if now.steps < done:
        return f"; it has done {done} steps"
    if same_until(before, now, done):
        return ""
    return (
        f"; the learning rate of the {done} steps done would have been another, since train.schedule={now.schedule} "
        f"depends on train.steps, and constant does not"
    )


def _branch_config(asked: Any, parent: RunFolder) -> Any:
    """The config to start a branch with: only the schedule and the keys that a resume may change can differ.

    Raises:
        InputError: the run does not exist, or its config differs elsewhere.
    """
    branch_keys = (*_BRANCH_KEYS, *_INIT_KEYS)
    record, changes = _fill_and_compare(asked, parent, keep_open=branch_keys)
    if differing := {
        key: change
        for key, change in changes.items()
        if not _may_change(key, change, record) and key not in branch_keys
    }:
        parse(asked)
        raise InputError(
            f"train.branch_from={record.train.branch_from} is a run of another config ({_format_changes(differing)}): "
            f"a branch may change only {', '.join(_BRANCH_KEYS[1:])}, and what a resumed run may change"
        )
    return record


def _fill_and_compare(asked: Any, run: RunFolder, keep_open: Collection[str] = ()) -> tuple[Any, Changes]:
    """Fills in the open keys of a config from a run, and lists the keys that then differ.

    Args:
        asked: the new config.
        run: the run.
        keep_open: keys that stay open.
    """
    run_values, record = _flatten(run.config.to_dict()), asked.copy_and_resolve_references()
    # Fill in from the run, then let the other keys follow on both sides.
    left_open = {key for key, value in _flatten(record.to_dict()).items() if value is None and key not in keep_open}
    record.update_from_flattened_dict({key: run_values[key] for key in left_open if run_values.get(key) is not None})
    before, now = (_flatten(fill_open_keys(x.to_dict())) for x in (run.config, record))
    differing = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    return record, {key: (before.get(key), now.get(key)) for key in sorted(differing - _unused_keys(before, now))}


def _may_change(key: str, change: tuple[Any, Any], config: Any) -> bool:
    """Whether a resume may change a key."""
    if key == "train.teacher":
        return all(change)  # another folder, whose parameters are checked
    # Without dropout, the number of microbatches changes only the order of a sum.
    model = config.get("model", {})
    draws_random_numbers = model.get("dropout") or model.get("favor", {}).get("redraw")
    if key == "model.state_dtype" and config.get("train", {}).get("carry_state"):
        return False  # the checkpoint holds a decode state of this dtype
    return key.startswith(_CHANGEABLE) or (key == "train.accumulate" and not draws_random_numbers)


def _unused_keys(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Keys that neither of two flat configs uses, so that a difference means nothing."""
    kept = set() if before["data.streaming"] or now.get("data.streaming") else {"data.shuffle_buffer", "data.streams"}
    encoder = now.get("model.encoder.family")
    families = (*(now.get("model.pattern") or (str(now.get("model.family")),)), *([encoder] if encoder else []))
    cross = now.get("model.cross.kind") if encoder else None
    return kept | unread_keys(now) | unused_keys(families, cross)


def _format_changes(changes: dict[str, tuple[Any, Any]]) -> str:
    said = lambda value: "open" if value is None else value
    return "; ".join(f"{key}={said(before)} there, {said(now)} here" for key, (before, now) in changes.items())


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    return flatten_dict(tree, sep=".")
