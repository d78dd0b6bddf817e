"""Conversion: a Transformer's weights in another family are the same function where that family can compute it."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from flash_lm.errors import InputError
from flash_lm.layers.parameter import parameter_name
from flash_lm.models.conversion import Conversion, convert
from models.cases import Case, assert_close

L, VOCAB = 64, 61
# As a Llama: shared keys, tied embeddings, RMS norms, another base of the rotary angles; and biases, as in Qwen2.
LLAMA = {
    "num_layers": 4,
    "model_dim": 48,
    "num_heads": 6,
    "num_kv_heads": 2,
    "max_length": L,
    "vocab_size": VOCAB,
    "tie_embeddings": True,
    "norm": "rms",
    "norm_epsilon": 1e-5,
    "rotary_base": 300.0,
    "biases": "qkv",
    "chunks.size": L,
    "window.size": L,
}
ZERO, LOCAL = {"chunks.zero_global": True}, {"chunks.global_attention": False}
WINDOW = {"feed_forward": "glu", "mlp_dim": 128, "window.dilations": (1,), "window.growth": 1.0}
PATTERN = {"pattern": ("mc_tfm", "transformer_plus_plus"), "num_kv_heads": 2, **ZERO}
EQUAL = {
    "chunk": ("mc_tfm", LOCAL),
    "chunk and sums": ("mc_tfm", ZERO),
    "window": ("longformer", WINDOW),
    "window and first tokens": ("longformer", WINDOW | {"window.global_tokens": 3}),
    "window over everything": ("window_linear", {"num_kv_heads": 2, "window_linear.size": L}),
    "pattern": ("transformer_plus_plus", PATTERN),
    "repeated heads": ("transformer_plus_plus", {"num_kv_heads": 6}),
}
ALL, OF_LAYERS = (0, 1, 2, 3), "layers/"
SHARED = {f"layers/sublayer_0/{name}/{part}" for name in ("key", "value") for part in ("kernel", "bias")}
VARIANTS = {f"layers/sublayer_0/{name}_variants/{part}" for name in ("query", "key") for part in ("scale", "offset")}


@functools.cache
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(VOCAB, size=(2, L))


def documents() -> np.ndarray:
    """Documents and padding, in rows that are full and in rows that are not."""
    return np.array([[1] * 19 + [2] * 31 + [0] * 5 + [3] * 9, [1] * L])


@functools.cache
def llama() -> Case:
    return Case("transformer_plus_plus", True, LLAMA)


@functools.cache
def expected() -> np.ndarray:
    return np.asarray(llama().logits(llama().params, tokens(), documents()))


def converted(source: Case, target: Case) -> Conversion:
    """The source in the target's family, with new parameters as they are initialised."""
    fresh = nnx.to_pure_dict(nnx.state(target._build(), nnx.Param))
    return convert(source.params, source.config, target.config, fresh)


def student(family: str, **keys) -> Case:
    """A model of another family with the Llama's keys."""
    return Case(family, True, LLAMA | {"num_kv_heads": None} | keys)


@functools.cache
def equal(name: str) -> tuple[Case, Conversion]:
    family, keys = EQUAL[name]
    target = student(family, **keys)
    return target, converted(llama(), target)


@pytest.mark.parametrize("name", EQUAL)
def test_the_same_logits(name):
    """Rows of several documents, in the parallel form."""
    target, (params, _) = equal(name)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, target.params)
    keep = documents() > 0
    assert_close(np.asarray(target.logits(params, tokens(), documents()))[keep], expected()[keep], 1e-5)


# Decoding of each family has its own tests.
@pytest.mark.parametrize(
    "name",
    [x if x == "pattern" else pytest.param(x, marks=pytest.mark.slow("compiles prefill and step")) for x in EQUAL],
)
def test_the_same_logits_when_decoding(name):
    """A prompt, then tokens one by one; the second row is one document."""
    target, (params, _) = equal(name)
    rows, start = tokens()[1:], 29
    logits, state = target.prefill(params, rows[:, :start], target.init_state(1), np.array([start]))
    assert_close(logits, expected()[1:, :start], 1e-5)
    for t in range(start, L):
        logits, state = target.step(params, rows[:, t], state)
        assert_close(logits, expected()[1:, t], 1e-5, f"token {t}")


