"""The schema that all rows share, and a ConfigDict of it -> frozen dataclasses. All problems are reported at once.

`flash_lm.schema` tells how keys are declared; sections stand beside the parts that read them. docs/keys.md lists all.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from flash_lm import schema
from flash_lm.errors import InputError
from flash_lm.moved import move
from flash_lm.plugins import import_plugins
from flash_lm.schema import Group, above, at_least, fraction, key, one_of
from flash_lm.tables import CORPORA, FAMILIES, OPTIMIZERS, TASKS

MESH_AXES = ("data", "fsdp", "tensor")
DTYPES = ("float32", "bfloat16")
SHUFFLE_BUFFER = 64  # millions of characters
DECAYS = ("linear", "cosine")  # schedules that fall to an end


def _normalizer(x: str) -> str | None:
    good = x in ("count", "length", "paper") or (x.isdecimal() and int(x) > 0)
    return None if good else "count, length, paper or a positive integer"


def _sharding_rules(rules: tuple) -> str | None:
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


def _mesh_shape(x: tuple) -> str | None:
    good = len(x) == 3 and all(isinstance(n, int) and (n > 0 or n == -1) for n in x) and x.count(-1) <= 1
    return None if good else "three sizes (data, fsdp, tensor), each positive, or one of them -1"


def _modules(names: tuple) -> str | None:
    good = all(isinstance(name, str) for name in names)
    return None if good else 'a tuple of names of modules, such as ("my_package.families",)'


def _boundaries(steps: tuple) -> str | None:
    good = all(type(x) is int and x > 0 for x in steps) and list(steps) == sorted(set(steps))
    return None if good else "a tuple of positive, increasing steps, such as (3000,)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Group, name="model"):
    """What every family shares. models/families.py fills in the keys left open."""

    family: str = key("flash", "a row of the table of families", FAMILIES.rule)
    num_layers: int = key(4, "one layer = attention + feed-forward, or two GAUs", at_least(1))
    model_dim: int = key(128, "D", at_least(1))
    num_heads: int = key(4, "H; of a GAU see model.gau.heads", at_least(1))
    mlp_dim: int = key(None, "open: 4 D for an MLP, 8 D / 3 rounded up to a multiple of 8 for a GLU", at_least(1))
    max_length: int = key(512, "tokens; bounds learned positions and the decode cache", at_least(1))
    vocab_size: int = key(None, "open: from the tokenizer", at_least(2))
    causal: bool = key(None, "open: from the task")
    tie_embeddings: bool = key(True, "one table for what comes in and what goes out")
    head: str = key(
        "softmax",
        "softmax, or logistics: a mixture over the 256 values of a byte, for images",
        one_of("softmax", "logistics"),
        before="softmax",
    )
    init: str = key(
        "normal", "normal (standard deviation 0.02), or lecun (1 / sqrt(fan in))", one_of("normal", "lecun")
    )
    norm: str = key(None, "open: from the family", one_of("layer", "rms", "scale"))
    absolute_positions: str = key(
        None, "open: from the family", one_of("none", "learned", "sinusoid", "scaled_sinusoid")
    )
    rotary: bool = key(None, "rotary position embedding of queries and keys; open: from the family")
    normalizer: str = key(
        None,
        "of attention without a softmax: count, length, paper or an integer; open: count if causal, else data.length",
        _normalizer,
    )
    kernels: str = key(
        "auto",
        "auto (Pallas kernels on GPU and TPU, where the shapes suit them), xla or pallas",
        one_of("auto", "xla", "pallas"),
        before="auto",
    )
    dropout: float = key(0.0, "of the embedding and of each sublayer's output", fraction)
    dtype: str = key(
        "float32",
        "of activations; docs/numerics.md tells what stays float32, and what accelerators round",
        one_of(*DTYPES),
    )
    param_dtype: str = key("float32", "of parameters", one_of(*DTYPES))
    scan_layers: bool = key(True, "one compiled layer, scanned; false unrolls: longer to compile, on CPU often faster")
    remat: str = key(
        "none",
        "none, products (keep matrix products) or full (keep only each layer's input)",
        one_of("none", "products", "full"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Group, name="data"):
    """`config.data`."""

    corpus: str = key("stdlib", "a row of the table of corpora", CORPORA.rule)
    path: str = key(
        None,
        "text: a file or a glob; hf: a folder, file or glob of parquet, arrow or json; couplets and images: a folder",
    )
    name: str = key(None, "hf and images: a data set on the hub, in place of a path", before=None)
    config: str = key(None, "hf: one of the configs of that data set; open: its only one", before=None)
    split: str = key(
        "train",
        "hf: trained on; validation and test are its own, or else held out of this one",
        before="train",
    )
    text_column: str = key("text", "hf", before="text")
    streaming: bool = key(
        False, "hf: read while training, with nothing of the training split on the disk", before=False
    )
    shuffle_buffer: int = key(
        None,
        "of a stream: millions of characters whose documents are put into random order; 0: as they come; open: 64",
        at_least(0),
        before=0,
    )
    tokenizer: str = key("sentencepiece", "bytes or sentencepiece", one_of("bytes", "sentencepiece"))
    tokenizer_path: str = key(None, "a SentencePiece model; open: trained on the corpus")
    # SentencePiece needs its 256 bytes and the special tokens.
    vocab_size: int = key(8192, "of the SentencePiece model to train", at_least(300))
    length: int = key(None, "L, tokens a row; open: model.max_length", at_least(1))
    tokens_per_batch: int = key(2048, "B x L", at_least(1))
    pack: str = key(
        "stream",
        "stream (documents joined and cut), documents (isolated segments), examples (one a row)",
        one_of("stream", "documents", "examples"),
    )
    cache_dir: str = key("~/.cache/flash_lm", "tokenised corpora")

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
        kind = CORPORA[self.corpus]
        if kind.examples != (self.pack == "examples"):
            needed = "examples" if kind.examples else "stream or documents"
            found.append(f"data.corpus={self.corpus} needs data.pack={needed}, and here is {self.pack}")
        return found + kind.problems(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Group, name="train"):
    """`config.train`."""

    steps: int = key(300, "updates", at_least(1))
    optimizer: str = key("adamw", "a row of the table of optimizers", OPTIMIZERS.rule)
    learning_rate: float = key(3e-3, "peak", above(0))
    end_learning_rate: float = key(0.0, "of linear and cosine, after the last step", at_least(0))
    warmup_steps: int = key(None, "open: a tenth of the steps", at_least(0))
    schedule: str = key(
        "linear",
        "linear, cosine, step or constant, after the warm-up",
        one_of("linear", "cosine", "step", "constant"),
    )
    decay_steps: int = key(
        None,
        "of linear and cosine: the last so many, after a constant rate; open: all of them",
        at_least(1),
        before=None,
    )
    boundaries: tuple = key(
        (), "of step: the steps from which on the rate is a tenth of what it was", _boundaries, before=()
    )
    b1: float = key(0.9, "of adamw, radam, lion, lamb", fraction)
    b2: float = key(0.999, "of adamw, radam, lion, lamb", fraction)
    # Gradients of AFT's position bias begin at 1e-7; a larger one holds them still.
    eps: float = key(1e-8, "of adamw, radam, lamb", above(0))
    weight_decay: float = key(0.01, "of matrices; not of gains, offsets and biases", at_least(0))
    clip: float = key(1.0, "largest norm of the gradient; 0 = off", at_least(0))
    clip_mode: str = key(
        "global",
        "global (the norm of all) or parameter (of each parameter of each layer)",
        one_of("global", "parameter"),
        before="global",
    )
    accumulate: int = key(1, "microbatches a step", at_least(1))
    on_nonfinite: str = key(
        "stop",
        "stop or skip: what a step does whose loss or gradient is not finite",
        one_of("stop", "skip"),
        before="stop",
    )
    loss_chunk: int = key(1024, "tokens whose logits exist at the same time on a device", at_least(1))
    log_every: int = key(10, "steps", at_least(1))
    eval_every: int = key(100, "steps; 0 = only at the end", at_least(0))
    eval_steps: int = key(0, "batches an evaluation during training; 0 = the whole split", at_least(0))
    checkpoint_every: int = key(100, "steps; 0 = only at the end", at_least(0))
    keep: int = key(2, "newest checkpoints kept, beside the best", at_least(1))
    best_metric: str = key(
        "loss", "loss or bits_per_byte of the validation split; the lowest is the best", one_of("loss", "bits_per_byte")
    )
    branch_from: str = key(
        None, "RUN[@best|@STEP]: state, step and data order go on from there, in a new workdir", before=None
    )

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
    """`config.mesh`."""

    shape: tuple = key((-1, 1, 1), "devices along (data, fsdp, tensor); one may be -1: the rest", _mesh_shape)
    rules: tuple = key(
        (
            ("embedding", ("tensor", "fsdp")),
            ("shared/kernel", ("fsdp", None)),  # one head: to cut it would send scores instead of values
            ("(query|key|value|gate|up)/kernel", ("fsdp", "tensor")),
            ("(output|down)/kernel", ("tensor", "fsdp")),
            ("(query|key)_position", (None, "fsdp")),
        ),
        "the first rule whose regex is found in the parameter's path; the spec names the mesh axis of each dimension, "
        "the stacked layers' dimension excepted; a matrix that no rule names is cut over fsdp, along its largest "
        "dimension",
        _sharding_rules,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole experiment, complete: only `model` may still have open keys that its family fills in."""

    plugins: tuple = key((), "modules of your own, which add rows to the tables; docs/design.md", _modules, before=())
    task: str = key("causal_lm", "a row of the table of tasks", TASKS.rule)
    seed: int = key(0, "of parameters, data order and dropout", at_least(0))
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    mesh: MeshConfig

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        found, task = [], TASKS[self.task]
        if self.model.causal != task.causal:
            kind = "causal" if task.causal else "bidirectional"
            found.append(
                f"task={self.task} needs a {kind} model, and model.causal={self.model.causal}: leave model.causal open"
            )
        if self.data.pack == "examples" and not task.of_examples:
            found.append(f"task={self.task} is of text: data.corpus={self.data.corpus} needs task=causal_lm")
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


