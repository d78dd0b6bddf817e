"""The keys that all rows share, in four groups; sections are declared beside the parts that read them."""

import dataclasses
import re

from flash_lm.schema import Group, above, at_least, fraction, key, one_of
from flash_lm.tables import CORPORA, FAMILIES, HEADS, OPTIMIZERS

MESH_AXES = ("data", "fsdp", "tensor")
DTYPES = ("float32", "bfloat16")
_MOST_TAPS = 64  # of a short convolution, each of which is a copy of the input
DECAYS = ("linear", "cosine")  # schedules with a final learning rate


def _families(names: tuple) -> str | None:
    good = all(isinstance(name, str) and name in FAMILIES for name in names)
    return None if good else f"a tuple of rows of the table of families: {', '.join(FAMILIES)}"


def _taps(x: int) -> str | None:
    return None if x == 0 or 2 <= x <= _MOST_TAPS else f"0 (none), or 2 to {_MOST_TAPS} taps"


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


def _regexes(names: tuple) -> str | None:
    for name in names:
        try:
            re.compile(name)
        except (TypeError, re.error):
            return f"regexes of parameters, such as ('embedding', 'layers/.*/kernel'), and {name!r} is not one"
    return None


def _boundaries(steps: tuple) -> str | None:
    good = all(type(x) is int and x > 0 for x in steps) and list(steps) == sorted(set(steps))
    return None if good else "a tuple of positive, increasing steps, such as (3000,)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Group, name="model"):
    """The keys that every family shares. models/families.py fills in the open ones."""

    family: str = key("flash", "a row of the table of families", FAMILIES.rule)
    pattern: tuple = key(
        (),
        "families of the layers, repeated in turn, such as flash,flash,transformer_plus_plus; everything else is as "
        "in model.family; empty: model.family alone",
        _families,
        before=(),
    )
    num_layers: int = key(
        4, "one layer = attention + feed-forward, or two GAUs; a multiple of the pattern's", at_least(1)
    )
    model_dim: int = key(128, "D", at_least(1))
    num_heads: int = key(4, "H; for GAUs see model.gau.heads", at_least(1))
    num_kv_heads: int = key(
        None,
        "heads of keys and values, each shared by H / num_kv_heads heads of queries (softmax over all pairs); open: H",
        at_least(1),
        before=None,
    )
    mlp_dim: int = key(None, "open: 4 D for an MLP, 8 D / 3 rounded up to a multiple of 8 for a GLU", at_least(1))
    max_length: int = key(512, "tokens; bounds learned positions and the decode cache", at_least(1))
    vocab_size: int = key(None, "open: from the tokenizer", at_least(2))
    causal: bool = key(None, "open: from the task")
    tie_embeddings: bool = key(True, "one table for input and output embeddings")
    head: str = key(
        None,
        "a row of the table of heads: softmax, logistics (a mixture over the values of a byte, for images), or classes "
        "(a label for a row); open: from the task",
        HEADS.rule,
        before="softmax",
    )
    init: str = key(
        "normal", "normal (standard deviation 0.02), or lecun (1 / sqrt(fan in))", one_of("normal", "lecun")
    )
    norm: str = key(None, "open: from the family", one_of("layer", "rms", "scale"))
    norm_epsilon: float = key(1e-6, "added under the square root of a norm", above(0), before=1e-6)
    absolute_positions: str = key(
        None, "open: from the family", one_of("none", "learned", "sinusoid", "scaled_sinusoid")
    )
    rotary: bool = key(None, "rotary position embedding of queries and keys; open: from the family")
    rotary_base: float = key(
        10_000.0, "base of the rotary angles, position · base^(-2i / width)", above(1), before=10_000.0
    )
    short_convolution: int = key(
        None,
        "taps of a filter for each channel of the queries, keys and values (of a GAU: V and Z; of an AFT: keys and "
        "values), causal or centred as the model is; 0: none; open: 0, but 3 in log_sparse",
        _taps,
        before=0,
    )
    normalizer: str = key(
        None,
        "N of attention without softmax: count, length, paper or an integer; open: count if causal, else data.length",
        _normalizer,
    )
    kernels: str = key(
        "auto",
        "auto (Pallas kernels on GPU and TPU, where the shapes suit them), xla or pallas",
        one_of("auto", "xla", "pallas"),
        before="auto",
    )
    dropout: float = key(0.0, "dropout rate of the embedding and of each sublayer's output", fraction)
    dtype: str = key(
        "float32",
        "dtype of activations; docs/numerics.md says what stays float32, and what accelerators round",
        one_of(*DTYPES),
    )
    state_dtype: str = key(
        None,
        "dtype of the keys and values that decoding keeps: caches, and chunks of FLASH, MC-TFM and Mega; and of the "
        "last inputs of convolutions; sums and AFT's state stay float32; open: model.dtype",
        one_of(*DTYPES),
        before=None,
    )
    param_dtype: str = key("float32", "dtype of parameters", one_of(*DTYPES))
    scan_layers: bool = key(True, "one compiled layer, scanned; false unrolls: slower to compile, often faster on CPU")
    remat: str = key(
        "none",
        "none, products (keep matrix products) or full (keep only each layer's input)",
        one_of("none", "products", "full"),
    )

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the layers, in turn."""
        return self.pattern or (self.family,)

    @property
    def label(self) -> str:
        """The model's name in tables and plots: the family, or the families of the pattern."""
        return "/".join(self.families)

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        count = len(self.families)
        if self.num_layers % count == 0:
            return []
        return [f"model.num_layers={self.num_layers} must be a multiple of the {count} layers of model.pattern"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Group, name="data"):
    """`config.data`."""

    corpus: str = key("stdlib", "a row of the table of corpora", CORPORA.rule)
    path: str = key(
        None,
        "text: a file, a glob or a folder of .txt files; hf: a folder, file or glob of parquet, arrow or json; "
        "couplets and images: a folder",
    )
    name: str = key(None, "hf and images: a data set on the hub, instead of a path", before=None)
    config: str = key(None, "hf: one of the configs of that data set; open: its only one", before=None)
    split: str = key(
        "train",
        "hf: the split to train on; validation and test are the data set's own, or else held out of this one",
        before="train",
    )
    text_column: str = key("text", "hf: the column that has the text", before="text")
    label_column: str = key(
        None, "hf: the column that has a label for each text, for task=classify; open: none", before=None
    )
    streaming: bool = key(False, "hf: read while training, without saving the training split on disk", before=False)
    shuffle_buffer: int = key(
        None,
        "of a stream: millions of characters whose documents are shuffled together; 0: no shuffling; open: 64",
        at_least(0),
        before=0,
    )
    tokenizer: str = key(
        "sentencepiece",
        "bytes, sentencepiece, or hf (Hugging Face's `tokenizers`: the one of train.init_from or tokenizer_path)",
        one_of("bytes", "sentencepiece", "hf"),
    )
    tokenizer_path: str = key(
        None, "a SentencePiece model, or a folder with a tokenizer.json; open: trained on the corpus"
    )
    # SentencePiece needs its 256 bytes and the special tokens.
    vocab_size: int = key(8192, "size of the SentencePiece vocabulary to train", at_least(300))
    length: int = key(None, "L, tokens per row; open: model.max_length", at_least(1))
    tokens_per_batch: int = key(2048, "B x L", at_least(1))
    pack: str = key(
        "stream",
        "stream (documents joined and cut), documents (isolated segments), examples (one per row)",
        one_of("stream", "documents", "examples"),
    )
    cache_dir: str = key("~/.cache/flash_lm", "tokenised corpora")

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents that do not see each other."""
        return self.pack == "documents"

    @property
    def batch_size(self) -> int:
        """Rows per batch, over all devices."""
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
            found.append(f"data.corpus={self.corpus} needs data.pack={needed}, not {self.pack}")
        return found + kind.problems(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Group, name="train"):
    """`config.train`."""

    steps: int = key(300, "updates", at_least(1))
    optimizer: str = key("adamw", "a row of the table of optimizers", OPTIMIZERS.rule)
    learning_rate: float = key(3e-3, "peak", above(0))
    end_learning_rate: float = key(0.0, "final rate of linear and cosine, after the last step", at_least(0))
    warmup_steps: int = key(None, "open: a tenth of the steps", at_least(0))
    schedule: str = key(
        "linear",
        "linear, cosine, step or constant, after the warm-up",
        one_of("linear", "cosine", "step", "constant"),
    )
    decay_steps: int = key(
        None,
        "linear and cosine: the number of last steps that decay, after a constant rate; open: all of them",
        at_least(1),
        before=None,
    )
    boundaries: tuple = key((), "step: the steps at which the rate drops to a tenth", _boundaries, before=())
    b1: float = key(0.9, "of adamw, radam, lion, lamb", fraction)
    b2: float = key(0.999, "of adamw, radam, lion, lamb", fraction)
    # Gradients of AFT's position bias start at 1e-7; with a larger eps it would not learn.
    eps: float = key(1e-8, "of adamw, radam, lamb", above(0))
    weight_decay: float = key(0.01, "for matrices; not for gains, offsets and biases", at_least(0))
    clip: float = key(1.0, "largest norm of the gradient; 0 = off", at_least(0))
    clip_mode: str = key(
        "global",
        "global (the norm over all parameters) or parameter (each parameter of each layer by itself)",
        one_of("global", "parameter"),
        before="global",
    )
    z_loss: float = key(0.0, "weight of log² Z of the softmax head in the loss; 0 = off", at_least(0), before=0.0)
    accumulate: int = key(1, "microbatches per step", at_least(1))
    carry_state: bool = key(
        False,
        "whole documents in order: a row continues the row at its place in the batch before, with that row's decode "
        "state and without a gradient into it; data.pack is then for scores of rows by themselves",
        before=False,
    )
    on_nonfinite: str = key(
        "stop",
        "stop or skip: what happens at a step whose loss or gradient is not finite",
        one_of("stop", "skip"),
        before="stop",
    )
    loss_chunk: int = key(1024, "tokens whose logits exist at the same time on a device", at_least(1))
    log_every: int = key(10, "steps", at_least(1))
    eval_every: int = key(100, "steps; 0 = only at the end", at_least(0))
    eval_steps: int = key(0, "batches per evaluation during training; 0 = the whole split", at_least(0))
    stop_accuracy: float = key(
        None,
        "ends training when the accuracy on the validation split is this or more; open: train.steps alone ends it",
        lambda x: None if 0 < x <= 1 else "more than 0 and at most 1",
        before=None,
    )
    checkpoint_every: int = key(100, "steps; 0 = only at the end", at_least(0))
    keep: int = key(2, "number of newest checkpoints to keep, besides the best", at_least(1))
    best_metric: str = key(
        "loss", "loss or bits_per_byte of the validation split; the lowest is best", one_of("loss", "bits_per_byte")
    )
    branch_from: str = key(
        None, "RUN[@best|@STEP]: continue its state, step and data order in a new workdir", before=None
    )

    init_from: str = key(
        None,
        "RUN[@best|@STEP] or the folder of an exported model: start with its parameters and its tokenizer",
        before=None,
    )
    init_positions: str = key(
        "refuse",
        "refuse or interpolate: what to do if train.init_from has positions for another model.max_length",
        one_of("refuse", "interpolate"),
        before="refuse",
    )
    freeze: tuple = key(
        (), "regexes of parameters, as in mesh.rules, that training leaves unchanged", _regexes, before=()
    )

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        found = []
        if self.init_from and self.branch_from:
            found.append("train.init_from loads parameters, train.branch_from the whole state: give one of them")
        if self.warmup_steps >= self.steps and self.schedule != "constant":
            found.append(
                f"train.warmup_steps={self.warmup_steps} must be less than train.steps={self.steps}: lower it, or "
                f"leave it open with --config.train.warmup_steps="
            )
        if self.decay_steps and self.schedule not in DECAYS:
            found.append(f"train.decay_steps needs train.schedule={' or '.join(DECAYS)}, not {self.schedule}")
        elif self.decay_steps and self.decay_steps > self.steps - self.warmup_steps:
            found.append(
                f"train.decay_steps={self.decay_steps} must be at most the {self.steps - self.warmup_steps} steps "
                f"after the warm-up"
            )
        if bool(self.boundaries) != (self.schedule == "step"):
            found.append(
                f"train.schedule=step and train.boundaries go together, but they are {self.schedule} and "
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
            ("shared/kernel", ("fsdp", None)),  # one head: splitting it would communicate scores instead of values
            ("(query|key|value|distance|gate|up|receptance|update|candidate)/kernel", ("fsdp", "tensor")),
            ("(output|down)/kernel", ("tensor", "fsdp")),
            ("skip_map/kernel", ("tensor", None)),  # from what the rule for values cuts, to a number a head
            ("(query|key)_position", (None, "fsdp")),
        ),
        "the first rule whose regex is found in the parameter's path; the spec names the mesh axis of each dimension, "
        "except the stacked layers' dimension; a matrix without a rule is sharded over fsdp, along its largest "
        "dimension",
        _sharding_rules,
    )
