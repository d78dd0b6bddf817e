"""Parameters and FLOPs against closed forms, the papers' numbers, and XLA's count."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import families as oracle_families
from oracles import sizes

from flash_lm import build_model
from flash_lm.families.family import FAMILIES
from flash_lm.ops import aft, blocked_attention, offset_attention
from models.cases import CASE_IDS, CASES, FORM, case, model_config

pytestmark = pytest.mark.every_family

BASE = {
    "num_layers": 12,
    "model_dim": 768,
    "num_heads": 12,
    "gau.shared_dim": 128,
    "chunks.size": 256,
    "linear.chunk_size": 256,
    "max_length": 512,
    "vocab_size": 32000,
    "tie_embeddings": True,
}
OPTIONS = [
    {},
    {"tie_embeddings": True, "norm": "rms", "absolute_positions": "learned"},
    {"gau.relative_bias": "t5", "chunks.global_attention": False, "absolute_positions": "none"},
    {
        "gau.relative_bias": "rope",
        "chunks.local_attention": False,
        "norm": "scale",
        "mlp_dim": 72,
        "gau.expanded_dim": 40,
        "gau.heads": 4,
    },
    {"chunks.overlapping": True, "gau.query_key": "dense"},
    {"num_kv_heads": 1},
    {"window.global_tokens": 2},
    {"linformer.share_slots": "kv"},
]


def count(config) -> int:
    abstract = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param)))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "defaults")
@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_count(family, options):
    model = case(family, FORM[family], **options)
    assert sum(x.size for x in jax.tree.leaves(model.params)) == sizes.parameters(model.settings)


@pytest.mark.parametrize(("family", "millions"), [("flash", 112.0), ("flash_quad", 112.0), ("transformer", 109.5)])
def test_parameter_count_of_the_papers(family, millions):
    config = model_config(family, True, **BASE)
    assert count(config) == pytest.approx(millions * 1e6, rel=5e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_about_the_same_size(family):
    """num_layers means the same size in every family."""
    assert count(model_config(family, FORM[family], **BASE)) == pytest.approx(110e6, rel=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 3, "chunks.local_attention": False},
        {"chunks.global_attention": False, "gau.heads": 2},
        {"chunks.overlapping": True, "gau.query_key": "dense"},
        {"num_kv_heads": 1},
        {"window.global_tokens": 2, "window.dilated_heads": 2},
    ],
)
@pytest.mark.parametrize("length", [1, 8, 9, 29])
@pytest.mark.parametrize(("family", "causal"), CASES, ids=CASE_IDS)
def test_flops_count_the_visible_pairs(family, causal, length, options):
    model = case(family, causal, **options)
    flops = model.abstract.flops_per_token(length) * length
    assert flops == pytest.approx(sizes.flops(model.settings, length), rel=1e-9)


COUNTED = [family for family in FAMILIES if oracle_families.FAMILIES[family].xla_counts_flops]


@pytest.mark.representatives("transformer_plus_plus", "flash", "aft_local")
@pytest.mark.parametrize(
    "family",
    [
        x
        if x in ("flash", "performer")
        else pytest.param(x, marks=pytest.mark.slow("compiles a wide model of another family"))
        for x in COUNTED
    ],
)
def test_flops_are_those_that_xla_counts(family, monkeypatch):
    """One layer without loops, where XLA counts each product, and so wide that products dominate."""
    monkeypatch.setattr(aft, "_SIMPLE_BLOCK", 512)
    monkeypatch.setattr(blocked_attention, "SMALLEST", 512)
    monkeypatch.setattr(offset_attention, "_UNROLLED", 64)
    # Use the form without products for pairs without w.
    monkeypatch.setattr(aft, "fits", lambda k, v, bias: jnp.zeros((), bool))
    shape = {"num_layers": 1, "model_dim": 256, "num_heads": 2} | dict(oracle_families.FAMILIES[family].xla_keys)
    plain = {"quadratic.implementation": "plain", "scan_layers": False, "max_length": 512}
    model, length = case(family, False, **shape, **plain), 512
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.params)
    compiled = model.logits.lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    assert "while(" not in compiled.as_text()
    flops = model.model(model.params).flops_per_token(length) * length
    np.testing.assert_allclose(flops, compiled.cost_analysis()["flops"], rtol=0.02)
