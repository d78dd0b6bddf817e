"""Bounds on scores and logits: query-key norm, and a soft cap of the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_lm import build_mixer, build_model
from flash_lm.config.experiment import parse_model
from flash_lm.families.family import FAMILIES, complete, unused_keys
from flash_lm.models.formats.llama import LLAMA
from flash_lm.models.formats.settings import write_problems
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import HeadInputs, SoftmaxOptions
from models.cases import FORM, assert_close, case, model_config, standard_segment_ids
from models.cases import tokens as some_tokens

B, L, D, H = 2, 7, 32, 2
compute_logits = nnx.jit(lambda model, tokens: model(tokens))
prefill = nnx.jit(lambda model, tokens, state: model.prefill(tokens, state))
step = nnx.jit(lambda model, tokens, state: model.step(tokens, state))


def build(**keys):
    return build_model(model_config("transformer_plus_plus", True, num_layers=1, **keys), rngs=nnx.Rngs(0))


def draw_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(4, 30, size=(B, L), dtype=np.int32)


def rotate(x_LxK, base=10_000.0):
    """Applies rotary positions to the halves of a vector, as in Llama."""
    length, width = x_LxK.shape
    angles = np.arange(length)[:, None] * base ** (-np.arange(0, width, 2) / width)
    a, b = np.split(x_LxK, 2, axis=1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=1)


def test_normalised_queries_and_keys_follow_the_formula():
    mixer = build_mixer("transformer_plus_plus", model_dim=D, num_heads=H, query_key_norm=True, rngs=nnx.Rngs(0))
    attention, draw, width = mixer.sublayer, np.random.default_rng(0), D // H
    gains = draw.uniform(0.5, 2, size=(2, width))
    attention.query_norm.scale[...], attention.key_norm.scale[...] = np.float32(gains)
    weights = {name: 10 * draw.normal(size=(D, D)) for name in ("query", "key", "value", "output")}
    for name, kernel in weights.items():
        getattr(attention, name).kernel[...] = np.float32(kernel)
    x = draw.normal(size=(B, L, D))
    expected = np.zeros_like(x)
    for b in range(B):
        q, k, v = (np.split(x[b] @ weights[name], H, axis=1) for name in ("query", "key", "value"))
        joined = []
        for i in range(H):
            normal = [y / np.sqrt((y**2).mean(axis=1, keepdims=True) + 1e-6) for y in (q[i], k[i])]
            q_i, k_i = (rotate(y * gain) for y, gain in zip(normal, gains, strict=True))
            scores = q_i @ k_i.T / np.sqrt(width)
            scores[np.triu_indices(L, 1)] = -np.inf
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            joined.append(p / p.sum(axis=1, keepdims=True) @ v[i])
        expected[b] = np.concatenate(joined, axis=1) @ weights["output"]
    actual = nnx.jit(lambda mixer, x: mixer(x))(mixer, np.float32(x))
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


NORMED = [name for name, row in FAMILIES.items() if "model.query_key_norm" in row.reads()]
QUICK = (
    "longformer",
    "mc_tfm",
    "linear_transformer",
)  # separate projections, variants, and features of normalised queries


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow("another family")) for name in NORMED]
)
def test_each_family_with_the_norm_equals_its_oracle(family):
    model = case(family, FORM[family], query_key_norm=True)
    assert any("query_norm" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(model.params))
    logits = model.logits(model.params, some_tokens(), standard_segment_ids(family))
    keep = standard_segment_ids(family) > 0
    assert_close(np.asarray(logits)[keep], model.oracle(standard_segment_ids(family))[keep], 2e-4, family)


def test_global_tokens_have_separate_norms():
    keys = {"window.global_tokens": 2, "query_key_norm": True}
    model = case("longformer", False, **keys)
    logits = np.asarray(model.logits(model.params, some_tokens(), standard_segment_ids("longformer")))
    keep = standard_segment_ids("longformer") > 0
    assert_close(logits[keep], model.oracle(standard_segment_ids("longformer"))[keep], 2e-4)
    other = jax.tree_util.tree_map_with_path(
        lambda path, x: 2 * x if "global_key_norm" in jax.tree_util.keystr(path) else x, model.params
    )
    assert not np.allclose(
        logits[keep], model.oracle(standard_segment_ids("longformer"), params=other)[keep], atol=1e-2
    )


def test_steps_normalise_like_full_sequences():
    model, tokens = build(query_key_norm=True), draw_tokens()
    expected, state = np.asarray(compute_logits(model, tokens)), model.init_state(B)
    _, state = prefill(model, tokens[:, :3], state)
    for t in range(3, L):
        logits, state = step(model, tokens[:, t], state)
        np.testing.assert_allclose(logits, expected[:, t], rtol=1e-3, atol=1e-4)


def test_large_weights_leave_the_scores_as_they_are():
    """Scaling the query weights by ten has no effect with the norm, but has one without."""
    tokens = draw_tokens()

    def change(model):
        before = np.asarray(compute_logits(model, tokens))
        kernel = model.layers.sublayer_0.query.kernel
        kernel[...] = 10 * kernel[...]
        return np.abs(np.asarray(compute_logits(model, tokens)) - before).max()

    assert change(build(query_key_norm=True)) < 1e-4 < 1e-2 < change(build())


@pytest.mark.parametrize("tie", [True, False])
def test_logits_stay_within_the_cap_everywhere(tie):
    """In full sequences, steps, loss and scores; the loss agrees with the logits."""
    model = build(**{"softmax.cap": 1.5, "tie_embeddings": tie})
    table = model.embedding if tie else model.output_embedding
    table[...] = 5 * table[...]
    tokens = draw_tokens()
    targets = np.roll(tokens, -1, axis=1)

    @nnx.jit
    def read_head(model):
        features, head = model.features(ModelInputs(tokens)), model.head()
        rows = HeadInputs(features, targets, jnp.ones((B, L)), 1024, 1)
        return head._replace(cap=0.0).logits(features), head.loss(rows)[0], head.scores(rows)["nll"].sum()

    raw, loss, nll = (np.asarray(x, np.float64) for x in read_head(model))
    logits = np.asarray(compute_logits(model, tokens), np.float64)
    assert np.abs(raw).max() > 3
    np.testing.assert_allclose(logits, 1.5 * np.tanh(raw / 1.5), rtol=1e-4, atol=1e-5)
    state = model.init_state(B)
    for t in range(3):
        one, state = step(model, tokens[:, t], state)
        np.testing.assert_allclose(one, logits[:, t], rtol=1e-3, atol=1e-4)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[..., None], axis=-1).sum()
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert float(nll) == pytest.approx(expected, rel=1e-4)


def test_a_llama_has_neither_norm_nor_cap():
    for keys, name in (({"query_key_norm": True}, "query_key_norm"), ({"softmax.cap": 30.0}, "softmax.cap")):
        config = complete(parse_model(model_config("transformer_plus_plus", True, **keys)))
        assert any(problem.startswith(f"model.{name}=") for problem in write_problems(LLAMA, config))
    assert complete(parse_model(model_config("transformer_plus_plus", True)))[SoftmaxOptions].cap == 0


def test_other_families_do_not_read_the_norm():
    assert "model.query_key_norm" in unused_keys(["flash"]) and "model.query_key_norm" not in unused_keys(
        ["transformer"]
    )
