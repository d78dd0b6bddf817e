"""The config that runs: what was asked for, with every open key closed.

An open key takes its value from the run that is resumed, from the parent of a branch or the model of train.init_from,
from the keys that it follows from (`config.experiment.fill_open_keys`), from the corpus, or from the family, in this
order.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict

from flash_lm.config.experiment import Config, add_sections, fill_open_keys, parse, sections_of_other_tasks, unread_keys
from flash_lm.config.keys import type_problems
from flash_lm.config.model import ModelConfig
from flash_lm.config.plugins import import_plugins, plugins_of
from flash_lm.config.registry import CORPORA, HEADS, TASKS
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.errors import InputError
from flash_lm.families.family import complete, unread
from flash_lm.models.classifier import ClassOptions
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training.hub import downloaded

# Keys that may change when a run is resumed: for the model they change rounding, or nothing.
_FREE = (
    "mesh.",
    "model.remat",
    "model.scan_layers",
    "model.kernels",
    "model.state_dtype",
    "model.quadratic.",
    "data.path",  # the content is checked
    "data.cache_dir",
    "train.loss_chunk",
    "train.on_nonfinite",
    "train.best_metric",
    "train.log_every",
    "train.eval_",
    "train.stop_accuracy",
    "train.checkpoint_every",
    "train.keep",
)
# Keys that a branch may change as well: its schedule.
_OF_A_BRANCH = (
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
# Keys that a branch does not use, since its state comes from its parent.
_OF_A_BEGINNING = ("train.init_from", "train.init_positions")
_OF_THE_TASK = ("max_length", "causal", "head")  # keys of config.model that train.init_from does not fill in
Changes = dict[str, tuple[Any, Any]]  # by key: the value there, the value here


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The config of a run.

    Attributes:
        record: for config.json: what was asked for, with open keys from the run that is resumed or from the parent.
        config: the same, checked, with the keys that follow from others. Keys of the model that the corpus or the
            family defines are still open, see `close`.
        changes: what a resume changes in free keys.
    """

    record: Any
    config: Config
    changes: Changes


def with_types(asked: Any) -> Any:
    """A copy of a user's config that has every key, each with a value of its type, so that it can be compared.

    Raises:
        InputError: values have other types, or plugins cannot be imported.
    """
    config = asked.copy_and_resolve_references()
    import_plugins(plugins_of(config.to_dict()))
    add_sections(config)
    if any(type_problems(config.to_dict(), Config)):
        parse(config)  # raises, with every problem
    return config


def resolve(asked: Any, run: RunFolder | None, parent: RunFolder | None, init_from: str | None) -> Resolved:
    """Closes the keys that can be closed before the corpus is loaded.

    Args:
        asked: a config from `with_types`, with the keys open that the user left open.
        run: the run that is resumed; None: there is none.
        parent: the run that a new branch starts from.
        init_from: the model that a new run starts from.

    Raises:
        InputError: the config is wrong, each problem on a line; or it is not that of the run there, or of the parent.
    """
    record, changes = asked.copy_and_resolve_references(), {}
    if init_from:
        parse(asked)  # what is wrong with it is said before a model is downloaded
        record = like_parent(record, init_from)
    if run:
        record, changes = continue_run(record, run)
    if parent:
        record = _branch(record, parent)
    config = parse(record)
    # An open batch depends on the devices, and the run keeps it wherever it goes on.
    record.data.tokens_per_batch = config.data.tokens_per_batch
    return Resolved(record, config, changes)


def close(config: Config, tokenizer: Tokenizer, labels: Sequence[str]) -> Config:
    """Closes the keys of the model that the corpus and the families define.

    Args:
        config: a checked config.
        tokenizer: of the corpus.
        labels: names of the corpus's labels; empty: it has none.

    Raises:
        InputError: a set number is too small for the corpus, or widths do not go together.
    """
    return dataclasses.replace(config, model=_with_classes(config, _with_vocabulary(config, tokenizer), labels))


def _with_vocabulary(config: Config, tokenizer: Tokenizer) -> ModelConfig:
    """The config of the model with its vocabulary, and what its families fill in."""
    return complete(dataclasses.replace(config.model, vocab_size=vocabulary(config, tokenizer)))


