"""Softmax attention by libraries: against float64 loops where they run here, else by what their programs contain."""

import contextlib
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from flash_lm.config.mesh import MeshConfig
from flash_lm.ops import fused_attention
from flash_lm.ops.chunk_rows import chunks_to_rows, mask_of_chunks, rows_to_sequences
from flash_lm.ops.fused_attention import LIBRARIES, problem
from flash_lm.ops.quadratic_attention import quadratic_attention
from flash_lm.ops.segments import find_segments
from flash_lm.ops.visibility import KeySpan, MaskStructure, document_key_span
from flash_lm.training.sharding import make_mesh

BATCH, HEADS, LENGTH, WIDTH, SCALE, WINDOW = 2, 4, 150, 8, 0.4, 20  # a length that fills no tile
PACKED = np.array([[1] * 60 + [2] * 70 + [0] * 20, [3] * 150])
PADDED = np.array([[1] * 110 + [0] * 40, [1] * 150])


def mask_of(ids: np.ndarray, *, packed: bool, causal: bool, window: int | None) -> tuple[KeySpan, MaskStructure]:
    segments = find_segments(jnp.asarray(ids))
    runs = segments.runs_BxL
    lengths = None if packed or causal else (runs > 0).sum(axis=1, dtype=jnp.int32)
    structure = MaskStructure(causal=causal, window=window, lengths=lengths, documents=(runs, runs) if packed else None)
    return document_key_span(segments, causal=causal, window=window), structure


def sees(ids: np.ndarray, *, causal: bool, window: int | None) -> np.ndarray:
    """Which keys each query sees, B×L×L, from the segment ids alone."""
    distance = np.arange(ids.shape[1])[None, :, None] - np.arange(ids.shape[1])[None, None]
    seen = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] > 0)
    seen &= (distance >= 0) | (not causal)
    return seen & (abs(distance) < (window or ids.shape[1]))


def softmax_attention(q, k, v, seen_BxLxM: np.ndarray) -> np.ndarray:
    """Loops in float64; zeros for queries that see nothing."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros((*q.shape[:3], v.shape[-1])), q.shape[1] // k.shape[1]
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        keys = np.flatnonzero(seen_BxLxM[b, i])
        if keys.size:
            scores = SCALE * k[b, h // group, keys] @ q[b, h, i]
            weights = np.exp(scores - scores.max())
            out[b, h, i] = weights / weights.sum() @ v[b, h // group, keys]
    return out


def arrays(keys: int = LENGTH, key_heads: int = HEADS) -> list[jax.Array]:
    random, shapes = np.random.default_rng(0), [(HEADS, LENGTH), (key_heads, keys), (key_heads, keys)]
    return [jnp.asarray(random.standard_normal((BATCH, *shape, WIDTH)), jnp.float32) for shape in shapes]


@pytest.fixture
def run_here(monkeypatch):
    """Lets splash attention be interpreted, and XLA compute what cuDNN is asked for: the same interface of jax.nn."""
    by_xla = functools.partial(fused_attention._as_jax_nn, jax.nn.dot_product_attention)
    interpreted = functools.partial(fused_attention._splash, interpret=True)
    refuses = lambda q, structure: None if structure else fused_attention._refused_by_splash(q, None)  # short ones run
    monkeypatch.setitem(
        LIBRARIES, "cudnn", LIBRARIES["cudnn"]._replace(platform=None, attend=by_xla, refuses=lambda q, structure: None)
    )
    monkeypatch.setitem(
        LIBRARIES, "splash", LIBRARIES["splash"]._replace(platform=None, attend=interpreted, refuses=refuses)
    )


@functools.cache
def attend(name: str):
    """Output, and the derivative of a sum of it, whose weights tell the elements apart."""

    def total(q, k, v, key_span, structure, real_BxL):
        out = fused_attention.fused_attention(name, q, k, v, key_span, structure, scale=SCALE)
        out = jnp.where(real_BxL[:, None, :, None], out, 0)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))


def plain(q, k, v, seen_BxLxM, real_BxL):
    """The same by jnp with all pairs, for derivatives."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.where(seen_BxLxM[:, None], SCALE * jnp.einsum("bhik,bhjk->bhij", q, k), -1e30)
    out = jnp.where(real_BxL[:, None, :, None], jax.nn.softmax(scores, axis=-1) @ v, 0)
    return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()


plain_derivative = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))