def default_config() -> ConfigDict:
    """Every key with its default; an open one is a placeholder."""
    return schema.defaults(Config)


def parse(config: ConfigDict) -> Config:
    """Validates a whole experiment.

    Args:
        config: in the schema of configs/base.py.

    Returns:
        The frozen config, its open data keys filled in.

    Raises:
        InputError: with every problem found, one a line.
    """
    import_plugins(plugins_of(config.to_dict()))
    return _parse(Config, filled(config.to_dict()))


def parse_model(config: ConfigDict) -> ModelConfig:
    """Validates `config.model` alone.

    Raises:
        InputError: with every problem found, one a line.
    """
    return _parse(ModelConfig, config.to_dict(), prefix="model.")


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """A config, as nested plain values, with the open keys that its other keys fill in."""
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    model, data, train = (values.get(name, {}) for name in ("model", "data", "train"))
    if model.get("causal") is None:
        task = TASKS.get(values.get("task", ""))
        model["causal"] = task is None or task.causal
    if data.get("length") is None:
        data["length"] = model.get("max_length")
    if data.get("shuffle_buffer") is None:
        data["shuffle_buffer"] = SHUFFLE_BUFFER
    if model.get("normalizer") is None and not model["causal"]:
        model["normalizer"] = str(data["length"])
    if train.get("warmup_steps") is None and isinstance(train.get("steps"), int):
        train["warmup_steps"] = train["steps"] // 10
    return values


