"""Initial scales of the queries and keys of gated units (`model.scale_init`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.cases import model_config

from flash_lm.config.experiment import parse_model
from flash_lm.families.family import FAMILIES, complete
from flash_lm.layers.context import Context

STARTS = ("normal", "as_init")


def _unit(family: str, start: str, seed: int | jax.Array = 0, **changes) -> nnx.Module:
    raw = model_config(family, False, init="lecun", scale_init=start, rotary=False, **changes)
    return FAMILIES[family].sublayers[0](complete(parse_model(raw)), rngs=nnx.Rngs(seed))


def _scales(family: str, start: str, **changes) -> np.ndarray:
    return np.asarray(jax.jit(lambda: _unit(family, start, **changes).variants.scale[...])())


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if "model.scale_init" in row.reads()])
def test_queries_and_keys_of_one_source_start_apart(family):
    (width,) = (key for key in FAMILIES[family].reads() if key.endswith(".shared_dim"))
    scales = _scales(family, "normal", **{width.removeprefix("model."): 256})
    assert abs(scales.std() / 0.02 - 1) < 0.15 and abs(scales.mean()) < 0.004  # FLASH: normal, 0.02
    assert not np.isclose(scales[::2], scales[1::2]).all(axis=-1).any()
    alike = _scales(family, "as_init")
    np.testing.assert_array_equal(alike[::2], alike[1::2])


def test_dense_queries_and_keys_start_at_one():
    for start in STARTS:
        np.testing.assert_array_equal(_scales("flash_quad", start, **{"gau.query_key": "dense"}), 1)


@pytest.mark.parametrize(("start", "signs"), [("normal", {True, False}), ("as_init", {True})])
def test_equal_tokens_need_not_see_each_other_most(start, signs):
    """Masked tokens are equal. If they always had the largest scores for each other, they would see little context."""
    x = np.random.default_rng(0).normal(size=(1, 32, 16)).astype(np.float32)
    x[:, :8] = x[:, :1]
    outcomes = set()

    @jax.jit
    def queries_and_keys(key):
        unit = _unit("flash_quad", start, key, model_dim=16)
        return unit.arrange(unit.maps(x), Context(positions_BxL=jnp.arange(32)[None])).by["attention"]

    for seed in range(8):
        q, k = map(np.asarray, queries_and_keys(jax.random.key(seed)))
        scores = q[0, 0] @ k[0, 0].T
        outcomes.add(bool(scores[0, 7] > scores[0, 8:].mean()))
    assert outcomes == signs