another = pytest.mark.slow("another combination of the same options")
FORMS = {
    "causal": (PADDED, {"packed": False, "causal": True, "window": None}, HEADS),
    "causal_window": (PADDED, {"packed": False, "causal": True, "window": WINDOW}, HEADS),
    "both_ways": (PADDED, {"packed": False, "causal": False, "window": None}, HEADS),
    "packed_window_shared_keys": (PACKED, {"packed": True, "causal": True, "window": WINDOW}, 2),
    "packed_both_ways": (PACKED, {"packed": True, "causal": False, "window": None}, HEADS),
    "window_both_ways": (PADDED, {"packed": False, "causal": False, "window": WINDOW}, HEADS),
    "packed": (PACKED, {"packed": True, "causal": True, "window": None}, HEADS),
    "shared_keys": (PADDED, {"packed": False, "causal": True, "window": None}, 1),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if i < 5 else another)
        for name in ("splash", "cudnn")
        for i, form in enumerate(FORMS)
    ],
)
def test_output_and_derivatives(name, form, run_here):
    ids, about, key_heads = FORMS[form]
    q, k, v = arrays(key_heads=key_heads)
    key_span, structure = mask_of(ids, **about)
    seen, real = sees(ids, causal=about["causal"], window=about["window"]), ids > 0
    assert problem(name, q, k, v, key_span, structure) is None
    (_, out), derivatives = attend(name)(q, k, v, key_span, structure, real)
    expected = np.where(real[:, None, :, None], softmax_attention(q, k, v, seen), 0)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)
    for found, wanted in zip(derivatives, plain_derivative(q, k, v, seen, real), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("width", [64, 48])
def test_half_precision_rounds_as_blocks_do(width, run_here):
    """Splash attention scales the queries beforehand, which rounds them once more unless √K is a power of two."""
    random, scale = np.random.default_rng(0), width**-0.5
    exact = [jnp.asarray(random.standard_normal((1, 1, 256, width)), jnp.bfloat16) for _ in range(3)]
    key_span, structure = mask_of(np.ones((1, 256), np.int32), packed=False, causal=True, window=None)
    scores = np.where(
        np.tri(256), scale * np.einsum("ik,jk->ij", *(np.asarray(x[0, 0], np.float64) for x in exact[:2])), -np.inf
    )
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True) @ np.asarray(exact[2][0, 0], np.float64)

    def error(out: jax.Array) -> float:
        return np.linalg.norm(np.asarray(out[0, 0], np.float64) - expected) / np.linalg.norm(expected)

    ones = jnp.ones((1, 256), jnp.float32)
    blocked = quadratic_attention(*exact, key_span, function="softmax", scale=scale, divisor_BxL=ones, blocked=True)
    splash = fused_attention.fused_attention("splash", *exact, key_span, structure, scale=scale)
    assert error(splash) < (2 if width == 48 else 1.2) * error(blocked)


@pytest.mark.parametrize("name", ["splash", "cudnn"])
def test_cross_attention(name, run_here):
    """Keys of another sequence: of the same document, or the real ones; a query without keys gets zeros."""
    q, k, v = arrays(keys=70)
    documents = np.array([[1] * 40 + [2] * 30, [3] * 50 + [0] * 20])
    seen = (PACKED[:, :, None] == documents[:, None]) & (PACKED[:, :, None] > 0)
    first, stop = seen.argmax(axis=2).astype(np.int32), (seen.argmax(axis=2) + seen.sum(axis=2)).astype(np.int32)
    key_span = KeySpan(jnp.zeros_like(first), jnp.asarray(first), jnp.asarray(stop))
    packed = MaskStructure(causal=False, documents=(jnp.asarray(PACKED), jnp.asarray(documents)))
    run = functools.partial(jax.jit(fused_attention.fused_attention, static_argnums=0), name, q, k, v)
    np.testing.assert_allclose(run(key_span, packed, scale=SCALE), softmax_attention(q, k, v, seen), atol=3e-6)
    # Real keys, and a sequence that has none.
    lengths = np.array([33, 0], np.int32)
    seen = np.broadcast_to(np.arange(70) < lengths[:, None, None], seen.shape)
    stop = np.broadcast_to(lengths[:, None], (BATCH, LENGTH))
    key_span = KeySpan(jnp.zeros_like(stop), jnp.zeros_like(stop), jnp.asarray(stop))
    structure = MaskStructure(causal=False, lengths=jnp.asarray(lengths))
    np.testing.assert_allclose(run(key_span, structure, scale=SCALE), softmax_attention(q, k, v, seen), atol=3e-6)


