"""Equivalent computations: unrolled layers, recomputation, blocks, and families with equal special cases."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh
from oracles import families as oracle_families

from flash_lm import build_model
from flash_lm.config.mesh import MESH_AXES
from flash_lm.families.family import FAMILIES
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.ops import blocked_attention
from models.cases import (
    FORM,
    LENGTH,
    PACKED,
    SHAPE,
    Case,
    assert_close,
    assert_trees_close,
    case,
    model_config,
    real_tokens,
    standard,
    standard_segment_ids,
    targets,
    tokens,
)

pytestmark = pytest.mark.representatives("flash", "aft_local")

QUADRATIC = ("transformer", "flash_quad")
each_way = pytest.mark.parametrize(
    "causal",
    [True, pytest.param(False, marks=pytest.mark.slow("compiles two other models for the other direction"))],
    ids=["causal", "bidirectional"],
)
each_family = pytest.mark.parametrize("family", FAMILIES)
# Tests of the trunk are quick for two families; `make test-all` runs the others.
another_family = pytest.mark.slow("compiles a model of each family: the trunk is the same")
each_trunk = pytest.mark.parametrize(
    "family", [x if x in ("transformer", "flash") else pytest.param(x, marks=another_family) for x in FAMILIES]
)


def assert_same(model, family, causal, rtol=1e-5):
    """Compares logits, loss and gradients with those of the standard batch."""
    logits, loss, grads = model.run(standard_segment_ids(family))
    expected_logits, expected_loss, expected_grads = standard(family, causal)
    keep = real_tokens(standard_segment_ids(family))
    assert_close(logits[keep], expected_logits[keep], rtol)
    assert loss == pytest.approx(expected_loss, rel=rtol)
    assert_trees_close(grads, expected_grads, rtol)


def live_equations(jaxpr) -> list:
    """Returns the equations that the outputs depend on."""
    needed, live = {id(var) for var in jaxpr.outvars}, []
    for equation in reversed(jaxpr.eqns):
        if any(id(var) in needed for var in equation.outvars):
            needed |= {id(var) for var in equation.invars}
            live.append(equation)
    return live


def primitives(model, rule=lambda equation: True) -> collections.Counter:
    """Counts each primitive in the program of loss and gradients, loop bodies included.

    Dead code is not counted, such as recomputation of saved values; XLA also removes it.
    """
    segment_ids = standard_segment_ids(model.family)
    arguments = (tokens(), targets(), real_tokens(segment_ids).astype(np.float32), segment_ids)
    program = jax.make_jaxpr(model.loss_and_grads.__wrapped__)(model.params, *arguments)
    counts = collections.Counter()

    def walk(jaxpr):
        for equation in live_equations(jaxpr):
            counts[equation.primitive.name] += 1
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(program.jaxpr)
    return counts


@each_trunk
def test_unrolled_layers(family):
    segment_ids, causal = standard_segment_ids(family), FORM[family]
    model, keep = case(family, causal, scan_layers=False), real_tokens(segment_ids)
    logits = model.logits(model.params, tokens(), segment_ids)
    assert_close(np.asarray(logits)[keep], standard(family, causal)[0][keep], 1e-5)


@pytest.mark.slow("differentiates a model of each family")
@each_family
def test_gradients_of_unrolled_layers(family):
    assert_same(case(family, FORM[family], scan_layers=False), family, FORM[family])


def test_unrolled_layers_are_unrolled():
    """Otherwise the comparison above would be trivial."""
    for scan_layers in (True, False):
        model = case("transformer", True, scan_layers=scan_layers)
        text = model.logits.lower(model.params, tokens()).compile().as_text()
        assert ("while(" in text) == scan_layers


@pytest.mark.parametrize(
    ("platform", "keys", "unrolled"),
    [("gpu", {}, True), ("tpu", {}, False), ("gpu", {"scan_layers": True}, False), ("gpu", {"num_layers": 33}, False)],
)
def test_open_layers_are_unrolled_on_a_gpu(platform, keys, unrolled):
    """Up to 32 of them; without the key it is as if it were set."""
    model = build_model(model_config("transformer", True, vocab_size=11, **keys), rngs=nnx.Rngs(0))
    chip = AbstractDevice(f"a {platform}", 1, platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 1, 1), MESH_AXES, abstract_device=chip)):
        program = jax.make_jaxpr(lambda tokens: model.features(ModelInputs(tokens)))(jnp.zeros((1, 4), jnp.int32))
    (layers,) = [x for x in program.jaxpr.eqns if x.primitive.name == "scan"]
    assert layers.params["unroll"] == (layers.params["length"] if unrolled else 1)


@each_trunk
def test_full_recomputation(family):
    assert_same(case(family, FORM[family], remat="full"), family, FORM[family])


@pytest.mark.parametrize(
    "family", [name if name == "flash" else pytest.param(name, marks=another_family) for name in FAMILIES]
)
def test_recomputation_between_products(family):
    rtol = oracle_families.FAMILIES[family].remat_rtol
    assert_same(case(family, FORM[family], remat="products"), family, FORM[family], rtol)


@each_family
def test_recomputation_recomputes(family):
    """full repeats matrix products in the backward pass; products repeats only the operations between them.

    AFT, Performer and decaying sums recompute products even with none. The delta rule solves its triangular systems
    again with products, since our custom derivative does not save the result of a product.
    """
    none, products, full = (
        primitives(case(family, FORM[family], remat=remat)) for remat in ("none", "products", "full")
    )
    assert full["dot_general"] > max(none["dot_general"], products["dot_general"])
    row = oracle_families.FAMILIES[family]
    assert none["dot_general"] >= products["dot_general"] or row.repeats_products
    assert none["dot_general"] == products["dot_general"] or row.recomputes_products
    elementwise = [sum(c[name] for name in ("mul", "rsqrt", "logistic", "exp")) for c in (none, products, full)]
    assert elementwise[0] < elementwise[1]
    assert elementwise[0] < elementwise[2]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("family", QUADRATIC)
def test_blocked_equals_plain(family, causal, monkeypatch):
    """Blocks of 8 queries and keys, the last one partial; packing needs the right part of the mask."""
    standard(family, causal)  # computed before the blocks shrink, or it would be blocked too
    monkeypatch.setattr(blocked_attention, "SMALLEST", 8)
    monkeypatch.setattr(blocked_attention, "LARGEST", 8)
    model = case(
        family, causal, **{"quadratic.implementation": "blocked"}, dropout=0.5
    )  # a case that no other test compiled
    assert (
        primitives(model)["while"] > primitives(case(family, causal, **{"quadratic.implementation": "plain"}))["while"]
    )
    assert_same(model, family, causal)


@pytest.mark.parametrize("family", QUADRATIC)
def test_blocked_prefill_equals_plain(family, monkeypatch):
    monkeypatch.setattr(blocked_attention, "SMALLEST", 8)
    monkeypatch.setattr(blocked_attention, "LARGEST", 8)
    model = case(family, True, dropout=0.25)
    lengths = np.array((17, 26))
    logits, _ = model.prefill(model.params, tokens(), model.init_state(), lengths)
    plain = case(family, True, **{"quadratic.implementation": "plain"})
    expected = plain.logits(plain.params, tokens())
    for b, length in enumerate(lengths):
        assert_close(logits[b, :length], np.asarray(expected)[b, :length], 1e-5)


@pytest.mark.parametrize(
    "divisor", [{"divides": "scores"}, {"divides": "weights"}, {"divides": "weights", "normalizer": "count"}]
)
def test_flash_in_one_chunk_equals_flash_quad(divisor):
    """The bidirectional local part. Both biases are Toeplitz over the sequence, so the parameters are the same."""
    shape = {"max_length": LENGTH, "chunks.size": LENGTH, **divisor}
    quad = case("flash_quad", False, **shape)
    flash = case("flash", False, **{"chunks.global_attention": False}, **shape)
    assert_close(flash.logits(quad.params, tokens()), quad.logits(quad.params, tokens()), 1e-5)


@each_way
def test_aft_local_with_a_full_window_equals_aft_full(causal):
    full, local = case("aft_full", causal), case("aft_local", causal, **{"aft.window": LENGTH})
    assert_close(local.logits(full.params, tokens(), PACKED), full.logits(full.params, tokens(), PACKED), 1e-5)


@each_way
def test_aft_local_without_a_window_equals_aft_simple(causal):
    simple, local = case("aft_simple", causal), case("aft_local", causal, **{"aft.window": 0})
    params = jax.tree.map(lambda leaf: leaf, local.params)
    for name, layer in simple.params["layers"].items():
        params["layers"][name] = layer | ({"core": params["layers"][name]["core"]} if "key" in layer else {})
    params = {name: x for name, x in simple.params.items() if name != "layers"} | {"layers": params["layers"]}
    assert_close(local.logits(params, tokens(), PACKED), simple.logits(simple.params, tokens(), PACKED), 1e-5)


@each_way
def test_aft_conv_starts_as_aft_simple(causal):
    """With one key per channel, and the filters' gain and offset at their initial values."""
    shape = {"num_heads": SHAPE["model_dim"], "mlp_dim": 48}
    simple, conv = case("aft_simple", causal, **shape), case("aft_conv", causal, **shape)
    build = lambda: build_model(conv.config_dict, rngs=nnx.Rngs(0))
    core = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build(), nnx.Param))["layers"]["sublayer_0"]["core"])()
    params = dict(simple.params)
    params["layers"] = {
        name: layer | ({"core": core} if "key" in layer else {}) for name, layer in simple.params["layers"].items()
    }
    assert not np.asarray(core["gain"]).any()
    assert_close(conv.logits(params, tokens(), PACKED), simple.logits(simple.params, tokens(), PACKED), 1e-5)