def test_a_zero_start_is_the_local_part_alone():
    """Chunks that see nothing of each other; but the first step changes that."""
    keys = {"chunks.size": 16, "biases": "none"}
    source = Case("transformer_plus_plus", True, LLAMA | keys)
    both, local = (student("mc_tfm", **keys, **more) for more in (ZERO, LOCAL))
    (params, _), (alone, _) = converted(source, both), converted(source, local)
    batch = (tokens(), np.roll(tokens(), -1, axis=1), np.ones((2, L), np.float32), documents())
    (_, logits), grads = both.loss_and_grads(params, *batch)
    np.testing.assert_allclose(logits, local.logits(alone, tokens(), documents()), rtol=0, atol=1e-6 * 15)
    of_queries, of_keys = (grads["layers"]["sublayer_0"][f"{name}_variants"] for name in ("query", "key"))
    for name in ("scale", "offset"):
        assert (np.abs(of_queries[name][:, 1]).max(axis=(-2, -1)) > 1e-3).all() and not np.any(of_keys[name][:, 1])


def names(params: dict) -> set[str]:
    return {parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}


def biases(*of: str) -> set[str]:
    return {f"layers/sublayer_0/{name}/bias" for name in of}


def test_the_report_of_a_family_with_scale_offsets():
    _, (params, report) = equal("chunk and sums")
    assert set(report.widened) == SHARED and set(report.new) == VARIANTS
    assert set(report.taken) == names(params) - SHARED - VARIANTS
    assert report.taken["embedding"] == () and report.taken["layers/norm_sublayer_1/scale"] == ALL
    assert report.restacked == report.left_out == {}


def test_the_report_of_global_tokens():
    _, (params, report) = equal("window and first tokens")
    of_global = {name.replace("sublayer_0/", "sublayer_0/global_") for name in SHARED}
    assert set(report.widened) == SHARED | of_global and report.new == report.left_out == {}
    window = params["layers"]["sublayer_0"]
    for name in ("query", "key", "value"):
        jax.tree.map(np.testing.assert_array_equal, window[f"global_{name}"], window[name])


def test_the_report_of_a_pattern():
    _, (_, report) = equal("pattern")
    assert report.widened == dict.fromkeys(SHARED, (0, 2)) and report.new == dict.fromkeys(VARIANTS, (0, 2))
    assert report.taken["layers/sublayer_3/up/kernel"] == report.taken["layers/sublayer_2/key/kernel"] == (1, 3)
    assert set(report.restacked) == {name for name in report.taken if name.startswith(OF_LAYERS)} | SHARED


def test_a_pattern_becomes_one_family():
    """Some layers have scale-offsets, and the others get new ones; some heads are widened already."""
    source, (params, _) = equal("pattern")
    target = student("mc_tfm", **ZERO)
    fresh = nnx.to_pure_dict(nnx.state(target._build(), nnx.Param))
    after, report = convert(params, source.config, target.config, fresh)
    assert all(report.taken[name] == (0, 2) and report.new[name] == (1, 3) for name in VARIANTS)
    assert all(report.taken[name] == (0, 2) and report.widened[name] == (1, 3) for name in SHARED)
    jax.tree.map(np.testing.assert_array_equal, after, equal("chunk and sums")[1].params)