def upgrade(values: dict[str, Any]) -> dict[str, Any]:
    """A config that an older version wrote, in today's schema; what has been added since is what its run did."""
    return schema.upgrade(move(values), Config)


def plugins_of(values: dict[str, Any]) -> tuple[str, ...]:
    """The modules that a config names, if it names them as it should."""
    names = values.get("plugins")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, tuple | list) else ()


def add_sections(config: Any) -> None:
    """Gives a config the sections of modules that were imported after it was made."""
    for name, kind in schema.SECTIONS.items():
        group, own = name.split(".")
        if group in config and own not in config[group]:
            config[group][own] = schema.defaults(kind)


def open_type(name: str) -> type | None:
    """The type of a key, such as model.norm, that may be left open; None: it may not."""
    kind, about = _of_schema(name)
    return kind if about.get("open") else None


def is_free_text(name: str) -> bool:
    """Whether a key, such as data.path, may be any text."""
    kind, about = _of_schema(name)
    return kind is str and not about.get("rules")


def _of_schema(name: str) -> tuple[type | None, Mapping[str, Any]]:
    """Type and metadata of a key; None and nothing of one that the schema lacks."""
    return next(((one.kind, one.about) for one in schema.keys(Config) if one.name == name), (None, {}))


def _parse(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    problems: list[str] = []
    parsed = schema.build(cls, values, prefix, problems)
    if problems:
        raise InputError.of(problems)
    return parsed
