"""Bugs of public cosFormer code, each tested here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_lm import build_mixer
from flash_lm.config.model import ModelConfig
from flash_lm.families.cosformer import CosformerCore, CosformerOptions
from flash_lm.layers.attention_core import Pair
from flash_lm.layers.context import Context
from flash_lm.layers.linear_core import LinearOptions
from flash_lm.ops.cosformer import cosine_features
from flash_lm.ops.segments import whole_row
from models.cases import assert_close, case, tokens

REACH = {"cosformer.cos_length": 20, "absolute_positions": "none"}  # absolute positions would limit the length, too
KEY = r"model\.cosformer\.cos_length"


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


@jax.jit
def attend(q, k, v):
    core = CosformerCore(ModelConfig(), CosformerOptions(cos_length=64), LinearOptions(chunk_size=8))
    segments = whole_row(v.shape[2])
    context = Context(positions_BxL=segments.offsets_BxL, segments=segments)
    return core({"attention": Pair(q, k)}, v, context)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_sequences_end_at_m(causal):
    """Longer sequences raise an error: weights would be negative, and a denominator might be zero."""
    model = case("cosformer", causal, **REACH)
    inputs = tokens()[:, :20]
    assert_close(model.logits(model.params, inputs), model.oracle(None, inputs), 1e-5)
    error = f"21 tokens exceed {KEY}=20, .*: raise --config.{KEY} and train again, or shorten the sequences"
    with pytest.raises(ValueError, match=error):
        model.logits(model.params, tokens()[:, :21])


def test_decoding_ends_at_m():
    """Prefill and step raise outside jit; inside, the sequence that is too long gets NaN."""
    model, error = case("cosformer", True, **REACH), rf"row 1 .*21 tokens.*positions end there \({KEY}\)"
    with pytest.raises(ValueError, match=f"21 tokens exceed {KEY}=20"):
        model.init_state(capacity=21)
    inputs = jnp.asarray(tokens()[:, :20])
    logits, state = model.prefill(model.params, inputs, model.init_state(capacity=20), np.array([3, 20]))
    assert np.isfinite(logits[1]).all()
    outside_jit = model.model(model.params)
    with pytest.raises(ValueError, match=error):
        outside_jit.step(inputs[:, 0], state)
    with pytest.raises(ValueError, match=error):
        outside_jit.prefill(inputs[:, :2], state, jnp.array([2, 1]))
    logits, _ = model.step(model.params, inputs[:, 0], state)
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()


def test_a_mixer_ends_at_m():
    options = {"model_dim": 8, "num_heads": 2, "cosformer": {"cos_length": 4}}
    mixer = build_mixer("cosformer", **options, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match="5 tokens exceed cosformer.cos_length=4.*build it with cosformer.cos_length=5"
    ):
        mixer(jnp.zeros((1, 5, 8)))


def test_m_is_not_the_length_of_the_sequence():
    """In the authors' code it is the longest length in the batch, so a prefix would have other weights."""
    model = case("cosformer", True)
    full, prefix = (np.asarray(model.logits(model.params, tokens()[:, :n])) for n in (29, 11))
    assert_close(prefix, full[:, :11], 1e-6)


@pytest.mark.slow("compiles attention and its derivative once more")
def test_a_query_without_any_weight():
    """relu often makes all of a query or key zero; then the output is zero, not NaN."""
    q, k, v = draw(1, 2, 12, 4), draw(2, 2, 12, 4)[:1], draw(3, 2, 12, 4)[:1]
    q, k = q.at[:, :, 5].set(-1.0), k.at[:, :, 0].set(-1.0)
    out, grads = attend(q, k, v), jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)
    assert (out[:, :, 5] == 0).all() and (out[:, :, 0] == 0).all() and (jnp.abs(out[:, :, 11]) > 0).any()
    assert all(np.isfinite(g).all() for g in grads)


def test_small_queries_are_not_clamped():
    """The denominator has no lower bound, 1e-6 in the authors' code, below which the mean would shrink."""
    q, k, v = draw(1, 2, 12, 4), draw(2, 2, 12, 4)[:1], draw(3, 2, 12, 4)[:1]
    np.testing.assert_allclose(attend(1e-5 * q, 1e-5 * k, v), attend(q, k, v), rtol=1e-4, atol=1e-5)


def test_no_feature_is_negative_up_to_m():
    """So no sum cancels, and no sum of positive products is zero."""
    features = cosine_features(jnp.ones((1, 1, 64, 1)), jnp.arange(64)[None], 64)
    assert (features >= 0).all() and float((features[0, 0, 0] * features[0, 0, 63]).sum()) > 0
