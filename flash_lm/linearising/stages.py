"""The training stages of a linearisation, in order, with what each of them trains."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# What stays fixed while attention alone is trained.
_ATTENTION_ALONE = ("embedding", "norm", "(gate|up|down)/(kernel|bias)$")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A training stage.

    Attributes:
        about: what it does, for --help.
        tokens: to train on.
        rate: peak of the learning rate.
        keys: of `config`, besides.
    """

    about: str
    tokens: int
    rate: float
    keys: Mapping[str, Any]


STAGES: Mapping[str, Stage] = {
    "transfer": Stage(
        "new parameters learn the outputs of the teacher's attention",
        500_000,
        1e-2,
        {"train.teacher_loss": "layers", "train.weight_decay": 0.0},
    ),
    "distil": Stage(
        "attention learns the teacher's distribution over next tokens",
        1_000_000,
        3e-4,
        {"train.teacher_loss": "distribution", "train.freeze": _ATTENTION_ALONE},
    ),
    "plain": Stage("all parameters learn the text, without the teacher", 0, 1e-5, {"train.teacher": None}),
}
