"""The interpreted kernels against one float64 matrix over the sequence, on one device and on eight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from flash_lm.config.mesh import MeshConfig
from flash_lm.ops.kernels import attention, backends
from flash_lm.ops.kernels.chunks import Across, attend_in_chunks
from flash_lm.ops.kernels.programs import Form
from flash_lm.ops.log_decay import running
from flash_lm.ops.segments import find_segments
from flash_lm.ops.visibility import document_key_span
from flash_lm.training.sharding import make_mesh
from ops.kernels import reference

SCALE = 0.4
# Documents of any length, one that ends inside a chunk, padding inside and at the end, a repeated id.
DOCUMENTS = ((1, 23), (0, 2), (1, 9), (3, 1), (2, 30), (0, 5))


def draw(batch: int, heads: int, length: int, chunk: int, widths: tuple[int, int], bias: bool, across: bool) -> dict:
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal((batch, heads, length, *shape)).astype(np.float32)
    key_width, value_width = widths
    x = {"q": normal(key_width), "k": normal(key_width), "v": normal(value_width), "d_out": normal(value_width)}
    x["divisor"] = random.uniform(1, 3, (batch, length)).astype(np.float32)
    if bias:
        x["bias"] = random.standard_normal(2 * chunk - 1).astype(np.float32)
    if across:
        x |= {"x": normal(key_width), "y": normal(key_width)}
        x["weight"] = random.uniform(0.2, 1, (batch, length)).astype(np.float32)
    return x


def packed(batch: int, length: int) -> np.ndarray:
    row = np.concatenate([np.full(count, name) for name, count in DOCUMENTS])
    return np.stack([np.resize(np.roll(row, 3 * b), length) for b in range(batch)]).astype(np.int32)


def one_document(batch: int, length: int) -> np.ndarray:
    return np.ones((batch, length), np.int32)


@functools.partial(jax.jit, static_argnames=("chunk", "causal", "function", "dtype"))
def run(x: dict, ids: jax.Array, *, chunk: int, causal: bool, function: str, dtype: str = "float32"):
    """Returns the output and the derivatives."""

    def out(x: dict) -> jax.Array:
        q, k, v = (x[name].astype(dtype) for name in ("q", "k", "v"))
        segments = find_segments(ids)
        across = Across(x["x"].astype(dtype), x["y"].astype(dtype), x["weight"]) if "x" in x else None
        decay = running(x["decay"]) if "decay" in x else None
        return attend_in_chunks(
            Form(function, SCALE, "interpreted"),
            q,
            k,
            v,
            segments.runs_BxL,
            document_key_span(segments, causal=causal),
            chunk_size=chunk,
            divisor_BxL=x["divisor"],
            bias_W=x.get("bias"),
            across=across,
            decay=decay,
        )

    output, pull = jax.vjp(out, x)
    return output, pull(x["d_out"].astype(dtype))[0]


@pytest.fixture
def clear_traces():
    """Clears the traces of `run`, for tests that change sizes which are read during tracing."""
    run.clear_cache()
    yield
    run.clear_cache()


def assert_matches_reference(x: dict, ids: np.ndarray, rtol: float = 2e-6, **settings) -> None:
    out, d = run(x, ids, **settings)
    expected, expected_d = reference.attend(
        x, ids, scale=SCALE, **{name: value for name, value in settings.items() if name != "dtype"}
    )
    for name, actual, reference_array in [
        ("out", out, expected),
        *((name, d[name], expected_d[name]) for name in expected_d),
    ]:
        error = np.linalg.norm(np.asarray(actual, np.float64) - reference_array)
        assert error <= rtol * np.linalg.norm(reference_array), f"{name}: {error}"


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("ids", [one_document, packed])
@pytest.mark.parametrize("length", [1, 16, 53])
def test_all_pairs(length, ids, causal):
    """Tiles are 16 queries by 8 keys, so 53 tokens have several tiles, the last one partial."""
    x = draw(2, 1, length, length, (6, 21), bias=True, across=False)
    assert_matches_reference(x, ids(2, length), chunk=length, causal=causal, function="relu2")


@pytest.mark.parametrize("ids", [one_document, packed])
@pytest.mark.parametrize(("chunk", "length"), [(8, 30), (20, 70), (16, 64)])
def test_mixed_chunks(chunk, length, ids):
    x = draw(2, 2, length, chunk, (5, 19), bias=True, across=True)
    assert_matches_reference(x, ids(2, length), chunk=chunk, causal=True, function="relu2")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_chunks_alone(causal):
    x = draw(2, 1, 45, 20, (4, 16), bias=False, across=False)
    assert_matches_reference(x, packed(2, 45), chunk=20, causal=causal, function="laplace")


def test_linear():
    x = draw(1, 3, 50, 12, (8, 9), bias=False, across=True)
    assert_matches_reference(x, packed(1, 50), chunk=12, causal=True, function="identity")


def decaying(batch: int, heads: int, length: int, chunk: int) -> dict:
    """Draws inputs in which some tokens forget everything: earlier weights underflow in float32."""
    x = draw(batch, heads, length, chunk, (8, 21), bias=False, across=False)
    random = np.random.default_rng(1)
    log_decay = -random.exponential(0.5, (batch, heads, length))
    return x | {"decay": np.where(random.uniform(size=log_decay.shape) < 0.05, -80.0, log_decay).astype(np.float32)}


@pytest.mark.parametrize(("chunk", "length"), [(12, 50), (40, 53)])
def test_weights_that_decay(chunk, length):
    assert_matches_reference(
        decaying(2, 3, length, chunk), packed(2, length), chunk=chunk, causal=True, function="identity", rtol=1e-5
    )


@pytest.mark.slow("compiles another kernel of three bands; test_bands_of_queries is quick")
def test_bands_of_queries_whose_weights_decay(clear_traces, monkeypatch):
    monkeypatch.setattr(attention, "_BAND", 32)
    assert_matches_reference(
        decaying(1, 2, 90, 90), packed(1, 90), chunk=90, causal=True, function="identity", rtol=1e-5
    )


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_bands_of_queries(bias, clear_traces, monkeypatch):
    """Derivatives of scores are computed for one band of queries at a time; these sizes have three bands."""
    monkeypatch.setattr(attention, "_BAND", 32)
    x = draw(2, 1, 90, 90, (6, 24), bias=bias, across=False)
    assert_matches_reference(x, packed(2, 90), chunk=90, causal=True, function="relu2")


@pytest.mark.parametrize("across", [True, False], ids=["mixed", "all_pairs"])
def test_bfloat16(across):
    x = draw(2, 1, 70, 20 if across else 70, (16, 24), bias=True, across=across)
    settings = {"chunk": 20 if across else 70, "causal": True, "function": "relu2"}
    assert_matches_reference(x, packed(2, 70), rtol=2e-2, dtype="bfloat16", **settings)


@pytest.mark.slow("interprets kernels with large tiles on hundreds of tokens")
@pytest.mark.parametrize("name", ["triton", "mosaic"])
@pytest.mark.parametrize("across", [True, False], ids=["mixed", "all_pairs"])
def test_tile_sizes_of_gpu_and_tpu(name, across, clear_traces, monkeypatch):
    """Tile sizes of GPU and TPU, with values in several tiles."""
    machine, interpreted = backends.BACKENDS[name], backends.BACKENDS["interpreted"]
    real = dataclasses.replace(
        machine, scalars=interpreted.scalars, diagonals=interpreted.diagonals, options=interpreted.options
    )
    monkeypatch.setitem(backends.BACKENDS, "interpreted", real)
    chunk, length = (256, 600) if across else (300, 300)
    x = draw(1, 1, length, chunk, (64, 300), bias=True, across=across)
    assert_matches_reference(x, packed(1, length), chunk=chunk, causal=True, function="relu2")


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("across", [True, False], ids=["mixed", "all_pairs"])
def test_on_a_mesh(heads, across):
    """The batch is sharded over data and fsdp; heads over tensor, or the values if there is one head."""
    chunk = 8 if across else 26
    x = draw(4, heads, 26, chunk, (4, 16), bias=True, across=across)
    settings = {"chunk": chunk, "causal": True, "function": "relu2"}
    with jax.set_mesh(make_mesh(MeshConfig(shape=(2, 2, 2), rules=()))):
        assert "shard_map" in str(jax.make_jaxpr(functools.partial(run, **settings))(x, packed(4, 26)))
        assert_matches_reference(x, packed(4, 26), **settings)


def test_a_batch_that_does_not_divide_over_the_mesh():
    x = draw(3, 1, 20, 20, (4, 15), bias=True, across=False)
    with jax.set_mesh(make_mesh(MeshConfig(shape=(2, 2, 2), rules=()))):
        assert_matches_reference(x, packed(3, 20), chunk=20, causal=True, function="relu2")


def test_a_rolled_tile_equals_a_gathered_one():
    """On a TPU the bias of a tile is made by rotations."""
    values = np.random.default_rng(0).standard_normal((1, 1024)).astype(np.float32)

    def tile(make):
        def program(values_ref, out_ref):
            out_ref[...] = make(values_ref, jnp.int32(384), (128, 128))

        out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        return pl.pallas_call(program, out_shape=out, interpret=True)(values)

    rolled, gathered = (tile(backends.BACKENDS[name].diagonals) for name in ("mosaic", "triton"))
    np.testing.assert_array_equal(rolled, gathered)
    assert gathered[3, 5] == values[0, 384 + 5 - 3 + 127]
