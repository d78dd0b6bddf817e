"""Parameters of a decode loop: equal to those of training to the bit, and in memory only once."""

import gc

import jax
import numpy as np
import pytest
from models.cases import case

from flash_lm.inference.decode_params import DecodeParams
from flash_lm.training.train_state import ModelFunction


def bytes_in_memory() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize(
    "family", ["flash", pytest.param("performer", marks=pytest.mark.slow("another family: the same code"))]
)
def test_split_parameters_replace_the_stack(family):
    model = ModelFunction(case(family, True).config, seed=0)
    before = bytes_in_memory()
    params = jax.jit(model.init)()
    expected, size = jax.tree.map(np.array, params), sum(x.nbytes for x in jax.tree.leaves(params))
    assert bytes_in_memory() - before == size
    decode_params = DecodeParams(model, params)
    assert decode_params.stacked is params
    del params
    constants = sum(x.nbytes for x in jax.tree.leaves(model.constants))
    assert len(decode_params.unstacked.blocks) == model.abstract.num_blocks
    assert bytes_in_memory() - before <= size + constants
    actual = decode_params.stacked
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    layers = sum(x.nbytes for x in jax.tree.leaves(expected["layers"]))
    assert bytes_in_memory() - before >= size + layers  # while the stack is kept
    del actual
    assert bytes_in_memory() - before <= size + constants
