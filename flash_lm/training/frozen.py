"""Parameters that training leaves as they are, by `train.freeze`."""

import re
from typing import Any

import jax

from flash_lm.errors import InputError
from flash_lm.layers.parameter import name_of


def frozen_parameters(regexes: tuple[str, ...], parameters: Any) -> Any:
    """Which parameters a config freezes: a tree of booleans like theirs.

    Raises:
        InputError: a regex matches no parameter, or all are frozen.
    """
    names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)]
    if idle := [regex for regex in regexes if not any(re.search(regex, name) for name in names)]:
        raise InputError(f"train.freeze: {', '.join(idle)} matches no parameter: they are {', '.join(names)}")
    is_frozen = lambda path, _: any(re.search(regex, name_of(path)) for regex in regexes)
    frozen = jax.tree_util.tree_map_with_path(is_frozen, parameters)
    if all(jax.tree.leaves(frozen)):
        raise InputError(f"train.freeze={','.join(regexes)} freezes every parameter: leave at least one to train")
    return frozen


def without_gradient(regexes: tuple[str, ...], parameters: Any) -> Any:
    """The same parameters; the gradient of those that are frozen is zero, and nothing is computed for it."""
    frozen = frozen_parameters(regexes, parameters)
    return jax.tree.map(lambda x, still: jax.lax.stop_gradient(x) if still else x, parameters, frozen)
