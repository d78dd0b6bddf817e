"""Keys that many families share: the width of a head, biases of linear maps, and the feed-forward."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import families as oracle_families
from oracles import sizes
from oracles.feed_forward import GLU as GLU_ORACLE
from oracles.feed_forward import MLP as MLP_ORACLE
from oracles.language_model import cross_entropy

from flash_lm.config.experiment import parse
from flash_lm.config.mesh import MeshConfig
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete, layer_configs, unused_keys
from flash_lm.layers.feed_forward import MLP
from flash_lm.layers.parameter import parameter_name, traits
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.sharding import make_abstract_mesh, param_shardings
from models.cases import (
    BATCH,
    CASE_IDS,
    CASES,
    FORM,
    LENGTH,
    assert_close,
    case,
    real_tokens,
    standard,
    standard_segment_ids,
    targets,
    tokens,
)

# Heads whose widths together are not D, which they do not divide.
HEADS = {"head_dim": 6, "num_heads": 3}
# Maps without a bias: their sublayer adds one, or a softmax does not see it.
UNBIASED = {
    "transformer_xl": {"distance"},
    "mamba2": {"step_size", "skip_map"},
    "gated_deltanet": {"step_size"},
    "gla": {"decay_down", "decay_up"},
    "mega": {"output"},
}
# Half of these heads attend, on channels that all heads divide.
THEIRS = {"lite_transformer": {"num_heads": 4}, "longformer": {"window.global_tokens": 2}}
# The feed-forward that a family does not have by default; None: it has neither.
OTHER = {
    name: "glu" if MLP_ORACLE in row.sublayers else "mlp" if GLU_ORACLE in row.sublayers else None
    for name, row in oracle_families.FAMILIES.items()
}
READERS = [name for name in FAMILIES if "model.head_dim" not in unused_keys([name])]
QUICK = ("transformer_plus_plus", "longformer")  # softmax with a GLU, a window with an MLP
each_family = pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow("compiles a model")) for name in FAMILIES],
)


def build(family: str):
    """The model with all of the keys that its family reads."""
    heads = HEADS | THEIRS.get(family, {}) if family in READERS else {}
    other = {"feed_forward": OTHER[family]} if OTHER[family] else {}
    return case(family, FORM[family], biases="all", **heads, **other)


def lowered(model) -> str:
    return model.logits.lower(model.params, tokens(), standard_segment_ids(model.family)).as_text()


# Families in which a number that is added to all keys leaves weights that sum to 1 as they are: no positions rotate it.
IDLE_KEYS = ("transformer", "nystromformer", "transformer_xl", "lite_transformer", "rwkv4")
IDLE_KEYS += ("aft_full", "aft_local", "aft_simple", "aft_conv")


@each_family
def test_layers_equal_their_equations(family):
    """Biases are random in the tests, so none is hidden; the model's derivatives are those of the oracle."""
    model, segment_ids = build(family), standard_segment_ids(family)
    logits, _, grads = model.run(segment_ids)
    keep = real_tokens(segment_ids)
    assert_close(logits[keep], model.oracle(segment_ids)[keep], 1e-5)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads["layers"]):
        name = parameter_name(path)
        idle = family in IDLE_KEYS and name.endswith("/key/bias")
        assert (np.linalg.norm(grad) > 1e-3) != idle, f"gradient at {name}"
    # The derivative along all biases together, each with a share of order 1.
    params, grads = (jax.tree.map(lambda x: x.astype(np.float64), tree) for tree in (model.params, grads))
    of_bias = lambda path, g: parameter_name(path).endswith("bias") / max(np.linalg.norm(g), 1) * g
    direction, step = jax.tree_util.tree_map_with_path(of_bias, grads), 1e-6

    def loss(step: float) -> float:
        shifted_params = jax.tree.map(lambda p, d: p + step * d, params, direction)
        return cross_entropy(model.oracle(segment_ids, params=shifted_params), targets(), keep)

    expected = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)))
    assert (loss(step) - loss(-step)) / (2 * step) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["transformer_plus_plus", "longformer", "linear_transformer"])
def test_decoding_equals_the_equations(family):
    """Prefill of a part, then tokens one by one, with all of the keys."""
    model, start = build(family), 13
    expected = model.oracle(None)
    lengths = np.full(BATCH, start)
    logits, state = model.prefill(model.params, tokens()[:, :start], model.init_state(), lengths)
    assert_close(logits, expected[:, :start], 1e-5)
    for t in range(start, LENGTH):
        logits, state = model.step(model.params, tokens()[:, t], state)
        assert_close(logits, expected[:, t], 1e-5, f"token {t}")


