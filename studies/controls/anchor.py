"""An absolute anchor: a published recipe for a small Transformer on Shakespeare, small enough for two cores.

nanoGPT (github.com/karpathy/nanoGPT, README, "I only have a macbook") trains 4 layers of width 128 for 2000 steps of 12
sequences of 64 characters on a CPU, and reports a validation loss of 1.88 nats per character.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from flash_lm.config.changes import apply_changes
from flash_lm.configs import base
from flash_lm.errors import InputError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import Line
from flash_lm.sweeps.grid import train_to_end
from flash_lm.sweeps.jobs import Job, ShouldStop, study_hash

PART = "anchor"
PUBLISHED_NATS, NEAR_NATS = 1.88, 0.05
FAMILIES = ("transformer", "transformer_plus_plus", "flash", "linear_transformer", "aft_simple")
_HELD_OUT = 0.1  # share of the text, at its end
_HOURS = 0.1


def write_text(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Splits the text as the recipe does: the first nine tenths for training, the rest for validation.

    The recipe has no test split. The test file repeats the validation split, so that training loses no text.

    Raises:
        InputError: no such file.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} must be the text of Shakespeare: {error.strerror}") from None
    cut = int(len(text) * (1 - _HELD_OUT))
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", text[:cut]), ("valid", text[cut:]), ("test", text[cut:])):
        (folder / f"{name}.txt").write_text(part, encoding="utf-8")


def get_config(text: pathlib.Path) -> ConfigDict:
    """Returns the recipe's config. Characters are bytes here, and models have no biases."""
    config: Any = base.get_config()
    config.model.update(family="transformer", num_layers=4, model_dim=128, num_heads=4, max_length=64)
    config.data.update(corpus="text", path=str(text), tokenizer="bytes", length=64, tokens_per_batch=12 * 64)
    config.train.update(
        steps=2000,
        learning_rate=1e-3,
        end_learning_rate=1e-4,
        warmup_steps=100,
        schedule="cosine",
        b2=0.99,
        weight_decay=0.1,
        clip=1.0,
        eval_every=500,
        checkpoint_every=0,
    )
    return config


def jobs(text: pathlib.Path, texts_hash: str, seeds: Sequence[int]) -> list[Job]:
    """Lists the jobs: each family by the same recipe.

    Args:
        text: folder, see `write_text`.
        texts_hash: a hash of the texts.
        seeds: seeds of each family.
    """
    return [_job(get_config(text), texts_hash, family, seed) for seed in seeds for family in FAMILIES]


def _job(recipe: Any, texts_hash: str, family: str, seed: int) -> Job:
    config: Any = apply_changes(recipe, {"model.family": family, "seed": seed})

    def make(folder: pathlib.Path, should_stop: ShouldStop) -> list[Line]:
        train_to_end(config, folder, should_stop)
        return evaluate(folder, "validation")

    about = {"part": PART, "run": family, "seed": seed}
    return Job(f"{PART}_{family}_seed_{seed}", about, study_hash(config, texts_hash), make, hours=_HOURS, config=config)
