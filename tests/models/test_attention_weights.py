"""Attention weights: maps times values equal the sublayer's output, and each map follows its definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.families import FAMILIES as ROWS

from flash_lm.families.aft import _STD_EPS
from flash_lm.families.family import FAMILIES
from flash_lm.models.attention_weights import attention_weights
from flash_lm.models.model_inputs import ModelInputs
from models.cases import CAUSAL, FORM, LENGTH, PACKED, assert_close, case, tokens

pytestmark = pytest.mark.representatives("transformer", "flash")


def maps(family: str, causal: bool | None = None, segment_ids=None, **overrides):
    model, parts = case(family, FORM[family] if causal is None else causal, **overrides), []

    def arrays(params):
        parts[:] = attention_weights(model.model(params), jnp.asarray(tokens()), segment_ids)
        return [one.weights_BxHxLxL for one in parts]

    weights = jax.jit(arrays)(model.params)
    return model, [dataclasses.replace(one, weights_BxHxLxL=x) for one, x in zip(parts, weights, strict=True)]


def first_mixer(model, params):
    """Returns the mixer of the first layer, its input, and its context."""
    bound = model.model(params)
    x, context = bound.embed(ModelInputs(jnp.asarray(tokens())))
    *before, mixer = bound.unstacked_blocks()[0].residuals()[: FAMILIES[model.family].mixer + 1]
    for residual in before:
        x = residual.after(x, residual.sublayer(residual.before(x), context))
    return mixer.sublayer, mixer.before(x), context


@pytest.mark.parametrize("family", CAUSAL)
def test_invisible_tokens_have_no_weight(family):
    """Neither later tokens nor those of another document have weight."""
    _, parts = maps(family, segment_ids=PACKED)
    visible = (PACKED[:, :, None] == PACKED[:, None]) & np.tri(LENGTH, dtype=bool) & (PACKED > 0)[:, None]
    visible[0, :10, 13:22] = visible[0, 13:22, :10] = False  # a repeated id is another document
    for one in parts:
        weights = np.asarray(one.weights_BxHxLxL)
        invisible = np.broadcast_to(~visible[:, None] & (PACKED > 0)[:, None, :, None], weights.shape)
        assert not (np.abs(weights) > 1e-6)[invisible].any()
        assert np.abs(weights).max() > 1e-3
    assert {one.layer for one in parts} == {0, 1}


@pytest.mark.parametrize("family", [name for name in FAMILIES if ROWS[name].by_pairs])
def test_weights_times_values_are_the_output(family):
    model, parts = maps(family)

    @jax.jit
    def values_and_outputs(params):
        sublayer, x, context = first_mixer(model, params)
        pairs, v, _ = sublayer.project(x, context)
        return v, sublayer.core(pairs, v, context)

    v, expected = map(np.asarray, values_and_outputs(model.params))
    first = [one for one in parts if (one.layer, one.sublayer) == (0, FAMILIES[family].mixer)]
    total = sum(np.asarray(one.weights_BxHxLxL) for one in first)
    assert_close(np.einsum("bhtu,bhue->bhte", total, v), expected, 1e-5)


def test_softmax_weights_by_definition():
    model, parts = maps("transformer")

    @jax.jit
    def queries_and_keys(params):
        sublayer, x, context = first_mixer(model, params)
        return sublayer.project(x, context).by["attention"]

    q, k = queries_and_keys(model.params)
    scores = np.einsum("bhtd,bhud->bhtu", *(np.asarray(one, np.float64) for one in (q, k))) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(LENGTH, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    assert_close(parts[0].weights_BxHxLxL, weights / weights.sum(axis=-1, keepdims=True), 1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_the_parts_of_mixed_chunks(causal):
    """The local part stays in its chunk; the global part covers earlier chunks if causal, else all."""
    _, parts = maps("flash", causal)
    chunk = np.arange(LENGTH) // 8
    global_, local = (np.abs(np.asarray(one.weights_BxHxLxL)) > 1e-6 for one in parts[:2])
    assert [one.term for one in parts[:4]] == ["global", "local"] * 2
    assert [(one.layer, one.sublayer) for one in parts[::2]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert local.any() and not local[..., chunk[:, None] != chunk[None]].any()
    reached = global_.any(axis=(0, 1))
    assert (reached == (chunk[:, None] > chunk[None] if causal else np.ones_like(reached))).all()


def test_one_part_alone():
    _, parts = maps("flash", **{"chunks.global_attention": False})
    assert {one.term for one in parts} == {"local"}


@pytest.mark.parametrize("family", ["aft_full", "aft_local", "aft_conv", "aft_simple"])
def test_weights_of_aft(family):
    """Weights sum to one. exp(w) follows the definition, is one beyond the window, and absent in AFT-simple."""
    model, parts = maps(family)
    by_part = {one.term: np.asarray(one.weights_BxHxLxL) for one in parts if one.layer == 0}
    np.testing.assert_allclose(by_part["attention"].sum(axis=-1), 1, rtol=1e-5)
    assert ("exp(w)" in by_part) == (family != "aft_simple")
    if family == "aft_simple":
        return
    core = {name: x[0].astype(np.float64) for name, x in model.params["layers"]["sublayer_0"]["core"].items()}
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
    if family == "aft_conv":
        taps = core["taps"]
        normal = (taps - taps.mean(1, keepdims=True)) / np.sqrt(taps.var(1, keepdims=True) + _STD_EPS)
        filters = core["gain"] * normal + core["offset"]
        w = filters[:, distance.clip(0, 4)]
    else:
        w = core["query_position"] @ core["key_position"].T
        w = w[None, :LENGTH, :LENGTH]
    near = distance < (LENGTH if family == "aft_full" else 5)
    expected = np.where(distance >= 0, np.where(near, np.exp(w), 1), 0)
    np.testing.assert_allclose(by_part["exp(w)"][0], expected, rtol=1e-4)


def test_layers_of_a_pattern_are_numbered_consecutively():
    _, parts = maps("flash", pattern=("flash", "transformer_plus_plus"), num_layers=4)
    assert [(one.layer, one.sublayer, one.term) for one in parts[:5]] == [
        (0, 0, "global"),
        (0, 0, "local"),
        (0, 1, "global"),
        (0, 1, "local"),
        (1, 0, "attention"),
    ]
    assert parts[-1].layer == 3 and {one.weights_BxHxLxL.shape[0] for one in parts} == {2}
