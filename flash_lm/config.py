"""ConfigDict -> frozen dataclasses. Each rule stands beside its key; all problems of a config are reported at once."""

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from flash_lm.errors import InputError

# A rule returns what was expected, or None when the value is good.
Rule = Callable[[Any], str | None]


def _ruled(*rules: Rule) -> Any:
    return dataclasses.field(metadata={"rules": rules})


def _one_of(*values: str) -> Any:
    return _ruled(lambda x: None if x in values else "one of " + ", ".join(values))


_LARGEST = 2**31 - 1  # of JAX's int32


def _at_least(low: float) -> Any:
    most = _LARGEST
    return _ruled(lambda x: None if math.isfinite(x) and low <= x <= most else f"{low} or more, and at most {most:,}")


def _above(low: float) -> Any:
    return _ruled(lambda x: None if math.isfinite(x) and x > low else f"more than {low}")


def _fraction() -> Any:
    return _ruled(lambda x: None if 0 <= x < 1 else "at least 0 and less than 1")


def _open(field: Any = None) -> Any:
    """May be None in the schema; whoever the schema names fills it in before anyone reads it, hence the plain type."""
    metadata = dict(field.metadata) if field is not None else {}
    return dataclasses.field(metadata=metadata | {"open": True})


def _added(before: Any, field: Any = None) -> Any:
    """A key younger than the oldest runs; `before` is what they did, and what `upgrade` fills in for them."""
    metadata = dict(field.metadata) if field is not None else {}
    return dataclasses.field(metadata=metadata | {"before": before})


def _normalizer() -> Any:
    def rule(x: str) -> str | None:
        good = x in ("count", "length", "paper") or (x.isdecimal() and int(x) > 0)
        return None if good else "count, length, paper or a positive integer"

    return _ruled(rule)


def _sharding_rules(rules: tuple) -> str | None:
    """Rule of `mesh.rules`."""
    for rule in rules:
        try:
            regex, spec = rule
            re.compile(regex)
            named = [axis for axis in spec if axis is not None]
            good = isinstance(spec, tuple) and set(named) <= set(MESH_AXES) and len(set(named)) == len(named)
        except (TypeError, ValueError, re.error):
            good = False
        if not good:
            axes = ", ".join(MESH_AXES)
            return f"pairs of a regex and a tuple of different mesh axes ({axes}) or None, and {rule!r} is not"
    return None


def _boundaries(steps: tuple) -> str | None:
    """Rule of `train.boundaries`."""
    good = all(type(x) is int and x > 0 for x in steps) and list(steps) == sorted(set(steps))
    return None if good else "a tuple of positive, increasing steps, such as (3000,)"


