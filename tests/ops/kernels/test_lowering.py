"""The kernels lower to Triton and Mosaic; the test needs neither GPU nor TPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from flash_lm.ops.kernels.attention import attend
from flash_lm.ops.kernels.backends import BACKENDS
from flash_lm.ops.kernels.programs import Form, Seen
from flash_lm.ops.log_decay import Running

# Platform, name of the call in the program, and a device, which some versions of jax require.
TARGETS = {
    "triton": ("cuda", "__gpu$xla.gpu.triton", AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")),
    "mosaic": ("tpu", "tpu_custom_call", AbstractDevice("TPU v5 lite", 1, "tpu")),
}
# Batch, batch of the masks, chunks, chunk size, width of queries and of values, bias, sums over chunks, decays
SHAPES = {
    "mixed_chunks": (4, 4, 8, 256, 128, 1536, True, True, False),
    "all_pairs": (2, 2, 1, 2048, 128, 1536, True, False, False),
    "linear": (8, 1, 4, 256, 64, 65, False, True, False),
    "decays": (8, 1, 4, 256, 64, 128, False, False, True),
}


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow("another dtype: the same kernels"))]
)
@pytest.mark.parametrize(
    ("backend", "function", "shape"),
    [
        (name, function, shape)
        for name in TARGETS
        for function in sorted(BACKENDS[name].functions)
        for shape, (*_, decays) in SHAPES.items()
        if function == "identity" or not decays  # only identity has decays
    ],
)
def test_lowering(backend, function, shape, dtype):
    batch, rows, chunks, size, width, expanded, bias, across, decays = SHAPES[shape]
    shape_of = lambda *dimensions, dtype=dtype: jax.ShapeDtypeStruct(dimensions, jnp.dtype(dtype))
    queries, about = shape_of(batch, chunks, size, width), shape_of(rows, chunks, size, dtype="int32")
    arrays = {"q": queries, "k": queries, "v": shape_of(batch, chunks, size, expanded)}
    arrays |= {"bias": shape_of(2 * size - 1, dtype="float32")} if bias else {}
    arrays |= {"x": queries, "y": queries} if across else {}
    sums = shape_of(batch, chunks, size, dtype="float32")
    arrays |= {"decay": Running(sums, sums)} if decays else {}
    masks = Seen(about, about, shape_of(rows, chunks, size, dtype="float32"))

    def loss(arrays: dict, masks: Seen, goes_on: jax.Array) -> jax.Array:
        pair = (arrays["x"], arrays["y"], goes_on) if across else None
        form = Form(function, 0.1, backend)
        out = attend(form, arrays["q"], arrays["k"], arrays["v"], masks, arrays.get("bias"), pair, arrays.get("decay"))
        return out.astype(jnp.float32).sum()

    platform, call, device = TARGETS[backend]
    goes_on = shape_of(rows, chunks, dtype="int32")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device)):
        traced = jax.jit(jax.value_and_grad(loss)).trace(arrays, masks, goes_on)
        program = traced.lower(lowering_platforms=(platform,)).as_text()
    # Output, derivatives of values and of scores; with sums over chunks also those of both directions.
    assert program.count(f"custom_call @{call}") == (5 if across else 3)
