"""Which form a part of a model gets, and that it is told once."""

import logging

import jax
import jax.numpy as jnp
import pytest

from flash_lm.ops.kernels import choice

GOOD = {"function": "relu2", "size": 256, "width": 128, "values": 1536, "dtype": "bfloat16"}


def choose(requested: str, **changes) -> str | None:
    x = GOOD | changes
    q, v = (jax.ShapeDtypeStruct((2, 1, 512, x[width]), jnp.dtype(x["dtype"])) for width in ("width", "values"))
    return choice.choose(requested, "a part", x["function"], x["size"], q, v)  # type: ignore[arg-type]


@pytest.mark.parametrize(("platform", "backend"), [("gpu", "triton"), ("tpu", "mosaic"), ("cpu", None)])
def test_auto_is_the_machines(platform, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert choose("auto") == backend
    assert choose("xla") is None
    assert choose("pallas") == (backend or "interpreted")


@pytest.mark.parametrize(
    "changes",
    [
        {"function": "softmax"},
        {"size": 64},
        {"width": 96},
        {"values": 1000},
        {"dtype": "float32"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_auto_leaves_what_does_not_suit_to_xla(changes, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choose("auto", **changes) is None
    assert (choose("pallas", **changes) is None) == (changes == {"function": "softmax"})


def test_the_choice_is_logged_once(monkeypatch, caplog):
    choice._say.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with caplog.at_level(logging.INFO, logger="flash_lm"):
        for _ in range(3):
            choose("auto")
            choose("auto", size=64)
    assert [record.getMessage() for record in caplog.records] == [
        "a part: Pallas kernel (triton), model.kernels=auto on gpu",
        "a part: compiled by XLA, 64 queries of 128 and values of 1536 would be mostly padding",
    ]
