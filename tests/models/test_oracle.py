"""Every family equals its float64 oracle: logits, and gradients by central differences of the oracle's loss."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from oracles import families as oracle_families
from oracles.language_model import cross_entropy

from flash_lm.families.family import FAMILIES, unused_keys
from models.cases import (
    CASE_IDS,
    CASES,
    LENGTH,
    PACKED,
    assert_close,
    case,
    model_config,
    real_tokens,
    standard,
    standard_segment_ids,
    targets,
    tokens,
)

pytestmark = pytest.mark.every_family

RTOL = 1e-5


def assert_logits_equal(model, segment_ids, logits, positions=None):
    keep = real_tokens(segment_ids)
    assert_close(np.asarray(logits)[keep], model.oracle(segment_ids, positions=positions)[keep], RTOL)


@pytest.mark.parametrize(("family", "causal"), CASES, ids=CASE_IDS)
def test_logits_of_full_sequences(family, causal):
    model = case(family, causal)
    assert_logits_equal(model, None, model.logits(model.params, tokens()))


@pytest.mark.parametrize(("family", "causal"), CASES, ids=CASE_IDS)
def test_logits_and_loss_of_packed_sequences(family, causal):
    model, (logits, loss, _) = case(family, causal), standard(family, causal)
    expected, keep = model.oracle(standard_segment_ids(family)), real_tokens(standard_segment_ids(family))
    assert np.abs(expected).max() > 1, "the comparison needs logits that are not tiny"
    assert_close(logits[keep], expected[keep], RTOL)
    np.testing.assert_allclose(loss, cross_entropy(expected, targets(), keep), rtol=RTOL)


# Without segment ids the bidirectional global part uses another function; all other code is the same.
@pytest.mark.parametrize(
    ("family", "causal", "packed"),
    [(*one, True) for one in CASES]
    + [(name, False, False) for name, row in oracle_families.FAMILIES.items() if row.without_segments],
)
def test_gradients(family, causal, packed):
    """Along random directions in all parameters; the embeddings of these tokens are the inputs, each used once."""
    model = case(family, causal)
    _, _, grads = standard(family, causal) if packed else model.run(None)
    rng = np.random.default_rng(2)
    segment_ids = standard_segment_ids(family) if packed else None
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), model.params)

    def loss(direction, step):
        shifted_params = jax.tree.map(lambda p, d: p + step * d, params, direction)
        return cross_entropy(model.oracle(segment_ids, params=shifted_params), targets(), real_tokens(segment_ids))

    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.linalg.norm(grad) > 1e-3, f"no gradient at {jax.tree_util.keystr(path)}"
    for _ in range(2):
        # Each parameter's share of the derivative is of order 1, so that none hides behind a large one. But a gradient
        # much below 1 is a sum of large terms that cancel, and dividing by it would magnify their rounding.
        direction = jax.tree.map(lambda g: rng.normal(size=g.shape) / max(np.linalg.norm(g), 1), grads)
        shares = jax.tree.leaves(jax.tree.map(lambda g, d: (g.astype(np.float64) * d).sum(), grads, direction))
        step = 1e-6
        slope = (loss(direction, step) - loss(direction, -step)) / (2 * step)
        np.testing.assert_allclose(sum(shares), slope, rtol=0, atol=1e-5 * len(shares))


@pytest.mark.parametrize(("family", "causal"), CASES, ids=CASE_IDS)
def test_defaults_of_the_open_keys(family, causal):
    for max_length in (512, 513):
        model = case(family, causal, max_length=max_length)
        sections = {name: vars(x) for name, x in vars(model.settings).items() if isinstance(x, SimpleNamespace)}
        section_keys = {f"{name}.{key}": value for name, x in sections.items() for key, value in x.items()}
        shared = {name: x for name, x in vars(model.settings).items() if name not in {*sections, "layers"}}
        for key, value in (shared | section_keys).items():
            setting = model.config.get(key)
            assert setting == value or (setting is None and f"model.{key}" in unused_keys([family])), key


def test_an_open_objective_means_causal():
    config = model_config("flash", True)
    config.causal = None
    assert case("flash", None).config.causal is True


def test_the_oracles_know_every_family():
    assert set(FAMILIES) == set(oracle_families.FAMILIES)


# Each value of each option at least once in both directions, for both gated attention units.
OPTIONS = {
    "t5-softmax": {
        "gau.relative_bias": "t5",
        "gau.attention_function": "softmax",
        "norm": "rms",
        "absolute_positions": "none",
        "gau.heads": 2,
        "gau.query_key": "dense",
    },
    "plain-laplace": {
        "gau.relative_bias": "none",
        "gau.attention_function": "laplace",
        "norm": "scale",
        "absolute_positions": "learned",
        "rotary": False,
        "divides": "weights",
    },
    "rope-length": {
        "gau.relative_bias": "rope",
        "norm": "layer",
        "absolute_positions": "sinusoid",
        "normalizer": "length",
        "tie_embeddings": True,
    },
    "everywhere-relu2": {"normalizer": "length_everywhere"},
    "weights-by-7": {"normalizer": "7", "divides": "weights"},
    "weights-by-length": {"normalizer": "length", "divides": "weights", "gau.relative_bias": "rope"},
    "everywhere-softmax": {"normalizer": "length_everywhere", "gau.attention_function": "softmax"},
    "count": {"normalizer": "count", "divides": "weights"},
    "two-heads": {"gau.heads": 2},
    "dense-two-heads": {"gau.heads": 2, "gau.query_key": "dense"},
}
ONE_WAY = {
    ("everywhere-softmax", False),
    ("count", True),  # plain-laplace has it
    ("weights-by-length", False),
    ("two-heads", False),
    ("dense-two-heads", False),
}  # the other direction tests nothing new
QUICK = ("t5-softmax", "plain-laplace", "rope-length")  # they cover most values
BOTH_WAYS = [True, pytest.param(False, marks=pytest.mark.slow("the bidirectional form"))]
OTHER_OPTIONS = pytest.mark.slow("compiles a model; other options, or the other direction, are in the quick run")


@pytest.mark.parametrize(
    ("option", "causal"),
    [
        pytest.param(option, causal, marks=() if causal and option in QUICK else OTHER_OPTIONS)
        for option in OPTIONS
        for causal in (True, False)
        if (option, causal) not in ONE_WAY
    ],
)
@pytest.mark.parametrize("family", ["flash", "flash_quad"])
def test_options(family, causal, option):
    model = case(family, causal, **OPTIONS[option])
    assert_logits_equal(model, PACKED, model.logits(model.params, tokens(), PACKED))


@pytest.mark.parametrize("off", ["chunks.local_attention", "chunks.global_attention"])
@pytest.mark.parametrize("causal", BOTH_WAYS, ids=["causal", "bidirectional"])
@pytest.mark.parametrize("family", ["flash", "mc_tfm"])
def test_without_a_part(family, causal, off):
    model = case(family, causal, **{off: False})
    assert_logits_equal(model, PACKED, model.logits(model.params, tokens(), PACKED))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=OTHER_OPTIONS),
        {"divides": "weights", "gau.relative_bias": "t5", "gau.attention_function": "laplace"},
        pytest.param({"gau.relative_bias": "rope", "normalizer": "length_everywhere"}, marks=OTHER_OPTIONS),
    ],
)
@pytest.mark.parametrize("causal", BOTH_WAYS, ids=["causal", "bidirectional"])
@pytest.mark.parametrize("family", ["flash", "mc_tfm"])
def test_overlapping_chunks(family, causal, options):
    model = case(family, causal, **{"chunks.overlapping": True}, **options)
    assert_logits_equal(model, PACKED, model.logits(model.params, tokens(), PACKED))


def test_overlapping_with_a_single_chunk():
    model = case("flash", True, **{"chunks.overlapping": True, "chunks.size": 32})
    assert_logits_equal(model, PACKED, model.logits(model.params, tokens(), PACKED))


@pytest.mark.parametrize("option", ["norm", "positions"])
def test_options_of_the_transformer(option):
    overrides = {
        "norm": {"norm": "rms", "absolute_positions": "sinusoid", "tie_embeddings": True, "mlp_dim": 48},
        "positions": {"rotary": True, "absolute_positions": "scaled_sinusoid", "norm": "scale"},
    }[option]
    model = case("transformer", True, **overrides)
    assert_logits_equal(model, None, model.logits(model.params, tokens()))


# Heads, ε and base of a Llama; none of them is a default.
LLAMA = {"num_heads": 4, "num_kv_heads": 2, "norm": "rms", "norm_epsilon": 0.05, "rotary_base": 100.0}


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("causal", BOTH_WAYS, ids=["causal", "bidirectional"])
@pytest.mark.parametrize("family", ["transformer_plus_plus"])
def test_heads_that_share_keys(family, causal, key_heads):
    model = case(family, causal, **LLAMA | {"num_kv_heads": key_heads})
    assert model.params["layers"]["sublayer_0"]["key"]["kernel"].shape[-1] == 8 * key_heads
    logits, _, grads = model.run(PACKED)
    assert_logits_equal(model, PACKED, logits)
    assert np.linalg.norm(grads["layers"]["sublayer_0"]["value"]["kernel"]) > 1e-3


@pytest.mark.parametrize("family", ["transformer", "flash"])
def test_positions_of_the_caller(family):
    """Positions that the caller passes replace those counted from the segment ids."""
    model = case(family, True, rotary=True)
    positions = np.stack([np.arange(LENGTH) // 2, (np.arange(LENGTH) * 7) % 31])
    assert_logits_equal(model, None, model.logits(model.params, tokens(), None, positions), positions)


@pytest.mark.parametrize("family", ["flash", "flash_quad"])
def test_widths_that_are_set(family):
    model = case(family, True, **{"gau.expanded_dim": 24, "gau.shared_dim": 4}, num_layers=1)
    assert_logits_equal(model, None, model.logits(model.params, tokens()))
