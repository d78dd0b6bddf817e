"""The registry of tasks: how packed rows get their targets, which attention a model uses, and how it is scored."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flash_lm.config.data import DataConfig
from flash_lm.config.experiment import Config
from flash_lm.config.keys import key, section
from flash_lm.config.registry import TASKS
from flash_lm.data.answers import ANSWERS, CONTINUE, FILL_IN, LABEL, Answers
from flash_lm.data.conditioning import BEFORE, CONDITIONINGS, PREFIX, SOURCE, Conditioning
from flash_lm.data.masking import Masking
from flash_lm.data.packing import Row
from flash_lm.data.prefixes import example_prefix, random_prefixes
from flash_lm.errors import InputError


def _of_tokenizer(tokenizer: Any) -> int:
    return tokenizer.vocab_size


def _loss(head: Any, inputs: Any, **factors: float) -> Any:
    return head.loss(inputs, **factors)


def _scores(head: Any, inputs: Any) -> Any:
    return head.scores(inputs)


@dataclasses.dataclass(frozen=True)
class Task:
    """A registry entry: a training objective.

    Attributes:
        causal: whether a token sees only tokens up to itself, where `model.causal` is open.
        answers: what generate and serve do with its models: continue a prompt, or fill in masks; None: nothing. One of
            `data.answers`, or its name: continue or fill_in.
        head: the row of the table of heads that is used when `model.head` is open.
        rows: from the tokenizer, `config.data` and each section, makes a function of a packed row and numbers that seed
            it; the function returns a row with the task's inputs, targets and weights (`loss_mask_BxL`). None: rows
            stay as they are, and each token is predicted from those before it.
        added: from `config.data`, the shapes of the int32 arrays that a row has besides those of text, by name.
        vocabulary: number of words that a model needs, from the tokenizer.
        of_examples: whether its rows may be examples; those of a corpus with labels always may, for pretraining.
        labels: whether a row's only target is its label, a number below that of the corpus's labels, so that `answers`
            is to name it. Such a model may be causal or not, as `model.causal` says.
        conditioning: how a model reads the prompt, see `data.conditioning`; or its name: "before" (causally), "prefix"
            (a bidirectional prefix, `prefix_BxL`) or "source" (the source of its encoder, `source_BxM`).
        loss: from a head, its `HeadInputs`, and the factors of penalties that are not zero, by name: the sum over the
            targets, and the penalties in that sum, by name.
        scores: of each target, from a head and its `HeadInputs`: nll and perhaps hits, see `models.output_heads.Head`.
        share: share of the tokens that are targets, from each section; for benchmarks, which have no tokenizer.
        sections: its sections of keys in `config.data`.
        of_model: names of sections of `config.model` that only its models read.
    """

    causal: bool
    answers: Answers
    head: str = "softmax"
    rows: Callable[..., Any] | None = None
    added: Callable[[DataConfig], dict[str, tuple[int, ...]]] = lambda config: {}
    vocabulary: Callable[[Any], int] = _of_tokenizer
    of_examples: bool = True
    labels: bool = False
    conditioning: Conditioning = BEFORE
    loss: Callable[..., Any] = _loss
    scores: Callable[..., Any] = _scores
    share: Callable[..., float] = lambda *sections: 1.0
    sections: tuple[type, ...] = ()
    of_model: tuple[str, ...] = ()

    def __post_init__(self):
        """Replaces names by the objects that they name."""
        answers = LABEL if self.labels else _resolve_option("answers", self.answers, ANSWERS, Answers)
        object.__setattr__(self, "answers", answers)
        object.__setattr__(
            self, "conditioning", _resolve_option("conditioning", self.conditioning, CONDITIONINGS, Conditioning)
        )

    @property
    def of_each_token(self) -> bool:
        """Whether each token of a text is predicted, from those before it."""
        return not (self.rows or self.labels)

    def packer(self, pack: str) -> Any:
        """The packer that makes the rows of a split, for `data.pack`."""
        return self.answers.packer(self.conditioning, pack)

    def problems(self, config: Config) -> list[str]:
        """Sentences on keys that do not go together with the way that the model reads and answers."""
        return self.answers.problems(config) + self.conditioning.problems(config)


def _resolve_option(what: str, value: Any, names: Mapping[Any, Any], kind: type) -> Any:
    option = value if isinstance(value, kind) else names.get(value)
    if option is None:
        raise InputError(f"{what}={value!r} of a task must be one of {', '.join(map(str, names))}, or an object")
    return option


def register_task(name: str, row: Task) -> None:
    """Adds a row to the table of tasks, for `task`."""
    TASKS.register(name, row)


@section("data.masking")
class MaskingOptions:
    """Options of masked language modelling."""

    rate: float = key(
        0.15,
        "share of the tokens that are predicted",
        lambda x: None if 0 < x < 1 else "more than 0 and less than 1",
    )


def _masked_rows(tokenizer: Any, config: DataConfig, options: MaskingOptions) -> Masking:
    return Masking(tokenizer, options.rate)


def _prefixed_rows(tokenizer: Any, config: DataConfig) -> Callable[..., Row]:
    return example_prefix if config.pack == "examples" else random_prefixes


NEXT_TOKEN = Task(causal=True, answers=CONTINUE)
MASKED = Task(
    causal=False,
    answers=FILL_IN,
    rows=_masked_rows,
    vocabulary=lambda tokenizer: max(tokenizer.vocab_size, tokenizer.mask + 1),
    of_examples=False,
    share=lambda options: options.rate,
    sections=(MaskingOptions,),
)
register_task("causal_lm", NEXT_TOKEN)
register_task("masked_lm", MASKED)
register_task(
    "prefix_lm",
    Task(
        causal=True,
        answers=CONTINUE,
        rows=_prefixed_rows,
        added=lambda config: {"prefix_BxL": (config.length,)},
        conditioning=PREFIX,
    ),
)
register_task(
    "seq2seq",
    Task(
        causal=True,
        answers=CONTINUE,
        added=lambda config: dict.fromkeys(("source_BxM", "source_segment_ids_BxM"), (config.length,)),
        conditioning=SOURCE,
        of_model=("model.encoder", "model.cross"),
    ),
)
register_task("classify", Task(causal=False, answers=LABEL, head="classes", labels=True))
