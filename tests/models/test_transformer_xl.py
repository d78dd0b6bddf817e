"""Transformer-XL: gradients stop at the memory, visible tokens of the memory, bugs of other code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.transformer_xl import segment_attention
from flax import nnx
from oracles.attention import Row

from flash_lm import build_model
from flash_lm.config.experiment import parse_model
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete
from flash_lm.layers.context import make_context
from flash_lm.ops.positions import skew
from models.cases import LENGTH, SHAPE, Case, assert_close, case, draw_parameters, model_config, state_bytes, tokens

DIM, SEGMENT = SHAPE["model_dim"], SHAPE["xl.segment"]


class Attention:
    """The attention sublayer alone, with random parameters."""

    def __init__(self, causal: bool = True, **keys):
        self.config = complete(parse_model(model_config("transformer_xl", causal, **keys)))
        build = lambda: FAMILIES["transformer_xl"].sublayers[0](self.config, rngs=nnx.Rngs(0))
        self.causal, sublayer = causal, nnx.eval_shape(build)
        self.graph, self.state = nnx.split(sublayer)
        self.params = draw_parameters(nnx.to_pure_dict(self.state))

    @functools.partial(jax.jit, static_argnums=0)
    def __call__(self, params, x_LxD) -> jax.Array:
        state = jax.tree.map(lambda leaf: leaf, self.state)
        nnx.replace_by_pure_dict(state, params)
        context = make_context(len(x_LxD), causal=self.causal)
        return nnx.merge(self.graph, state)(x_LxD[None], context)[0]


def draw_input(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(LENGTH, DIM))


@pytest.mark.parametrize(
    ("gradient", "causal"),
    [(False, True), (True, True), pytest.param(False, False, marks=pytest.mark.slow("the bidirectional form"))],
    ids=["ends", "goes-through", "bidirectional"],
)
def test_the_derivative_stops_at_the_memory(gradient, causal):
    """Against differences of the oracle with a constant memory, or one that follows x, as in the bidirectional form."""
    attention, x, weight = Attention(causal, **{"xl.memory_gradient": gradient}), draw_input(0), draw_input(1)
    through = gradient or not causal
    loss = lambda params, x: (attention(params, x) * np.float32(weight)).sum()
    d_params, d_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(attention.params, np.float32(x))
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), attention.params)
    row = Row(lambda t, u: u <= t or not causal, list(range(LENGTH)))

    def oracle(params, x_LxD) -> float:
        settings = case("transformer_xl", True).settings
        return (segment_attention(x_LxD, params, row, settings, None if through else x) * weight).sum()

    step, direction = 1e-6, draw_input(2)
    slope = (oracle(params, x + step * direction) - oracle(params, x - step * direction)) / (2 * step)
    np.testing.assert_allclose((np.asarray(d_x) * direction).sum(), slope, rtol=1e-4)

    # The weights of keys and values always get gradients from the memory, with x constant.
    rng = np.random.default_rng(3)
    directions = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)
    params_at = lambda n: jax.tree.map(lambda leaf, move: leaf + n * step * move, params, directions)
    slope = (oracle(params_at(1), x) - oracle(params_at(-1), x)) / (2 * step)
    slope_by_params = sum(
        jax.tree.leaves(jax.tree.map(lambda d, move: (np.asarray(d) * move).sum(), d_params, directions))
    )
    np.testing.assert_allclose(slope_by_params, slope, rtol=1e-4)


def test_a_memory_without_derivative_gives_the_same_outputs():
    constant, through = (case("transformer_xl", True, **{"xl.memory_gradient": each}) for each in (False, True))
    np.testing.assert_array_equal(constant.logits(constant.params, tokens()), through.logits(through.params, tokens()))


def test_the_first_token_of_the_memory_is_visible():
    """kimiyoung/transformer-xl's same_length mask hides it in transformers (#14832)."""
    attention, x = Attention(), draw_input(0)
    before, last = np.asarray(attention(attention.params, x)), 2 * SEGMENT - 1
    changed = attention(attention.params, np.where(np.arange(LENGTH)[:, None] == 0, x + 1, x))
    moved = np.abs(np.asarray(changed) - before).max(axis=-1) > 1e-6
    np.testing.assert_array_equal(np.flatnonzero(moved), np.arange(last + 1))


def test_relative_shift_is_correct_above_the_diagonal():
    """The published shift leaves scores of other queries above the diagonal, which only a causal mask hides."""
    scores_CxW = jnp.arange(3)[:, None] * 100 + jnp.arange(9)[None]  # score of query i at the w-th distance
    np.testing.assert_array_equal(
        skew(scores_CxW, 6), [[3, 4, 5, 6, 7, 8], [102, 103, 104, 105, 106, 107], [201, 202, 203, 204, 205, 206]]
    )


def test_sequences_within_two_segments_have_full_attention(causal=True):
    """Segments of the full length and of half of it give the same output."""
    wide, half = (case("transformer_xl", causal, **{"xl.segment": size}) for size in (LENGTH, 15))
    assert_close(half.logits(half.params, tokens()), np.asarray(wide.logits(wide.params, tokens())), 1e-5)


def test_bytes_of_the_state():
    """Keys and values of two segments."""
    layers, keys = SHAPE["num_layers"], 2 * 2 * SEGMENT * DIM
    assert state_bytes(case("transformer_xl", True).init_state(1).layers) == 4 * layers * keys


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"short_convolution": 4}, "has no short convolutions"),
        ({"model_dim": 33, "num_heads": 3}, "model.model_dim=33 must be even"),
        ({"xl.segment": 0}, "model.xl.segment=0"),
    ],
)
def test_invalid_models(keys, message):
    with pytest.raises(InputError, match=message):
        build_model(model_config("transformer_xl", True, **keys), rngs=nnx.Rngs(0))


@pytest.mark.slow("compiles the decoding of two models")
def test_decoding_in_bfloat16_states():
    """Half the bytes, and logits close to those of float32."""
    exact, half = (Case("transformer_xl", True, {"state_dtype": dtype}) for dtype in ("float32", "bfloat16"))
    assert state_bytes(half.init_state().layers) * 2 == state_bytes(exact.init_state().layers)
    states = [model.prefill(model.params, tokens()[:, :20], model.init_state())[1] for model in (exact, half)]
    logits = [
        np.asarray(model.step(model.params, tokens()[:, 20], state)[0])
        for model, state in zip((exact, half), states, strict=True)
    ]
    assert 0 < np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max() < 0.03
