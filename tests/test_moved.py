"""Values of older versions: old runs load, keep what tells them from others, and an old flag names the new value."""

import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict

from flash_lm.cli.load import load_config
from flash_lm.config.experiment import parse, telling, upgrade
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.ops.normalizer import normalizer


def test_a_run_of_an_older_version_has_the_new_value_and_its_own_identity():
    config = get_config()
    config.model.normalizer = "length_everywhere"
    new = config.to_dict()
    old = new | {"model": new["model"] | {"normalizer": "paper"}}
    assert upgrade(old)["model"]["normalizer"] == "length_everywhere"
    flat = {name: flatten_dict(values, sep=".") for name, values in (("old", old), ("new", new))}
    assert telling(flat["new"]) == telling(flat["old"]) and telling(flat["new"])["model.normalizer"] == "paper"
    for other in ("length", "512", None):
        assert telling(flat["new"] | {"model.normalizer": other})["model.normalizer"] == other


def test_the_former_value_is_answered_with_the_new_one():
    with pytest.raises(InputError, match="^model.normalizer=paper is now length_everywhere: write that$"):
        parse(load_config("quickstart", ["--config.model.normalizer=paper"]))


def test_what_it_divides_in_a_causal_row():
    """The row's length, where FLASH's appendix, as the default does, divides by the tokens of the chunks before."""
    visible, length = jnp.array([[0, 16, 32]]), 48
    assert normalizer("length_everywhere", "scores").of_sum(visible, length).tolist() == [[48, 48, 48]]
    assert normalizer("48", "scores").of_sum(visible, length).tolist() == [[1, 16, 32]]