def vocabulary(config: Config, tokenizer: Tokenizer) -> int:
    """The model's vocabulary size: as set, or as the tokenizer needs.

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


def _with_classes(config: Config, model: ModelConfig, labels: Sequence[str]) -> ModelConfig:
    """The config of the model with the number of its labels: as set, or as many as there are.

    Raises:
        InputError: there are no labels, or the set number is too small.
    """
    if not TASKS[config.task].labels:
        return model
    if not labels:
        raise InputError(f"task={config.task} needs labels, and the corpus {config.data.corpus} at its place has none")
    count = model[ClassOptions].count or len(labels)
    if count < len(labels):
        raise InputError(f"the corpus has {len(labels)} labels, but got model.classes.count={count}: leave it open")
    return model.put("classes.count", count)


def like_parent(config: Any, name: str) -> Any:
    """Fills in the open keys of a config's model from the model that it starts from.

    A family's defaults depend on the objective, and the parameters were trained with these values.

    Raises:
        InputError: no such model.
    """
    folder = downloaded(name).workdir
    theirs, tokenizer = parse(RunFolder(folder).config), load_tokenizer(folder / "tokenizer")
    model = _with_vocabulary(theirs, tokenizer)
    if (config.model.get("family"), tuple(config.model.get("pattern", ()))) != (model.family, model.pattern):
        return config
    config = config.copy_and_resolve_references()
    left_open = [key for key, value in flatten_dict(config.model.to_dict(), sep=".").items() if value is None]
    known = {key: model.get(key) for key in left_open if key not in _OF_THE_TASK}
    others = sections_of_other_tasks(TASKS[config.task])
    known = {key: x for key, x in known.items() if f"model.{key.partition('.')[0]}" not in others}
    if "vocab_size" in known and TASKS[config.task].vocabulary(tokenizer) > model.vocab_size:
        del known["vocab_size"]  # too small for this task
    config.model.update_from_flattened_dict({key: value for key, value in known.items() if value is not None})
    return config


def continue_run(asked: Any, run: RunFolder) -> tuple[Any, Changes]:
    """The config to continue a run with, and what that changes in free keys.

    Raises:
        InputError: the run had another config.
    """
    record, changes = _compared(asked, run)
    if differing := {key: change for key, change in changes.items() if not _is_free(key, record)}:
        parse(asked)  # what is wrong with it by itself comes first
        of_a_branch = set(differing) <= set(_OF_A_BRANCH)
        advice = f", or continue in a new one with --config.train.branch_from={run.path}" if of_a_branch else ""
        raise InputError(
            f"{run.path} holds a run of another config ({_listed(differing)}): choose another --workdir{advice}"
        )
    return record, changes


def _branch(asked: Any, parent: RunFolder) -> Any:
    """The config to start a branch with: it differs from its parent's only in the schedule and in free keys.

    Raises:
        InputError: there is no such run, or its config differs elsewhere.
    """
    ours = (*_OF_A_BRANCH, *_OF_A_BEGINNING)
    record, changes = _compared(asked, parent, but=ours)
    if differing := {key: x for key, x in changes.items() if not _is_free(key, record) and key not in ours}:
        parse(asked)
        raise InputError(
            f"train.branch_from={record.train.branch_from} is a run of another config ({_listed(differing)}): a branch "
            f"may change only {', '.join(_OF_A_BRANCH[1:])}, and what a resumed run may change"
        )
    return record


def _compared(asked: Any, run: RunFolder, but: Collection[str] = ()) -> tuple[Any, Changes]:
    """Fills in the open keys of a config from a run, and lists the keys that then differ.

    Args:
        asked: the new config.
        run: the run.
        but: keys that stay open.
    """
    there, record = _flat(run.config.to_dict()), asked.copy_and_resolve_references()
    left_open = {key for key, value in _flat(record.to_dict()).items() if value is None and key not in but}
    record.update_from_flattened_dict({key: there[key] for key in left_open if there.get(key) is not None})
    before, now = (_flat(fill_open_keys(x.to_dict())) for x in (run.config, record))
    differing = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    return record, {key: (before.get(key), now.get(key)) for key in sorted(differing - _meaningless(before, now))}


def _is_free(key: str, config: Any) -> bool:
    # Microbatches have no random numbers of their own, so their number changes only the order of a sum.
    model = config.get("model", {})
    draws = model.get("dropout") or model.get("favor", {}).get("redraw")
    if key == "model.state_dtype" and config.get("train", {}).get("carry_state"):
        return False  # the checkpoint has a state
    return key.startswith(_FREE) or (key == "train.accumulate" and not draws)


def _meaningless(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Keys that neither of two flat configs uses."""
    kept = set() if before["data.streaming"] or now.get("data.streaming") else {"data.shuffle_buffer"}
    encoder = now.get("model.encoder.family")
    families = (*(now.get("model.pattern") or (str(now.get("model.family")),)), *([encoder] if encoder else []))
    cross = now.get("model.cross.kind") if encoder else None
    return kept | unread_keys(now) | unread(families, cross)


def _listed(changes: dict[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key}={there} there, {here} here" for key, (there, here) in changes.items())


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return flatten_dict(tree, sep=".")
