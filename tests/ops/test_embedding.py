"""The embedding lookup against NumPy, and what devices exchange for its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.lib.collectives import count_collectives
from flash_lm.ops.embedding import embed_tokens

V, D = 48, 16


@pytest.fixture(scope="module")
def case():
    """Table, tokens, and a cotangent of the vectors."""
    rng = np.random.default_rng(0)
    table, d_x = rng.normal(size=(V, D)), rng.normal(size=(8, 5, D))
    return jnp.float32(table), jnp.int32(rng.integers(0, V, (8, 5))), jnp.float32(d_x)


def summed(tokens, d_x) -> np.ndarray:
    """The gradient of the table in float64."""
    gradient = np.zeros((V, D))
    np.add.at(gradient, np.asarray(tokens), np.asarray(d_x, np.float64))
    return gradient


def test_rows_of_the_table_in_the_dtype(case):
    table, tokens, _ = case
    np.testing.assert_array_equal(embed_tokens(table, tokens, "float32"), np.asarray(table)[np.asarray(tokens)])
    rounded = embed_tokens(table, tokens, "bfloat16")
    np.testing.assert_array_equal(rounded, np.asarray(table.astype("bfloat16"))[np.asarray(tokens)])
    assert np.isnan(embed_tokens(table, jnp.full((1, 1), V), "float32")).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_the_gradient_is_summed_in_float32_and_scattered(case, shape):
    """On a mesh a device gets its columns of the sums over fsdp, and only these are summed over data."""
    table, tokens, d_x = case
    mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    rows = ("data", "fsdp")
    inputs = put(table, "tensor", "fsdp"), put(tokens, rows), put(d_x.astype("bfloat16"), rows)
    pull = lambda table, tokens, d_x: jax.vjp(lambda t: embed_tokens(t, tokens, "bfloat16"), table)[1](d_x)[0]
    with jax.set_mesh(mesh):
        program = jax.jit(pull, out_shardings=inputs[0].sharding).lower(*inputs).compile()
        gradient = program(*inputs)
    np.testing.assert_allclose(gradient, summed(tokens, inputs[2]), rtol=1e-6, atol=1e-6)
    # Bytes: the table's, of which a device has those of its words.
    data, fsdp, tensor = shape
    table_bytes, traffic = 4 * V * D // tensor, count_collectives(program.as_text())
    scattered = traffic["reduce-scatter"].bytes if fsdp > 1 else 0
    reduced = traffic["all-reduce"].bytes if data > 1 else 0
    assert (scattered, reduced) == ((fsdp > 1) * table_bytes, (data > 1) * table_bytes // fsdp)
    assert "all-to-all" not in traffic
