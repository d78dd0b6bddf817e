"""Frozen parameters: `train.freeze` lists regular expressions of their names."""

import re
from typing import Any

import jax

from flash_lm.errors import InputError
from flash_lm.layers.parameter import parameter_name


def frozen_mask(regexes: tuple[str, ...], parameters: Any) -> Any:
    """A tree of booleans: True for each frozen parameter.

    Raises:
        InputError: a regex matches no parameter, or all are frozen.
    """
    names = [parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)]
    if idle := [regex for regex in regexes if not any(re.search(regex, name) for name in names)]:
        raise InputError(f"train.freeze: {', '.join(idle)} matches no parameter: they are {', '.join(names)}")
    is_frozen = lambda path, _: any(re.search(regex, parameter_name(path)) for regex in regexes)
    frozen = jax.tree_util.tree_map_with_path(is_frozen, parameters)
    if all(jax.tree.leaves(frozen)):
        raise InputError(f"train.freeze={','.join(regexes)} freezes every parameter: leave at least one to train")
    return frozen


def stop_frozen_gradients(regexes: tuple[str, ...], parameters: Any) -> Any:
    """Applies stop_gradient to the frozen parameters, so that nothing is computed for their gradients."""
    frozen = frozen_mask(regexes, parameters)
    return jax.tree.map(lambda x, is_frozen: jax.lax.stop_gradient(x) if is_frozen else x, parameters, frozen)
