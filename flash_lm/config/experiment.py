"""Validates the config of an experiment: a ConfigDict -> frozen dataclasses. All problems are reported at once.

`keys` defines how keys are declared; `model`, `data`, `train` and `mesh` have those that all rows share.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from flash_lm.config import keys
from flash_lm.config.data import DataConfig
from flash_lm.config.keys import at_least, key
from flash_lm.config.mesh import MeshConfig
from flash_lm.config.model import ModelConfig
from flash_lm.config.plugins import import_plugins, plugin_names
from flash_lm.config.registry import CORPORA, FAMILIES, HEADS, OPTIMIZERS, TASKS
from flash_lm.config.renamed_keys import rename
from flash_lm.config.train import TrainConfig
from flash_lm.errors import InputError

SHUFFLE_BUFFER = 64  # millions of characters
STEPS = 300
BATCH_TOKENS = 2048


def _modules(names: tuple) -> str | None:
    good = all(isinstance(name, str) for name in names)
    return None if good else 'a tuple of names of modules, such as ("my_package.families",)'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The validated config of an experiment. Only `model` may still have open keys, which its family fills in."""

    plugins: tuple = key((), "your modules, which register families, tasks and so on; docs/extend.md", _modules)
    task: str = key("causal_lm", "name of a task", TASKS.rule)
    seed: int = key(0, "seed of parameters, data order and dropout", at_least(0))
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    mesh: MeshConfig

    @property
    def carried_rows(self) -> int | None:
        """The rows of a batch if they carry a state; None: they do not."""
        return self.data.batch_size if self.train.carry_state else None

    @property
    def has_labels(self) -> bool:
        """Whether the corpus has labels."""
        return CORPORA[self.data.corpus].labelled(self.data)

    @property
    def few_targets(self) -> bool:
        """Whether the loss may count few tokens of a row, as it does in masked rows and in examples with answers."""
        return self.data.pack == "examples" or not TASKS[self.task].of_each_token

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        sentences, task = [], TASKS[self.task]
        # The task against model, corpus and head.
        if self.model.causal != task.causal and not task.labels:
            kind = "causal" if task.causal else "bidirectional"
            sentences.append(
                f"task={self.task} needs a {kind} model, not model.causal={self.model.causal}: leave model.causal open"
            )
        if self.data.pack == "examples" and not task.of_examples and not self.has_labels:
            what = f"data.pair_column={self.data.pair_column}" if self.data.pairs else f"data.corpus={self.data.corpus}"
            sentences.append(f"task={self.task} needs a corpus of text: {what} needs task=causal_lm")
        if task.labels != (HEADS[self.model.head].pool is not None):
            sentences.append(f"task={self.task} does not go with model.head={self.model.head}: leave model.head open")
        for term in ("label_smoothing", "z_loss"):
            if getattr(self.train, term) and self.model.head != "softmax":
                sentences.append(f"train.{term} is of model.head=softmax, not {self.model.head}: set it to 0")
        if self.train.teacher:
            sentences += self._teacher_problems()
        if self.train.stop_accuracy and HEADS[self.model.head].of_values:
            sentences.append(f"model.head={self.model.head} has no accuracy: leave train.stop_accuracy open")
        sentences += task.problems(self)
        # A carried state needs documents in order, which streams and mixtures do not give.
        if self.train.carry_state and (not task.causal or not task.of_each_token or self.data.pack == "examples"):
            sentences.append(
                "train.carry_state=True needs task=causal_lm and a corpus of text, whose documents it reads"
            )
        if self.train.carry_state and self.model.kernels not in ("auto", "xla"):
            sentences.append("train.carry_state=True has no kernels: leave model.kernels=auto")
        if self.train.carry_state and self.data.streaming:
            sentences.append("train.carry_state=True needs data.streaming=False: it needs documents in order")
        if self.train.carry_state and self.data.mixture:
            sentences.append("train.carry_state=True reads documents in order: leave data.mixture out")
        # Sizes: rows against positions, tokens against steps, the batch against microbatches.
        if self.data.length > self.model.max_length:
            sentences.append(
                f"data.length={self.data.length} is greater than model.max_length={self.model.max_length}: "
                f"set --config.model.max_length={self.data.length} or shorten the sequences"
            )
        needed = count_steps(self.train.tokens, self.data.tokens_per_batch)
        if self.train.tokens and self.train.steps != needed:
            sentences.append(
                f"train.tokens={self.train.tokens} are {needed} steps, and train.steps={self.train.steps}: leave one "
                f"open, with --config.train.steps= or --config.train.tokens="
            )
        if self.data.batch_size and self.data.batch_size % self.train.microbatches:
            sentences.append(
                f"the batch of {self.data.batch_size} sequences (data.tokens_per_batch / data.length) cannot be split "
                f"into train.accumulate={self.train.accumulate} microbatches"
            )
        return sentences

    def _teacher_problems(self) -> list[str]:
        """A sentence on what a model that imitates a teacher may not be, if it is that."""
        wrong = {
            "task": not TASKS[self.task].of_each_token,
            "model.head": self.model.head != "softmax",
            "model.encoder.family": self.model.encoder is not None,
            "train.carry_state": self.train.carry_state,
            "train.label_smoothing": self.train.label_smoothing > 0,
            "train.z_loss": self.train.z_loss > 0,
        }
        if not (names := [name for name, is_wrong in wrong.items() if is_wrong]):
            return []
        defaults = "their defaults" if len(names) > 1 else "its default"
        return [
            f"train.teacher is for causal models of text whose loss has no other term: leave {', '.join(names)} at "
            f"{defaults}"
        ]


