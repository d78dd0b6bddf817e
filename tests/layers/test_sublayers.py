"""Each sublayer alone: its oracle at usual and large inputs, its error in bfloat16, and long sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.cases import (
    CASES,
    PACKED,
    assert_close,
    draw_parameters,
    model_config,
    real_tokens,
    standard_segment_ids,
    to_float64,
)
from oracles import families as oracle_families
from oracles.attention import Row
from oracles.segments import offsets, visibility

from flash_lm.config.experiment import parse_model
from flash_lm.families.family import FAMILIES, complete
from flash_lm.layers.context import Context
from flash_lm.layers.feed_forward import GLU, MLP
from flash_lm.ops.positions import rotary_table
from flash_lm.ops.segments import find_segments

pytestmark = pytest.mark.representatives("transformer", "flash", "aft_local", causal_alone=True)

DTYPES = ("float32", "bfloat16")


class Sublayer:
    """One sublayer with parameters of order 1, as a jitted function of B×L×D, and its oracle."""

    def __init__(self, family: str, causal: bool, which: int, dtype: str, max_length: int):
        raw = model_config(family, causal, dtype=dtype, max_length=max_length)
        config = complete(parse_model(raw))
        self.settings = oracle_families.complete(raw.to_dict())
        self.settings.number = 0  # index of the layer
        self.rows = standard_segment_ids(family)
        self._mix = oracle_families.FAMILIES[family].sublayers[which]
        abstract = nnx.eval_shape(lambda: FAMILIES[family].sublayers[which](config, rngs=nnx.Rngs(0)))
        graph, state, self._constants = nnx.split(abstract, nnx.Param, ...)
        if jax.tree.leaves(self._constants):  # random constants that are not trained
            module = FAMILIES[family].sublayers[which](config, rngs=nnx.Rngs(0))
            self._constants = nnx.split(module, nnx.Param, ...)[2]
        self.params = draw_parameters(nnx.to_pure_dict(state))

        def forward(params, x_BxLxD, segment_ids):
            copy = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(copy, jax.tree.map(jnp.asarray, params))
            segments = find_segments(segment_ids)
            width = abstract.rotary_width
            rotary = {width: rotary_table(segments.offsets_BxL, width)} if width else {}
            context = Context(
                positions_BxL=segments.offsets_BxL,
                rotary=rotary,
                segments=segments,
                causal=causal,
                packed=self.rows is PACKED,
            )
            return nnx.merge(graph, copy, self._constants)(x_BxLxD.astype(dtype), context).astype(jnp.float32)

        def loss(params, x_BxLxD, segment_ids):
            y = forward(params, x_BxLxD, segment_ids)
            return jnp.square(y).mean(), y

        self._run = jax.jit(forward)
        self._differentiate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def __call__(self, x_BxLxD, params=None):
        return np.asarray(self._run(self.params if params is None else params, jnp.asarray(x_BxLxD), self.rows))

    def gradients(self, x_BxLxD, segment_ids=None):
        segment_ids = self.rows if segment_ids is None else segment_ids
        (_, y), grads = self._differentiate(self.params, jnp.asarray(x_BxLxD), segment_ids)
        return np.asarray(y), grads

    def oracle(self, x_BxLxD):
        params = {"core": {}} | to_float64(self.params, self._constants)
        rows = []
        for b, ids in enumerate(self.rows.tolist()):
            row = Row(visibility(ids, self.settings.causal), offsets(ids))
            rows.append(self._mix(x_BxLxD[b].astype(np.float64), params, row, self.settings))
        return np.stack(rows)


@functools.cache
def sublayer(family: str, causal: bool, which: int, dtype: str = "float32", max_length: int = 32) -> Sublayer:
    return Sublayer(family, causal, which, dtype, max_length)


def normal(length: int, batch: int = 2) -> np.ndarray:
    """Normal inputs, as a norm outputs them."""
    return np.random.default_rng(4).normal(size=(batch, length, 32)).astype(np.float32)


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def rounding(family: str, x_xLxD: np.ndarray, y_xLxD: np.ndarray) -> float:
    """Relative L2 distance; without the 10 % of tokens that differ most if rounding may change hashes."""
    if oracle_families.FAMILIES[family].hashes_tokens:
        moved_xL = np.linalg.norm(x_xLxD - y_xLxD, axis=-1) / np.linalg.norm(y_xLxD, axis=-1)
        keep = moved_xL <= np.quantile(moved_xL, 0.9)
        x_xLxD, y_xLxD = x_xLxD[keep], y_xLxD[keep]
    return distance(x_xLxD, y_xLxD)


# Each sublayer of the table once per direction: (family, causal, index in the layer).
UNIQUE = {
    (FAMILIES[f].sublayers[w], c): (f, c, w) for f, c in CASES for w in range(len(FAMILIES[f].sublayers))
}.values()
MIXERS = [(f, c, w) for f, c, w in UNIQUE if FAMILIES[f].sublayers[w] not in (GLU, MLP)]


@pytest.mark.parametrize(("family", "causal", "which"), UNIQUE)
def test_inputs_30_times_as_large(family, causal, which):
    """With scores 900 times as large the outputs still equal the oracle's, and nothing is NaN."""
    one, x, keep = (
        sublayer(family, causal, which),
        normal(PACKED.shape[1]) * 30,
        real_tokens(standard_segment_ids(family)),
    )
    ill = ("causal" if causal else "bidirectional") in oracle_families.FAMILIES[family].ill_conditioned
    assert_close(one(x)[keep], one.oracle(x)[keep], 1e-4 if ill else 1e-5)
    y, grads = sublayer(family, causal, which, "bfloat16").gradients(x)
    assert np.isfinite(y).all()
    assert jax.tree.all(jax.tree.map(lambda g: bool(np.isfinite(g).all()), grads))


@pytest.mark.parametrize(("family", "causal", "which"), UNIQUE)
def test_bfloat16(family, causal, which):
    """With initial parameters, the error in bfloat16 is that of its rounding."""
    x, keep = normal(PACKED.shape[1]), real_tokens(standard_segment_ids(family))
    for init in ("normal", "lecun"):
        config = complete(parse_model(model_config(family, causal, init=init)))
        module = FAMILIES[family].sublayers[which](config, rngs=nnx.Rngs(0))
        params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
        exact, rounded = (sublayer(family, causal, which, dtype)(x, params=params) for dtype in DTYPES)
        assert 1e-4 < rounding(family, rounded[keep], exact[keep]) < 2e-2


@pytest.mark.slow("differentiates each mixer on 8192 tokens")
@pytest.mark.parametrize(("family", "causal", "which"), MIXERS)
def test_long_sequences(family, causal, which):
    """8192 tokens: values and gradients are finite in both dtypes, and differ no more than in short sequences."""
    x, segment_ids = normal(8192, batch=1), np.ones((1, 8192), np.int32)
    y, grads = sublayer(family, causal, which, "float32", 8192).gradients(x, segment_ids)
    rounded, rounded_grads = sublayer(family, causal, which, "bfloat16", 8192).gradients(x, segment_ids)
    for tree in (y, grads, rounded, rounded_grads):
        assert jax.tree.all(jax.tree.map(lambda g: bool(np.isfinite(g).all()), tree))
    assert rounding(family, rounded, y) < 2e-2