MESH_AXES = ("data", "fsdp", "tensor")
DTYPES = ("float32", "bfloat16")
TEXTS = ("stdlib", "text", "hf")  # corpora of text, to be tokenised and packed
EXAMPLES = ("copy", "couplets", "images")  # corpora of examples, each a row, with tokens of their own
SHUFFLE_BUFFER = 64  # millions of characters
DECAYS = ("linear", "cosine")  # schedules that fall to an end
TASKS = {"causal_lm": True, "masked_lm": False}  # whether the model is causal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`config.model`; see configs/base.py for units. models/families.py fills in the keys left open."""

    family: str
    num_layers: int = _at_least(1)
    model_dim: int = _at_least(1)
    num_heads: int = _at_least(1)
    mlp_dim: int = _open(_at_least(1))
    expanded_dim: int = _open(_at_least(1))
    shared_dim: int = _at_least(1)
    gau_heads: int = _added(1, _at_least(1))
    query_key: str = _added("scale_offset", _one_of("scale_offset", "dense"))
    chunk_size: int = _at_least(1)
    window_size: int = _added(32, _at_least(0))
    bias_dim: int = _added(64, _at_least(1))
    bias_rate: float = _added(1.0, _above(0))
    num_features: int = _added(None, _open(_at_least(1)))
    redraw_features: bool = _added(False)
    max_length: int = _at_least(1)
    vocab_size: int = _open(_at_least(2))
    causal: bool = _open()
    tie_embeddings: bool
    head: str = _added("softmax", _one_of("softmax", "logistics"))
    mixtures: int = _added(10, _at_least(1))
    init: str = _one_of("normal", "lecun")
    norm: str = _open(_one_of("layer", "rms", "scale"))
    absolute_positions: str = _open(_one_of("none", "learned", "sinusoid", "scaled_sinusoid"))
    rotary: bool = _open()
    relative_bias: str = _open(_one_of("none", "t5", "toeplitz", "rope"))
    attention_function: str = _one_of("relu2", "softmax", "laplace")
    normalizer: str = _open(_normalizer())
    local_attention: bool
    overlapping_chunks: bool = _added(False)
    global_attention: bool
    attention_implementation: str = _one_of("plain", "blocked", "cudnn")
    kernels: str = _added("auto", _one_of("auto", "xla", "pallas"))
    dropout: float = _fraction()
    dtype: str = _one_of(*DTYPES)
    param_dtype: str = _one_of(*DTYPES)
    scan_layers: bool
    remat: str = _one_of("none", "products", "full")

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        if not (self.local_attention or self.global_attention):
            return ["model.local_attention and model.global_attention are both false: switch one on"]
        if self.overlapping_chunks and not self.local_attention:
            return ["model.overlapping_chunks is of local attention: set --config.model.local_attention=True"]
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`config.data`; see configs/base.py for units."""

    corpus: str = _one_of(*TEXTS, *EXAMPLES)
    path: str = _open()
    name: str = _added(None, _open())
    config: str = _added(None, _open())
    split: str = _added("train")
    text_column: str = _added("text")
    streaming: bool = _added(False)
    shuffle_buffer: int = _added(0, _open(_at_least(0)))
    tokenizer: str = _one_of("bytes", "sentencepiece")
    tokenizer_path: str = _open()
    vocab_size: int = _at_least(300)  # SentencePiece needs its 256 bytes and the special tokens
    length: int = _at_least(1)
    tokens_per_batch: int = _at_least(1)
    pack: str = _one_of("stream", "documents", "examples")
    mask_rate: float = _added(0.15, _ruled(lambda x: None if 0 < x < 1 else "more than 0 and less than 1"))
    cache_dir: str

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents that do not see each other."""
        return self.pack == "documents"

    @property
    def batch_size(self) -> int:
        """Rows a batch, over all devices."""
        return self.tokens_per_batch // self.length

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        found = []
        if self.tokens_per_batch % self.length:
            found.append(
                f"data.tokens_per_batch={self.tokens_per_batch} must be a multiple of data.length={self.length}"
            )
        if (self.corpus in EXAMPLES) != (self.pack == "examples"):
            kind = "examples" if self.corpus in EXAMPLES else "stream or documents"
            found.append(f"data.corpus={self.corpus} needs data.pack={kind}, and here is {self.pack}")
        if self.corpus == "text" and not self.path:
            found.append("data.corpus=text needs data.path, a file or a glob: set --config.data.path")
        if self.corpus == "couplets" and not self.path:
            found.append("data.corpus=couplets needs data.path, a folder: set --config.data.path")
        if self.corpus in ("hf", "images") and bool(self.path) == bool(self.name):
            found.append(
                f"data.corpus={self.corpus} needs either data.name, a data set on the hub, or data.path, local files, "
                f"and here are data.name={self.name} and data.path={self.path}: set one, and leave the other empty"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`config.train`; see configs/base.py for units."""

    steps: int = _at_least(1)
    optimizer: str = _one_of("adamw", "radam", "lion", "adafactor", "lamb")
    learning_rate: float = _above(0)
    end_learning_rate: float = _at_least(0)
    warmup_steps: int = _open(_at_least(0))
    decay_steps: int = _added(None, _open(_at_least(1)))
    schedule: str = _one_of("linear", "cosine", "step", "constant")
    boundaries: tuple = _added((), _ruled(_boundaries))
    b1: float = _fraction()
    b2: float = _fraction()
    eps: float = _above(0)
    weight_decay: float = _at_least(0)
    clip: float = _at_least(0)
    clip_mode: str = _added("global", _one_of("global", "parameter"))
    accumulate: int = _at_least(1)
    on_nonfinite: str = _added("stop", _one_of("stop", "skip"))
    loss_chunk: int = _at_least(1)
    log_every: int = _at_least(1)
    eval_every: int = _at_least(0)
    eval_steps: int = _at_least(0)
    checkpoint_every: int = _at_least(0)
    keep: int = _at_least(1)
    best_metric: str = _one_of("loss", "bits_per_byte")
    branch_from: str = _added(None, _open())

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        found = []
        if self.warmup_steps >= self.steps and self.schedule != "constant":
            found.append(
                f"train.warmup_steps={self.warmup_steps} must be less than train.steps={self.steps}: lower it, or "
                f"leave it open with --config.train.warmup_steps="
            )
        if self.decay_steps and self.schedule not in DECAYS:
            found.append(f"train.decay_steps is of train.schedule={' and '.join(DECAYS)}, and here is {self.schedule}")
        elif self.decay_steps and self.decay_steps > self.steps - self.warmup_steps:
            found.append(
                f"train.decay_steps={self.decay_steps} must be at most the {self.steps - self.warmup_steps} steps "
                f"after the warm-up"
            )
        if bool(self.boundaries) != (self.schedule == "step"):
            found.append(
                f"train.schedule=step and train.boundaries go together, and here are {self.schedule} and "
                f"{self.boundaries}: set both, or neither"
            )
        elif not all(self.warmup_steps < boundary < self.steps for boundary in self.boundaries):
            found.append(
                f"train.boundaries={self.boundaries} must lie between train.warmup_steps={self.warmup_steps} and "
                f"train.steps={self.steps}"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """`config.mesh`; see configs/base.py."""

    shape: tuple = _ruled(
        lambda x: (
            None
            if len(x) == 3 and all(isinstance(n, int) and (n > 0 or n == -1) for n in x) and x.count(-1) <= 1
            else "three sizes (data, fsdp, tensor), each positive, or one of them -1"
        )
    )
    rules: tuple = _ruled(_sharding_rules)

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole experiment, complete: only `model` may still have open keys that its family fills in."""

    task: str = _one_of(*TASKS)
    seed: int = _at_least(0)
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    mesh: MeshConfig

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        found = []
        if self.model.causal != TASKS[self.task]:
            kind = "causal" if TASKS[self.task] else "bidirectional"
            found.append(
                f"task={self.task} needs a {kind} model, and model.causal={self.model.causal}: leave model.causal open"
            )
        if self.task == "masked_lm" and self.data.pack == "examples":
            found.append(f"task=masked_lm is of text: data.corpus={self.data.corpus} needs task=causal_lm")
        if self.data.length > self.model.max_length:
            found.append(
                f"data.length={self.data.length} is over model.max_length={self.model.max_length}: "
                f"set --config.model.max_length={self.data.length} or shorten the rows"
            )
        if self.data.batch_size and self.data.batch_size % self.train.accumulate:
            found.append(
                f"the batch of {self.data.batch_size} rows (data.tokens_per_batch / data.length) does not divide into "
                f"train.accumulate={self.train.accumulate} microbatches"
            )
        return found


def parse(config: ConfigDict) -> Config:
    """Validates a whole experiment.

    Args:
        config: in the schema of configs/base.py.

    Returns:
        The frozen config, its open data keys filled in.

    Raises:
        InputError: with every problem found, one a line.
    """
    return _parse(Config, filled(config.to_dict()))


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """A config, as nested plain values, with the open keys that its other keys fill in."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    model, data, train = (values.get(name, {}) for name in ("model", "data", "train"))
    if model.get("causal") is None:
        model["causal"] = TASKS.get(values.get("task", ""), True)
    if data.get("length") is None:
        data["length"] = model.get("max_length")
    if data.get("shuffle_buffer") is None:
        data["shuffle_buffer"] = SHUFFLE_BUFFER
    if model.get("normalizer") is None and not model["causal"]:
        model["normalizer"] = str(data["length"])
    if train.get("warmup_steps") is None and isinstance(train.get("steps"), int):
        train["warmup_steps"] = train["steps"] // 10
    return values


def open_type(key: str) -> type | None:
    """The type of a key, such as model.norm, that may be left open; None: it may not."""
    kind, metadata = _of_schema(key)
    return kind if "open" in metadata else None


def is_free_text(key: str) -> bool:
    """Whether a key, such as data.path, may be any text."""
    kind, metadata = _of_schema(key)
    return kind is str and not metadata.get("rules")


def _of_schema(key: str) -> tuple[type | None, Mapping[str, Any]]:
    """Type and metadata of a key; None and nothing of one that the schema lacks."""
    level: Any = Config
    *parents, name = key.split(".")
    for parent in parents:
        level = typing.get_type_hints(level).get(parent) if dataclasses.is_dataclass(level) else None
    fields = {field.name: field for field in dataclasses.fields(level)} if dataclasses.is_dataclass(level) else {}
    return (typing.get_type_hints(level)[name], fields[name].metadata) if name in fields else (None, {})


def upgrade(values: dict[str, Any], cls: type = Config) -> dict[str, Any]:
    """A config that an older version wrote, with what its run did for each key that has been added since.

    Args:
        values: nested dict of plain values.
        cls: dataclass of this level.
    """
    upgraded = dict(values)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in upgraded and "before" in field.metadata:
            upgraded[field.name] = field.metadata["before"]
        elif dataclasses.is_dataclass(kind := hints[field.name]) and isinstance(upgraded.get(field.name), dict):
            upgraded[field.name] = upgrade(upgraded[field.name], typing.cast(type, kind))
    return upgraded


def parse_model(config: ConfigDict) -> ModelConfig:
    """Validates `config.model` alone.

    Raises:
        InputError: with every problem found, one a line.
    """
    return _parse(ModelConfig, config.to_dict(), prefix="model.")


def _parse(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    problems: list[str] = []
    parsed = _build(cls, values, prefix, problems)
    if problems:
        raise InputError.of(problems)
    return parsed


def _build(cls: type, values: dict[str, Any], prefix: str, problems: list[str]) -> Any:
    """Collects the problems of one level; returns None when it has any, since its cross-checks would then mislead."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    problems.extend(unknown_key(prefix, name, list(fields)) for name in sorted(values.keys() - fields.keys()))
    before = len(problems)
    arguments = {}
    for name, field in fields.items():
        kind = hints[name]
        if name not in values:
            problems.append(f"{prefix}{name} is missing: start the config from configs/base.py")
        elif dataclasses.is_dataclass(kind):
            arguments[name] = _build(typing.cast(type, kind), values[name], f"{prefix}{name}.", problems)
        else:
            arguments[name] = _checked(prefix + name, values[name], kind, field.metadata, problems)
    if len(problems) > before:
        return None
    built = cls(**arguments)
    problems.extend(built.problems())
    return built


def _checked(key: str, value: Any, kind: type, metadata: Mapping[str, Any], problems: list[str]) -> Any:
    if value is None and metadata.get("open"):
        return None
    if kind is float and type(value) is int:
        value = float(value)
    # type() and not isinstance(): a bool is an int, yet no substitute for one.
    if type(value) is not kind:
        problems.append(f"{key}={value!r} must be of type {kind.__name__}")
        return value
    for rule in metadata.get("rules", ()):
        if expected := rule(value):
            problems.append(f"{key}={value} must be {expected}")
    return value


def unknown_key(prefix: str, name: str, known: list[str]) -> str:
    """The sentence for a key that the schema lacks, with the nearest one that it has."""
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {prefix}{near[0]}?" if near else "configs/base.py lists the keys"
    return f"unknown key {prefix}{name}: {advice}"