def default_config() -> ConfigDict:
    """Every key with its default; an open key is a placeholder."""
    return keys.defaults(Config)


def parse(config: ConfigDict) -> Config:
    """Validates the config of an experiment.

    Args:
        config: a config with the schema of configs/base.py.

    Returns:
        The frozen config with its open data keys fill_open_keys in.

    Raises:
        InputError: the config is wrong; one problem per line.
    """
    import_plugins(plugin_names(config.to_dict()))
    return _parse(Config, fill_open_keys(config.to_dict()))


def fill_open_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Fills in the open keys that follow from other keys; the config is a nested dict of plain values."""
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    # In this order, since later keys follow from earlier ones.
    model, data, train = (values.get(name, {}) for name in ("model", "data", "train"))
    if task := TASKS.get(values.get("task", "")):
        from_task = {"causal": task.causal, "head": task.head}
        model.update({name: value for name, value in from_task.items() if model.get(name) is None})
    if data.get("length") is None:
        data["length"] = model.get("max_length")
    if data.get("shuffle_buffer") is None:
        data["shuffle_buffer"] = SHUFFLE_BUFFER
    if model.get("normalizer") is None and (model.get("causal") is False or model.get("divides") == "scores"):
        model["normalizer"] = str(data["length"])
    if data.get("tokens_per_batch") is None:
        data["tokens_per_batch"] = _batch_tokens(data["length"], values.get("mesh", {}), train.get("accumulate"))
    if train.get("steps") is None:
        train["steps"] = count_steps(train.get("tokens"), data.get("tokens_per_batch"))
    if train.get("warmup_steps") is None and isinstance(train.get("steps"), int):
        train["warmup_steps"] = train["steps"] // 10
    return values


def _batch_tokens(length: Any, mesh: Mapping[str, Any], accumulate: Any) -> Any:
    """`BATCH_TOKENS`, rounded up to rows that devices and microbatches share evenly; as it is if keys are invalid."""
    import jax  # noqa: PLC0415 (only where the key is open)

    shape: Any = mesh.get("shape")
    accumulate = 1 if accumulate is None else accumulate
    if not (type(length) is type(accumulate) is int and length > 0 and accumulate > 0 and _is_shape(shape)):
        return BATCH_TOKENS  # and what is wrong is said elsewhere
    data, fsdp, _ = shape
    # An axis of -1 takes the devices that are left.
    known = math.prod(size for size in shape if size > 0)
    of_rows = math.prod(size for size in (data, fsdp) if size > 0)
    parts = of_rows * (max(jax.device_count() // known, 1) if -1 in (data, fsdp) else 1) * accumulate
    rows = -(-BATCH_TOKENS // length)
    return -(-rows // parts) * parts * length


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and len(shape) == 3 and all(type(n) is int and n for n in shape)


def count_steps(tokens: Any, a_step: Any) -> int:
    """The number of steps that train on so many tokens, rounded up; `STEPS` if one of the two numbers is open."""
    counts = type(tokens) is int and type(a_step) is int and a_step > 0
    return -(-tokens // a_step) if counts else STEPS


def parse_model(config: ConfigDict) -> ModelConfig:
    """Validates only `config.model`.

    Raises:
        InputError: the config is wrong; one problem per line.
    """
    return _parse(ModelConfig, config.to_dict(), prefix="model.")


def upgrade(values: dict[str, Any]) -> dict[str, Any]:
    """Converts a config that an earlier version wrote to today's keys, at the values that match what its run did."""
    return keys.upgrade(rename(values), Config)


