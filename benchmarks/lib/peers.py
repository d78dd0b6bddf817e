"""Code for programs that run public implementations: the peers' Python, and the sizes of the same model."""

import argparse
import pathlib

from flash_lm.config.experiment import Config
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import Line

MOST_UNEQUAL = 0.03  # relative difference in the number of parameters
_PYTHON = pathlib.Path(".venv-peers/bin/python")
_KEYS = ("vocab_size", "model_dim", "num_layers", "num_heads", "mlp_dim", "dtype")
_SECTION_KEYS = ("chunks.size", "gau.shared_dim", "gau.expanded_dim")


def add_python(parser: argparse.ArgumentParser) -> None:
    """Adds --python; `check_python` checks that it exists."""
    parser.add_argument("--python", type=pathlib.Path, default=_PYTHON, help="the peers' Python interpreter")


def check_python(python: pathlib.Path) -> None:
    """Checks the peers' interpreter.

    Raises:
        InputError: no such interpreter.
    """
    if not python.exists():
        raise InputError(f"no interpreter {python} for the peers: run `make peers`, or set --python")


def peer_shape(config: Config) -> Line:
    """Returns the sizes that a peer needs to build the same model."""
    model = {key.split(".")[-1]: config.model.get(key) for key in (*_KEYS, *_SECTION_KEYS)}
    return model | {"length": config.data.length, "rows": config.data.batch_size}
