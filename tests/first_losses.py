"""A guard for refactorings: first losses of each family, of hybrids and of each task, to the last digit;
paths and shapes of parameters; hashes of configs.

    python tests/first_losses.py --losses=before.jsonl    # on one machine, before a change and after it: equal files
    python tests/first_losses.py --families=NAME          # adds a new family to tests/golden/
    python tests/first_losses.py                          # writes tests/golden/ again, if a change of results is meant

Digits beyond the fifth depend on the processor, so `test_first_losses.py` compares five.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1]))
    import conftest  # noqa: F401 (the compiler flags of the tests)

import jax
from flax import nnx
from small import ROOT, config_names, small_config, study_configs, text_tasks, write_corpus

from flash_lm.cli.load import load_module, read_config, split_preset
from flash_lm.config.registry import FAMILIES
from flash_lm.layers.parameter import parameter_name
from flash_lm.models.language_model import build_model
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.run_folder import run_hash
from flash_lm.training.train_loop import train

GOLDEN = ROOT / "tests" / "golden"
LOSSES, PARAMETERS, HASHES = (GOLDEN / name for name in ("first_losses.jsonl", "parameters.json", "hashes.json"))
_QUICK = {"train.steps": 3, "train.eval_every": 0, "train.checkpoint_every": 0, "train.warmup_steps": 1}
_EXAMPLES = {
    "data.pack": "examples",
    "data.corpus": "copy",
    "data.path": None,
    "model.max_length": 64,
    "data.tokens_per_batch": 512,
}
# Runs that a single family does not cover.
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
    """The keys in which each run differs from `small_config`, by name of the run."""
    family_cells = {
        f"{family} {task}": {"model.family": family, "task": task} for family in FAMILIES for task in text_tasks(family)
    }
    return family_cells | _MORE


def first_losses(keys: Mapping[str, Any]) -> list[float]:
    """Losses of three steps, and then of the validation split, in nats per token."""
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
    return {parameter_name(path): list(x.shape) for path, x in leaves}


def hashes() -> dict[str, str]:
    """The run hash of each config file or preset; files that take a scale have several."""
    names = {
        f"{file}.py{f':{preset}' if preset else ''}": (file, preset)
        for file, preset in map(split_preset, config_names())
    }
    names |= {file: (file, None) for file in study_configs()}
    return {
        name: run_hash(read_config(f"{file}:{preset}" if preset else file).to_dict())
        for name, (file, preset) in names.items()
        if preset or not load_module(file).get_config.__code__.co_argcount
    }


def golden_losses() -> dict[str, list[float]]:
    """The losses in the golden file, by name of the run."""
    return {line["name"]: line["losses"] for line in read_jsonl(LOSSES)}


def main(argv: list[str]) -> None:
    """Writes the golden files, those of some families, or the losses alone into another file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--losses", type=pathlib.Path, help="write only first losses, to this file")
    parser.add_argument("--families", help="families to add, separated by commas; default: everything is written again")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # like `usual_promotion` in the tests of training
    jax.config.update("jax_numpy_rank_promotion", "allow")
    names = arguments.families.split(",") if arguments.families else []
    known = golden_losses() if names else {}
    out = arguments.losses or LOSSES
    with tempfile.NamedTemporaryFile("w", dir=out.parent, delete=False, encoding="utf-8") as file:
        for name, keys in cells().items():
            again = name not in known or keys.get("model.family") in names
            losses = first_losses(keys) if again else known[name]
            print(json.dumps({"name": name, "losses": losses}), file=file, flush=True)
    pathlib.Path(file.name).replace(out)
    if not arguments.losses:
        for path, values in ((PARAMETERS, {x: parameters(x) for x in FAMILIES}), (HASHES, hashes())):
            path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
