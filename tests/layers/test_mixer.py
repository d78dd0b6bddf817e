"""A sublayer in a user's model: the code of docs/layers.md, and its promises."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flash_lm
from flash_lm.config.registry import FAMILIES
from flash_lm.errors import InputError
from flash_lm.layers.positions import RELATIVE_BIASES

PAGE = (pathlib.Path(__file__).parent.parent.parent / "docs" / "layers.md").read_text()
LENGTH, CHUNK = 50, 16
pytestmark = pytest.mark.usefixtures("usual_promotion")
runs_the_page = pytest.mark.slow("runs the code of docs/layers.md, operation by operation")


@pytest.fixture(scope="module")
def page(usual_promotion):
    """Names that the page's code blocks define, run in order."""
    names: dict = {}
    visible = PAGE.replace('init="lecun"', 'init="lecun", scale_init="as_init"')  # so that it mixes at initialisation
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", visible, re.DOTALL)):
        exec(compile(block, f"docs/layers.md, block {number}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def influence(page):
    """Function (module, position) -> B×L: size of the derivative of the output at a position by each token."""

    @nnx.jit(static_argnums=2)
    def position_gradient(module, x_BxLxD, position, *more):
        return nnx.grad(lambda x: jnp.square(module(x, *more)[:, position]).sum())(x_BxLxD)

    def influence_at(module, position, *more, length=LENGTH):
        x_BxLxD = jax.random.normal(jax.random.key(5), (2, length, 64))
        return np.abs(position_gradient(module, x_BxLxD, position, *more)).sum(axis=-1)

    return influence_at


@runs_the_page
def test_a_causal_mixer_sees_earlier_tokens(page, influence):
    influence_BxL = influence(page["block"], 20)
    # All of the previous chunk; in the token's chunk relu² zeroes some.
    assert (influence_BxL[:, :CHUNK] > 0).all() and (influence_BxL[:, 21:] == 0).all()


@runs_the_page
def test_a_bidirectional_mixer_sees_all(page, influence):
    assert (influence(page["both_ways"], 20, length=64) > 0).all()


@runs_the_page
def test_documents_do_not_see_each_other(page, influence):
    influence_BxL = influence(page["block"], 40, page["segment_ids"])
    assert (
        (influence_BxL[0, :16] == 0).all() and (influence_BxL[0, 16:32] > 0).all() and (influence_BxL[1, :32] > 0).all()
    )


@runs_the_page
def test_a_document_on_a_chunk_border_equals_itself_alone(page):
    x_BxLxD = jax.random.normal(jax.random.key(6), (2, LENGTH, 64))
    packed = page["block"](x_BxLxD, page["segment_ids"])[0, CHUNK:46]
    np.testing.assert_allclose(packed, page["block"](x_BxLxD[:1, CHUNK:46])[0], atol=1e-5)


@runs_the_page
def test_steps_equal_the_parallel_form(page):
    parallel_BxLxD = page["block"].mixer(page["x_BxLxD"])
    stepped_BxLxD = jnp.concatenate([page["prompt_BxLxD"], jnp.stack(page["steps"], axis=1)], axis=1)
    assert np.abs(parallel_BxLxD).max() > 0.01  # else the comparison would be trivial
    np.testing.assert_allclose(stepped_BxLxD, parallel_BxLxD, atol=1e-5)
    assert page["state"].positions_B.tolist() == [LENGTH] * 2


@runs_the_page
def test_prompts_of_different_lengths(page):
    """Each sequence continues from its position."""
    x_BxLxD, mixer = page["x_BxLxD"], page["block"].mixer
    lengths_B = jnp.array([13, 21])
    _, state = mixer.prefill(x_BxLxD[:, :21], mixer.init_state(2), lengths_B)
    y_BxD, state = mixer.step(x_BxLxD[jnp.arange(2), lengths_B], state)
    np.testing.assert_allclose(y_BxD, mixer(x_BxLxD)[jnp.arange(2), lengths_B], atol=1e-5)


@runs_the_page
def test_it_learns_in_a_custom_training_loop(page):
    block = page["Block"](64, rngs=nnx.Rngs(3))
    x_BxLxD = jax.random.normal(jax.random.key(7), (2, 2 * CHUNK, 64))

    def loss(block):
        return jnp.square(block(x_BxLxD)[:, 1:] - x_BxLxD[:, :-1]).mean()

    gradients = nnx.grad(loss)(block)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


def test_the_table_is_that_of_the_families():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:3] == "| `"]
    table = {name: row for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert table.keys() == FAMILIES.keys()
    for name, (_, _, positions, state) in table.items():
        sublayer = nnx.eval_shape(lambda name=name: flash_lm.build_mixer(name, rngs=nnx.Rngs(0))).sublayer
        assert ("rotary" in positions) == (sublayer.rotary_width is not None), name
        bias = getattr(sublayer.core, "bias", None)
        assert ("relative bias" in positions) == isinstance(bias, tuple(RELATIVE_BIASES.values())), name
        growth = "grows" if sublayer.state_grows else "constant"
        assert state == ("none" if sublayer.undecodable else growth), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"chunks": {"sze": 4}}, "did you mean model.chunks.size"),
        ({"chunks": 4}, "chunks is a section of keys: give a dict, such as chunks={'global_attention': True}"),
        ({"gau": {"heads": 3}}, "must be a multiple of model.gau.heads=3"),
        ({"family": "flush"}, "model.family=flush must be one of"),
    ],
)
def test_wrong_keys(keys, message):
    with pytest.raises(InputError, match=message):
        flash_lm.build_mixer(**({"family": "flash", "rngs": nnx.Rngs(0)} | keys))


def test_residual_init_takes_the_number_of_layers_from_the_caller():
    build = lambda **keys: flash_lm.build_mixer("transformer", model_dim=16, num_heads=2, rngs=nnx.Rngs(0), **keys)
    first, smaller = (
        mixer.sublayer.output.kernel[...] for mixer in (build(), build(residual_init="depth", num_layers=8))
    )
    np.testing.assert_allclose(smaller, first / 4, rtol=1e-6)


def test_mixers_that_cannot_decode():
    build = lambda family, **keys: nnx.eval_shape(lambda: flash_lm.build_mixer(family, rngs=nnx.Rngs(0), **keys))
    with pytest.raises(ValueError, match="causal=False"):
        build("flash", model_dim=64, causal=False, max_length=64).init_state(1)
    with pytest.raises(ValueError, match="normalizer=length"):
        build("flash", normalizer="length").init_state(1)
    with pytest.raises(ValueError, match="causal=False"):
        build("linformer").init_state(1)
    mixer = build("aft_local", model_dim=8, max_length=4, aft={"window": 2})
    with pytest.raises(ValueError, match="5 tokens exceed max_length=4"):
        mixer(jnp.zeros((1, 5, 8)))


def test_more_tokens_than_a_state_holds():
    mixer = flash_lm.build_mixer("transformer", model_dim=8, num_heads=2, rngs=nnx.Rngs(0))
    x_BxLxD = jnp.ones((1, 4, 8))
    with pytest.raises(ValueError, match="larger capacity"):
        mixer.prefill(x_BxLxD, mixer.init_state(1, capacity=3))
    assert np.isnan(jax.jit(lambda state: mixer.prefill(x_BxLxD, state)[0])(mixer.init_state(1, capacity=3))).all()
