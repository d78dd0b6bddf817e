"""Choice between Pallas kernels and XLA; it is logged once."""

import logging

import jax
import jax.numpy as jnp
import pytest

from flash_lm.ops import implementations
from flash_lm.ops.kernels import backends, choice

GOOD = {"function": "relu2", "size": 256, "length": 512, "width": 128, "values": 1536, "dtype": "bfloat16"}
HOPPER = 232_448  # bytes of shared memory


def choose(requested: str, **changes) -> str | None:
    x = GOOD | changes
    q, v = (jax.ShapeDtypeStruct((2, 1, x["length"], x[name]), jnp.dtype(x["dtype"])) for name in ("width", "values"))
    return choice.choose_backend(requested, "a part", x["function"], x["size"], q, v)  # type: ignore[arg-type]


def set_platform(platform: str, monkeypatch, shared: int = HOPPER) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(backends, "shared_memory", lambda: shared)


@pytest.mark.parametrize(("platform", "backend"), [("gpu", "triton"), ("tpu", "mosaic"), ("cpu", None)])
def test_auto_is_the_backend_of_the_platform(platform, backend, monkeypatch):
    set_platform(platform, monkeypatch)
    assert choose("auto") == backend
    assert choose("xla") is None
    assert choose("pallas") == (backend or "interpreted")


@pytest.mark.parametrize(
    "changes",
    [
        {"function": "softmax"},
        {"function": "laplace"},
        {"size": 64},
        {"width": 96},
        {"values": 1000},
        {"values": 64},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_auto_leaves_unsuitable_shapes_to_xla(changes, monkeypatch):
    set_platform("gpu", monkeypatch)
    assert choose("auto", **changes) is None
    assert (choose("pallas", **changes) is None) == ("function" in changes)


def test_auto_respects_the_shared_memory(monkeypatch):
    set_platform("gpu", monkeypatch, shared=101_376)
    assert choose("auto") is None
    set_platform("tpu", monkeypatch)
    assert choose("auto", length=16384, dtype="float32") == choose("auto", function="laplace") == "mosaic"
    assert choose("auto", length=65536) is None


def test_without_pallas_for_the_platform_xla_compiles(monkeypatch):
    """JAX has deprecated Triton's path since 0.11, and may remove it."""
    set_platform("gpu", monkeypatch)
    monkeypatch.setattr(backends, "triton", None)
    assert choose("auto") is choose("pallas") is None
    with implementations.recorded() as said:
        choose("pallas")
    assert said == {"a part": ["compiled by XLA, this version of jax has no Pallas for Triton"]}
    assert backends._module("a_path_that_is_gone") is None


def test_the_choice_is_logged_once(monkeypatch, caplog):
    implementations._say.cache_clear()
    set_platform("gpu", monkeypatch)
    with caplog.at_level(logging.INFO, logger="flash_lm"):
        for _ in range(3):
            choose("auto")
            choose("auto", size=64)
    assert [record.getMessage() for record in caplog.records] == [
        "a part: Pallas kernel (triton)",
        "a part: compiled by XLA, 64 queries of 128 and values of 1536 would be mostly padding",
    ]