@pytest.mark.parametrize("family", READERS)
def test_flops_count_each_weight_of_the_maps(family):
    mixer = build(family).abstract.layers.sublayers[FAMILIES[family].mixer]
    kernels = {path: x for path, x in nnx.to_flat_state(nnx.state(mixer, nnx.Param)) if path[-1] == "kernel"}
    of_a_layer = [math.prod(x.shape[1:]) for path, x in kernels.items() if "taps" not in path]  # counted by layer
    assert mixer.projection_weights == sum(of_a_layer)


@pytest.mark.parametrize("family", ["longformer", "linear_transformer"])
def test_the_width_that_is_open(family):
    """The same program."""
    shape = {"model_dim": 32, "num_heads": 2}
    assert lowered(case(family, FORM[family], **shape)) == lowered(case(family, FORM[family], head_dim=16, **shape))


@pytest.mark.parametrize("family", ["flash", "transformer_plus_plus"])
def test_biases_of_zero_change_nothing(family):
    model, ids = case(family, True, biases="all"), standard_segment_ids(family)
    logits, _, grads = standard(family, True)
    is_bias = lambda path: tuple(key.key for key in path) in bias_paths(model)
    params = jax.tree_util.tree_map_with_path(lambda path, x: 0 * x if is_bias(path) else x, model.params)
    weights = real_tokens(ids).astype(np.float32)
    (_, same_logits), same_grads = model.loss_and_grads(params, tokens(), targets(), weights, ids)
    np.testing.assert_array_equal(same_logits, logits)
    jax.tree.map(lambda x, same: assert_close(same, x, 1e-5), grads, keep_like(same_grads, grads))


def bias_paths(model) -> list[tuple]:
    """Paths of the biases of linear maps."""
    paths = {path for path, _ in nnx.to_flat_state(nnx.state(model.abstract, nnx.Param))}
    return [path for path in paths if path[-1] == "bias" and (*path[:-1], "kernel") in paths]


def keep_like(tree: dict, other: dict) -> dict:
    """The entries of a nested dict that another has, too."""
    return {name: keep_like(tree[name], x) if isinstance(x, dict) else tree[name] for name, x in other.items()}


@pytest.mark.parametrize(("family", "causal"), CASES, ids=CASE_IDS)
def test_biases_are_vectors(family, causal):
    """Neither decayed nor orthogonalised nor sharded, on each linear map of the layers, and on nothing else."""
    model = case(family, causal, biases="all", vocab_size=64)
    state = nnx.state(model.abstract, nnx.Param)
    of_all, mesh = traits(state), MeshConfig(shape=(1, 2, 2))
    shardings = param_shardings(nnx.to_pure_dict(state), of_all.matrix, mesh, make_abstract_mesh(mesh, 4))
    biases = bias_paths(model)
    for path in biases:
        get = lambda tree, path=path: functools.reduce(lambda node, key: node[key], path, tree)
        assert (get(of_all.matrix), get(of_all.hidden), get(of_all.rate)) == (False, False, 1.0)
        assert not any(get(shardings).spec)
    kernels = {path[:-1] for path, _ in nnx.to_flat_state(state) if path[-1] == "kernel"}
    unbiased = {path[-1] for path in kernels - {path[:-1] for path in biases}}
    assert unbiased == UNBIASED.get(family, set()) & {path[-1] for path in kernels}


@pytest.mark.parametrize("head", ["classes", "logistics"])
def test_heads_have_no_second_bias(head):
    keys = {"vocab_size": 256, "classes.count": 3} if head == "classes" else {"vocab_size": 256}
    paths = bias_paths(case("flash", True, biases="all", head=head, **keys))
    assert {path[0] for path in paths} == {"layers"}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("transformer_plus_plus", {"query", "key", "value"}),
        ("longformer", {"query", "key", "value", "global_query", "global_key", "global_value"}),
        ("conformer", {"query", "key", "value"}),
    ],
)
def test_biases_of_queries_keys_and_values(family, names):
    model = case(family, True, biases="qkv", **THEIRS.get(family, {}))
    assert {path[-2] for path in bias_paths(model)} == names
    assert len({path[-3] for path in bias_paths(model)}) == 1


