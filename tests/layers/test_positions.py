"""Absolute positions on a mesh."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.lib.collectives import count_collectives
from flash_lm.layers.positions import ScaledSinusoid


def test_devices_exchange_one_number_for_the_gradient_of_one():
    """All sequences have the same positions, so a sum over sequences first would exchange L×D numbers."""
    batch, length, width = 8, 16, 32
    positions_1xL = jnp.arange(length)[None]
    encoding = ScaledSinusoid(types.SimpleNamespace(model_dim=width, param_dtype="float32"), rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(encoding)
    d_x = jnp.float32(np.random.default_rng(0).normal(size=(batch, length, width)))

    def gradient(parameters, d_x):
        add = lambda p: nnx.merge(graph, p)(jnp.zeros_like(d_x), positions_1xL)
        return jax.vjp(add, parameters)[1](d_x)[0]["scale"][...]

    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    program = jax.jit(gradient, in_shardings=(None, rows)).lower(parameters, d_x).compile()

    # sin and cos of position / 10000^(2i / D): the halves of the table.
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    np.testing.assert_allclose(
        program(parameters, jax.device_put(d_x, rows)), (np.asarray(d_x) * table).sum(), rtol=1e-5
    )
    assert sum(kind.bytes for kind in count_collectives(program.as_text()).values()) == 4
