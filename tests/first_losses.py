"""The first losses of every family, of hybrids and of every task, to the last digit: a change of the code keeps them.

    python tests/first_losses.py --out=before.jsonl    # on one machine, before a change and after it
    python tests/first_losses.py --out=tests/golden/first_losses.jsonl --parameters=tests/golden/parameters.json

Digits beyond the fifth depend on the processor, so `test_first_losses.py` compares five, and a change that moves code
compares files written on the same machine.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":
    import conftest  # noqa: F401 (the same flags of the compiler as in the tests)

import jax
from flax import nnx
from small import small_config, write_corpus

from flash_lm.families.family import FAMILIES
from flash_lm.layers.parameter import name_of
from flash_lm.models.language_model import build_model
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.train_loop import train

_QUICK = {"train.steps": 3, "train.eval_every": 0, "train.checkpoint_every": 0, "train.warmup_steps": 1}
_EXAMPLES = {
    "data.pack": "examples",
    "data.corpus": "copy",
    "data.path": None,
    "model.max_length": 64,
    "data.tokens_per_batch": 512,
}
# What no family alone shows.
_MORE = {
    "hybrid": {"model.pattern": ("flash", "transformer_plus_plus"), "model.num_layers": 2},
    "unrolled": {"model.family": "flash", "model.scan_layers": False, "model.remat": "full", "model.num_layers": 2},
    "bfloat16": {"model.family": "flash_quad", "model.dtype": "bfloat16"},
    "documents": {"model.family": "flash", "data.pack": "documents"},
    "prefix_lm": {"task": "prefix_lm"},
    "seq2seq": {"task": "seq2seq", "model.encoder.family": "transformer", **_EXAMPLES},
    "copy": {"model.family": "linear_transformer", **_EXAMPLES},
    "carried": {"model.family": "retnet", "train.carry_state": True},
    "accumulated": {"train.accumulate": 2, "data.tokens_per_batch": 512},
    "muon": {"train.optimizer": "muon"},
    "schedule_free": {"train.optimizer": "schedule_free_adamw", "train.ema": 0.9},
    "adafactor": {"train.optimizer": "adafactor", "train.z_loss": 1e-3, "train.label_smoothing": 0.1},
}


def cells() -> dict[str, dict[str, Any]]:
    """By name: the keys in which a run differs from `small_config`."""
    forms = {"causal_lm": "causal", "masked_lm": "bidirectional"}
    by_family = {
        f"{family} {task}": {"model.family": family, "task": task}
        for family, row in FAMILIES.items()
        for task, form in forms.items()
        if form in row.serves
    }
    return by_family | _MORE


def first_losses(keys: Mapping[str, Any]) -> list[float]:
    """Losses of three steps, and of the validation split after them, in nats per token."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        config = small_config(write_corpus(folder / "text"), folder / "cache")
        config.update_from_flattened_dict(_QUICK | dict(keys))
        train(config, folder / "run")
        return [line["loss"] for line in read_jsonl(folder / "run" / "metrics.jsonl")]


def parameters(family: str) -> dict[str, list[int]]:
    """The shape of each parameter of a family's small model, by its path in checkpoints, exports and sharding rules."""
    config = small_config("unused", pathlib.Path("unused"), family).model
    config.update(vocab_size=300, num_layers=2, causal="causal" in FAMILIES[family].serves)
    model = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {name_of(path): list(x.shape) for path, x in leaves}


def main(argv: list[str]) -> None:
    """Writes a line for each run."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # as `usual_promotion` does for the tests of training
    jax.config.update("jax_numpy_rank_promotion", "allow")
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="file of first losses")
    parser.add_argument("--parameters", type=pathlib.Path, help="file of paths and shapes of parameters")
    arguments = parser.parse_args(argv)
    if arguments.out:
        with arguments.out.open("w", encoding="utf-8") as file:
            for name, keys in cells().items():
                print(json.dumps({"name": name, "losses": first_losses(keys)}), file=file, flush=True)
    if arguments.parameters:
        text = json.dumps({family: parameters(family) for family in FAMILIES}, indent=1)
        arguments.parameters.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