def test_shared_keys_equal_repeated_keys(monkeypatch):
    """A model with shared key heads equals one whose key heads are copies, also in blocks."""
    monkeypatch.setattr(blocked_attention, "SMALLEST", 8)
    monkeypatch.setattr(blocked_attention, "LARGEST", 8)
    shared = Case("transformer_plus_plus", True, {"num_heads": 4, "num_kv_heads": 2})
    repeated = Case("transformer_plus_plus", True, {"num_heads": 4})
    params = jax.tree.map(lambda leaf: leaf, shared.params)
    attention = params["layers"]["sublayer_0"]
    for name in ("key", "value"):
        heads = attention[name]["kernel"].reshape(2, 32, 2, 8)
        attention[name] = {"kernel": np.repeat(heads, 2, axis=2).reshape(2, 32, 32)}
    assert_close(shared.logits(shared.params, tokens(), PACKED), repeated.logits(params, tokens(), PACKED), 1e-6)


@pytest.mark.parametrize("family", ["flash", "mc_tfm"])
def test_one_causal_chunk_has_no_global_part(family):
    """Without an earlier chunk, the parameters of the global part have no effect."""
    model = case(family, True, **{"chunks.size": LENGTH})
    params = jax.tree.map(jnp.asarray, model.params)
    for layer in params["layers"].values():
        for name in ("variants", "query_variants", "key_variants"):
            if name in layer:
                pairs = layer[name]["scale"].shape[1] // 2
                layer[name]["scale"] = layer[name]["scale"].at[:, pairs:].multiply(3)
    assert_close(model.logits(params, tokens()), model.logits(model.params, tokens()), 1e-6)