def identifying_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a flat config that enter the hash of its run; a key that is added later changes no hash."""
    return keys.identifying_keys(flat, Config)


def without_prefix(families: Iterable[str]) -> list[str]:
    """A sentence on each of these families that cannot see a prefix both ways."""
    # The advice lists the families that support prefixes.
    able = ", ".join(name for name, row in FAMILIES.items() if "prefix" in row.serves)
    return [
        f"model.family={name} cannot see a prefix both ways; families that can: {able}"
        for name in dict.fromkeys(families)
        if name in FAMILIES and "prefix" not in FAMILIES[name].serves
    ]


def add_sections(config: Any) -> None:
    """Adds the sections of modules that were imported after the config was made."""
    for name, kind in keys.SECTIONS.items():
        group, name_in_group = name.split(".")
        if group in config and name_in_group not in config[group]:
            config[group][name_in_group] = keys.defaults(kind)


def unread_keys(flat: Mapping[str, Any]) -> set[str]:
    """Keys read only by heads, tasks, corpora or optimizers other than those that a flat config selects."""
    # Sections of entries that are not selected, unless the selected one has the same section.
    unread: set[str] = set()
    for table in (HEADS, TASKS, CORPORA, OPTIMIZERS):
        if (chosen := str(flat.get(table.key))) in table:
            others = {kind for row in table.values() for kind in row.sections} - {*table[chosen].sections}
            unread = unread.union(*(keys.key_names(kind) for kind in others))
    if (task := TASKS.get(str(flat.get("task")))) is not None:
        unread = unread.union(*(keys.key_names(keys.SECTIONS[name]) for name in sections_of_other_tasks(task)))
    return unread


def sections_of_other_tasks(task: Any) -> set[str]:
    """Names of the sections of `config.model` that only models of other tasks read."""
    return {name for row in TASKS.values() for name in row.of_model} - {*task.of_model}


def open_type(name: str) -> type | None:
    """The type of a key that may be left open, such as model.norm; None: it may not be left open."""
    kind, about = _schema_entry(name)
    return kind if about.get("open") else None


def is_free_text(name: str) -> bool:
    """Whether a key, such as data.path, may be any text."""
    kind, about = _schema_entry(name)
    return kind is str and not about.get("rules")


def _schema_entry(name: str) -> tuple[type | None, Mapping[str, Any]]:
    """The type and metadata of a key; None and an empty dict if the schema does not have it."""
    return next(((one.kind, one.about) for one in keys.keys(Config) if one.name == name), (None, {}))


def _parse(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    problems: list[str] = []
    parsed = keys.build(cls, values, prefix, problems)
    if problems:
        raise InputError.of(problems)
    return parsed