def test_biases_that_a_family_cannot_have():
    without = [name for name, row in FAMILIES.items() if "model.query_key_norm" not in row.reads()]
    assert {"flash", "mamba2", "rwkv4", "retnet"} < set(without) < set(FAMILIES)
    for family in without:
        with pytest.raises(InputError, match=f"^model.biases=qkv has no meaning in {family}, .*: set all"):
            case(family, FORM[family], biases="qkv")
    with pytest.raises(InputError, match="set model.biases=none"):
        case("log_sparse", True, biases="all", **{"log_sparse.convolution": "full"})


@pytest.mark.usefixtures("usual_promotion")
def test_biases_are_zero_at_the_start_and_are_not_decayed():
    config = case("transformer", True, biases="all").config
    layer = MLP(layer_configs(config)[0], rngs=nnx.Rngs(0))
    assert not layer.up.bias[...].any() and not layer.down.bias[...].any()
    state = nnx.state(layer, nnx.Param)
    ones = jax.tree.map(jnp.ones_like, nnx.to_pure_dict(state))
    settings = dataclasses.replace(parse(get_config()).train, weight_decay=0.5, warmup_steps=0)
    optimizer = make_optimizer(settings, traits(state))
    zeros = jax.tree.map(jnp.zeros_like, ones)
    updates, _ = optimizer.update(zeros, optimizer.init(ones), ones, learning_rate=jnp.float32(0.1))
    for name in ("up", "down"):
        assert (updates[name]["kernel"] < 0).all() and not updates[name]["bias"].any()


@pytest.mark.parametrize("family", [name for name in FAMILIES if OTHER[name]])
def test_the_other_feed_forward(family):
    """Its parameters and FLOPs are those of the closed forms, whose width follows the choice."""
    default, other = case(family, FORM[family]), case(family, FORM[family], feed_forward=OTHER[family])
    explicit = case(family, FORM[family], feed_forward=default.settings.feed_forward)
    assert jax.tree.map(np.shape, explicit.params) == jax.tree.map(np.shape, default.params)
    assert {"glu": ["down", "gate", "up"], "mlp": ["down", "up"]}[OTHER[family]] == sorted(
        other.params["layers"]["sublayer_1"]
    )
    assert sum(x.size for x in jax.tree.leaves(other.params)) == sizes.parameters(other.settings)
    assert other.abstract.flops_per_token(8) * 8 == pytest.approx(sizes.flops(other.settings, 8), rel=1e-9)
    assert case(family, FORM[family], feed_forward=OTHER[family], mlp_dim=40).config.mlp_dim == 40


def test_the_feed_forward_of_each_layer_that_has_one():
    model = case("flash", True, pattern=("flash", "retnet", "conformer", "mc_tfm"), num_layers=4, feed_forward="glu")
    kinds = [type(sublayer).__name__ for sublayer in model.abstract.layers.sublayers]
    assert kinds[2:4] == ["Retention", "GLU"] and kinds[-1] == "GLU"
    assert kinds.count("HalfStep") == kinds.count("ClosingHalfStep") == 1
    widths = [layer.mlp_dim for layer in layer_configs(model.config)]
    assert widths == [None, 64, 40, 88]  # RetNet's 2 D is its own, with either


def test_families_without_the_choice_refuse_it():
    assert {"flash", "mamba2", "rwkv4", "conformer"} == {
        name.removesuffix("_quad") for name in FAMILIES if not OTHER[name]
    }
    for family in (name for name in FAMILIES if not OTHER[name]):
        with pytest.raises(InputError, match=rf"^model.feed_forward=glu has no meaning in {family}, .*: leave it open"):
            case(family, FORM[family], feed_forward="glu")


def test_families_without_heads_of_a_width_refuse_it():
    for family in set(FAMILIES) - set(READERS):
        with pytest.raises(InputError, match=r"^model.head_dim=8 has no meaning in .*: leave it open"):
            case(family, FORM[family], head_dim=8)
    assert complete(case("flash", True, pattern=("flash", "transformer"), head_dim=8).config).head_dim == 8


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("transformer_plus_plus", {"head_dim": 7}, "the head width 7 must be even"),
        ("transformer_plus_plus", {"num_heads": 3}, "must be a multiple of model.num_heads=3"),
        ("retnet", {"pattern": ("retnet", "transformer"), "head_dim": 8, "num_heads": 3}, "must be a multiple"),
        ("lite_transformer", {"head_dim": 8, "num_heads": 3}, "must be a multiple"),
    ],
)
def test_heads_without_a_width(family, keys, message):
    with pytest.raises(InputError, match=message):
        case(family, True, **keys)