def test_each_head_of_keys_is_repeated_for_its_heads_of_queries():
    wide, narrow = equal("repeated heads")[1].params, llama().params
    for name in ("key", "value"):
        pair = (x["layers"]["sublayer_0"][name]["kernel"] for x in (wide, narrow))
        heads, shared = (x.reshape(4, 48, -1, 8) for x in pair)
        for head in range(6):
            np.testing.assert_array_equal(heads[:, :, head], shared[:, :, head // 3])


def test_the_same_config_takes_everything():
    params, report = convert(llama().params, llama().config, llama().config, llama().params)
    jax.tree.map(np.testing.assert_array_equal, params, llama().params)
    assert set(report.taken) == names(params) and not any(report[1:])


GLU = {"feed_forward": "glu", "mlp_dim": 128}
DECAYS = {"decay_down/kernel", "decay_up/kernel", "decay_bias"}
DELTA = {"delta.key_dim": 48, "delta.value_dim": 48, "short_convolution": 0}
RECURRENT = {"beta/kernel", "step_size/kernel", "log_rate", "step_bias"}
PLAIN = {"output_gate": "none", "head_norm": False}
NORMED = {"gate/kernel", "gain"}


@pytest.mark.parametrize(
    ("family", "keys", "new"),
    [
        ("linear_transformer", {**GLU, "biases": "qkv", "rotary": True, "absolute_positions": "none"}, set()),
        ("gla", {"gla.key_dim": 48}, DECAYS | NORMED),
        ("gla", {"gla.key_dim": 48, **PLAIN}, DECAYS),
        ("gated_deltanet", {**DELTA, "mlp_dim": 128}, RECURRENT | NORMED),
        ("gated_deltanet", {**DELTA, **PLAIN, "mlp_dim": 128, "delta.decay": False}, {"beta/kernel"}),
    ],
)
def test_the_report_of_sums(family, keys, new):
    """Biases that the family does not have are left out."""
    target = student(family, **{"biases": "none", **keys})
    params, report = converted(llama(), target)
    shared = SHARED & names(params)
    assert set(report.widened) == shared and report.new == {f"layers/sublayer_0/{name}": ALL for name in new}
    assert set(report.taken) == names(params) - shared - set(report.new) and report.restacked == {}
    lost = set() if target.config.biases == "qkv" else biases("query", "key", "value")
    assert report.left_out == dict.fromkeys(lost, ALL)


def test_parameters_have_the_targets_dtype():
    target = student("mc_tfm", param_dtype="bfloat16")
    params, _ = converted(llama(), target)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}


@pytest.mark.parametrize(
    ("family", "keys", "lines"),
    [
        ("mc_tfm", {"norm": "layer"}, ["model.norm=rms in the source, and layer in the target"]),
        (
            "mc_tfm",
            {"tie_embeddings": False, "num_heads": 3, "rotary_base": 500.0},
            [
                "model.tie_embeddings=True in",
                "model.num_heads=6 in",
                "model.head_dim=8 in",
                "model.rotary_base=300.0 in",
            ],
        ),
        ("longformer", {}, ["model.feed_forward=glu in the source, and mlp in the target"]),
        (
            "gla",
            {"biases": "none", "mlp_dim": 64},
            [
                *(
                    f"layers/sublayer_0/{name}/kernel of a layer is {shape} in"
                    for name, shape in (("key", "[48, 16] of 2 heads"), ("query", [48, 48]))
                ),
                "layers/sublayer_1/down/kernel of a layer is [128, 48] in the source, and [64, 48] in the target: no",
                *(f"layers/sublayer_1/{name}/kernel of a layer is [48, 128] in" for name in ("gate", "up")),
            ],
        ),
        ("transformer_plus_plus", {"num_kv_heads": 3}, [f"{name} of a layer is" for name in sorted(SHARED)]),
        ("transformer_plus_plus", {"encoder.family": "transformer"}, ["a model with an encoder cannot be converted"]),
    ],
)
def test_what_is_refused(family, keys, lines):
    target = student(family, **keys)
    with pytest.raises(InputError) as refusal:
        convert(llama().params, llama().config, target.config, target.params)
    said = str(refusal.value).splitlines()
    assert len(said) == len(lines) and all(line.startswith(start) for line, start in zip(said, lines, strict=True)), (
        said
    )