@pytest.mark.parametrize("form", ["causal", "both_ways", "packed"])
def test_chunks_are_rows(form, run_here):
    """A query sees the keys of its chunk; the last chunk is shorter than the others."""
    ids, about, _ = FORMS[form]
    size, (q, k, v) = 32, arrays()
    rows = [chunks_to_rows(x, size) for x in (q, k, v)]
    mask = mask_of_chunks(*mask_of(ids, **about), size, BATCH)
    out = fused_attention.fused_attention("cudnn", *rows, *mask, scale=SCALE)
    chunk = np.arange(LENGTH) // size
    seen = sees(ids, causal=about["causal"], window=None) & (chunk[:, None] == chunk[None])
    real = (ids > 0)[:, None, :, None]
    expected = np.where(real, softmax_attention(q, k, v, seen), 0)
    found = np.where(real, rows_to_sequences(out, BATCH, LENGTH), 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("key_heads", [HEADS, pytest.param(1, marks=pytest.mark.slow("heads that a mesh cannot cut"))])
def test_a_mesh_computes_the_same(key_heads, run_here):
    """Sequences and heads are shared among devices, since JAX does not partition kernels."""
    ids, about, _ = FORMS["packed_window_shared_keys"]
    rows = np.concatenate([ids, ids[::-1]])
    arguments = [jnp.concatenate([x, 2 * x]) for x in arrays(key_heads=key_heads)], *mask_of(rows, **about)
    run = lambda arrays, *mask: fused_attention.fused_attention("splash", *arrays, *mask, scale=SCALE)
    with jax.set_mesh(make_mesh(MeshConfig(shape=(2, 2, 2), rules=()))):
        shared = jax.jit(run)(*arguments)
    np.testing.assert_allclose(shared, jax.jit(run)(*arguments), rtol=0, atol=1e-6)


def test_tokamax_computes_the_same():
    pytest.importorskip("tokamax", reason="an optional package")
    ids, about, _ = FORMS["packed_both_ways"]
    q, k, v = arrays()
    out = fused_attention.fused_attention("tokamax", q, k, v, *mask_of(ids, **about), scale=SCALE)
    expected = softmax_attention(q, k, v, sees(ids, causal=False, window=None))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


# What cuDNN and a TPU would run, from the programs for them.


@pytest.fixture
def fake_cudnn(monkeypatch):
    """A GPU with cuDNN, as far as tracing asks for one."""
    library: Any = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(library, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(library, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(library, "is_cuda_compute_capability_equal", lambda capability: False)


def shapes(dtype: str = "bfloat16", width: int = 64, length: int = 256) -> list[jax.Array]:
    one: Any = jax.ShapeDtypeStruct((BATCH, HEADS, length, width), jnp.dtype(dtype))
    return [one, one, one]


def structure_of(form: str, length: int = 256) -> tuple[KeySpan, MaskStructure]:
    """The mask of a form, for one document or two."""
    _, about, _ = FORMS[form]
    ids = np.repeat([[1] * (length // 2) + [2] * (length - length // 2)], BATCH, axis=0)
    return mask_of(ids if about["packed"] else np.ones_like(ids), **about)


def program(name: str, form: str, platform: str, context: Any = contextlib.nullcontext) -> str:
    """The program of the derivatives for a platform, traced in this context."""
    key_span, structure = structure_of(form)

    def total(q, k, v):
        out = fused_attention.fused_attention(name, q, k, v, key_span, structure, scale=SCALE)
        return out.astype(jnp.float32).sum()

    with context():
        traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(*shapes())
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("form", "mask_type", "window"),
    [
        ("causal", "CAUSAL", None),
        ("causal_window", "CAUSAL", WINDOW),
        ("both_ways", "PADDING", None),
        ("packed", "CAUSAL", None),
        ("packed_both_ways", "NO_MASK", None),
    ],
)
def test_cudnn_is_told_the_structure(form, mask_type, window, fake_cudnn):
    text = program("cudnn", form, "cuda")
    # With a mask of all pairs cuDNN's program has a bias.
    bias = "ScaleBias" if form.startswith("packed") else ""
    assert re.findall(r"__cudnn\$(\w+)", text) == [f"fmha{bias}Softmax", f"fmha{bias}SoftmaxBackward"]
    assert set(re.findall(r"mask_type\\22: \\22(\w+)", text)) == {mask_type}
    lengths = {int(x) for x in re.findall(r"sliding_window_length\\22: (-?\d+)", text)}
    assert lengths == {0 if window is None else window} or (window is None and not lengths)


@pytest.mark.parametrize("form", ["causal_window", "packed"])
def test_splash_attention_lowers_for_a_tpu(form):
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    axes = ("data", "fsdp", "tensor")
    mesh = AbstractMesh((1, 1, 1), axes, axis_types=(AxisType.Auto,) * 3, abstract_device=device)
    text = program("splash", form, "tpu", functools.partial(jax.sharding.use_abstract_mesh, mesh))
    assert text.count("custom_call @tpu_custom_call") == 3  # forward, and the derivatives of queries and of keys


# Why a library cannot compute something.


def why(name: str, form: str = "causal", length: int = 256, **changes) -> str | None:
    return problem(name, *shapes(length=length, **changes), *structure_of(form, length))


def test_cudnn_refuses(fake_cudnn):
    assert why("cudnn") is None
    assert why("cudnn", dtype="float32") == "it needs model.dtype=bfloat16, and this is float32"
    assert "Unsupported sequence length" in (why("cudnn", length=63) or "")
    assert problem("cudnn", *shapes(length=63), *structure_of("causal", 63), trains=False) is None
    assert "multiple of 8" in (why("cudnn", width=60) or "")
    assert "right window" in (why("cudnn", form="window_both_ways") or "")
    assert "needs a TPU" in (why("splash") or "")


def test_without_cudnn_the_reason_is_that_of_jax(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert why("cudnn") == "cuDNN is not detected."


def test_masks_that_do_not_fit_are_refused(fake_cudnn, monkeypatch):
    # The arrays of all pairs in the program: the mask, cuDNN's bias made from it, and the derivative of that.
    arrays = set(re.findall(r"tensor<2x1x256x256x(\w+)>", program("cudnn", "packed", "cuda")))
    assert arrays == {"i1", "bf16"}
    assert fused_attention.mask_bytes("cudnn", *shapes()[:2], structure_of("packed")[1]) == (1 + 2 + 2) * BATCH * 256**2
    assert fused_attention.mask_bytes("cudnn", *shapes()[:2], structure_of("causal")[1]) == 0
    monkeypatch.setattr(fused_attention, "_MOST_MASK_BYTES", 5 * BATCH * 256**2 - 1)
    assert "mask of all pairs" in (why("cudnn", form="packed") or "")
    assert why("cudnn") is None


def test_splash_attention_refuses_masks_without_a_structure(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    key_span, structure = structure_of("causal")
    assert problem("splash", *shapes(), key_span, structure) is None
    assert "KV cache" in (problem("splash", *shapes(), key_span, None) or "")
    assert "mostly padding" in (why("splash", length=64) or "")


@pytest.mark.parametrize("missing", ["tokamax", "splash"])
def test_a_missing_library_is_named(missing, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(fused_attention.importlib.util, "find_spec", lambda module: None)
    assert "is not installed" in (why(missing) or "")


@pytest.mark.parametrize("error", [ImportError, AssertionError, KeyError])
def test_whatever_a_library_raises_is_a_reason(error, monkeypatch):
    """A part of JAX may be a stub of what was removed."""

    def fail(module: str):
        raise error("gone")

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(fused_attention.importlib, "import_module", fail)
    assert (why("splash") or "").strip("'") == "gone"


def test_what_only_the_compiler_refuses_is_a_reason(run_here, monkeypatch):
    """JAX does not ask cuDNN before it compiles; each shape is compiled once."""
    compiled = []

    def compile_(*arguments):
        compiled.append(arguments)
        raise RuntimeError("no engine")

    monkeypatch.setattr(jax, "default_backend", lambda: jax.devices()[0].platform)
    assert problem("cudnn", *arrays(), *structure_of("causal", LENGTH)) is None  # on a CPU nothing is compiled
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"platform": "gpu"})])
    monkeypatch.setattr(fused_attention, "_compile", compile_)
    assert problem("cudnn", *arrays(), *structure_of("causal", LENGTH)) == "no engine"
    monkeypatch.undo()
    fused_attention._compile.cache_clear()
    by_xla = functools.partial(fused_attention._as_jax_nn, jax.nn.dot_product_attention)
    monkeypatch.setitem(LIBRARIES, "cudnn", LIBRARIES["cudnn"]._replace(platform=None, attend=by_xla))
    for _ in range(2):
        fused_attention._compile(*compiled[0])
    assert fused_attention._compile.cache_info().hits == 1
