"""Initial parameters of `build_model`."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from oracles.families import FAMILIES as ROWS

from flash_lm import build_model
from flash_lm.config.experiment import parse_model
from flash_lm.families.family import FAMILIES, complete
from models.cases import FORM, model_config

WIDE = {"model_dim": 128, "gau.shared_dim": 64, "num_heads": 2}


@functools.cache
def parameters(seed=0, **overrides) -> dict[str, np.ndarray]:
    config = model_config(**{"family": "flash", "causal": True, **WIDE, **overrides})
    state = nnx.to_pure_dict(nnx.state(build_model(config, rngs=nnx.Rngs(seed)), nnx.Param))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("init", ["normal", "lecun"])
def test_spread(init):
    for name, value in parameters(init=init).items():
        if name.endswith("kernel"):
            expected = 0.02 if init == "normal" else value.shape[-2] ** -0.5
        elif name.endswith("embedding"):
            expected = 0.02 if init == "normal" else value.shape[-1] ** -0.5
        elif name.endswith("weight"):  # the relative bias, at any init of the kernels
            expected = 0.02
        else:
            continue
        tolerance = 5 / np.sqrt(2 * value.size)
        assert value.std() == pytest.approx(expected, rel=tolerance), name
        assert abs(value.mean()) < 5 * expected / np.sqrt(value.size), name


def test_starting_values():
    for name, value in parameters(init="normal").items():
        if name.endswith(("offset", "bias")):
            assert (value == 0).all(), name
        elif name.startswith("positions"):
            assert value == pytest.approx(WIDE["model_dim"] ** -0.5)
        elif "norm" in name:
            assert (value == 1).all(), name
        elif "variants/scale" in name:  # FLASH: γ ~ N(0, 0.02)
            assert value.std() == pytest.approx(0.02, rel=0.3)


def test_megas_averages_start_as_the_authors_do():
    """δ, α ~ N(0, 0.2), β ~ ±1 in turn + N(0, 0.02), γ, ω ~ N(0, 1)."""
    values = {name.rpartition("/")[2]: x for name, x in parameters(family="mega").items() if "convolutions" in name}
    values["into"] = values["into"] - (1 - 2 * (np.arange(values["into"].shape[-1]) % 2))
    for name, deviation in {"damping": 0.2, "decay": 0.2, "into": 0.02, "out": 1, "own": 1}.items():
        size = values[name].size
        assert values[name].std() == pytest.approx(deviation, rel=5 / np.sqrt(2 * size)), name
        assert abs(values[name].mean()) < 5 * deviation / np.sqrt(size), name


def test_rwkv_starts_as_the_authors_middle_layer_does():
    """Layer n of N has (channel / D)^r with r = 1 − n / N; values have 0.3 n / (N − 1) more, 0.15 in the middle."""
    values = {name.partition("sublayer_")[2]: x for name, x in parameters(family="rwkv4").items()}
    channels, r, n = range(WIDE["model_dim"]), 0.5, 0.5
    fraction = np.array([i / WIDE["model_dim"] for i in channels])
    expected = {
        "0/convolutions/key": fraction**r,
        "0/convolutions/value": fraction**r + 0.3 * n,
        "0/convolutions/receptance": fraction ** (0.5 * r),
        "1/shift/key": fraction**r,
        "1/shift/receptance": fraction**r,
        "0/core/log_rate": [-5 + 8 * (i / (WIDE["model_dim"] - 1)) ** (0.7 + 1.3 * n) for i in channels],
        "0/core/bonus": [np.log(0.3) + 0.5 * ((i + 1) % 3 - 1) for i in channels],
    }
    for name, value in expected.items():
        for layer in values[name]:
            np.testing.assert_allclose(layer, value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("family", "init"), [("flash", "lecun"), ("mc_tfm", "lecun"), ("mc_tfm", "normal")])
def test_scores_of_the_linear_part_start_divided_by_the_root_of_their_width(family, init):
    """γ_q γ_k = 1/√K, as the quadratic part has in its equation. By default a GAU has the paper's initialisation."""
    start = {"init": init, "scale_init": "as_init"}
    width = WIDE["gau.shared_dim"]  # width of the queries of a GAU, and of a head
    scales = [value for name, value in parameters(family=family, **start).items() if "variants/scale" in name]
    for scale in scales:
        local, linear = np.split(scale, 2, axis=1)
        assert (local == 1).all()
        np.testing.assert_allclose(linear**2, width**-0.5, rtol=1e-6)
    assert scales


@pytest.mark.representatives("transformer_plus_plus", "flash")
@pytest.mark.parametrize("family", FAMILIES)
def test_draws_are_independent_and_repeatable(family):
    one, again, other = (parameters(seed, family=family, causal=FORM[family]) for seed in (0, 0, 1))
    # These are not random: the scales of `lecun` differ by part, convolutions are the identity, and RWKV's channels
    # differ by index.
    fixed = ROWS[family].fixed_init
    random = {name: value for name, value in one.items() if value.std() > 0 and not any(part in name for part in fixed)}
    assert len({value.tobytes() for value in random.values()}) == len(random), "two parameters are the same"
    for name, value in random.items():
        np.testing.assert_array_equal(value, again[name])
        assert (value != other[name]).any(), name
        if name.startswith("layers"):
            assert (value[0] != value[1]).any(), f"{name}: the layers are the same"


@pytest.mark.parametrize("family", FAMILIES)
def test_residual_init_scales_the_last_map_of_each_sublayer(family):
    """GPT-2: "by a factor of 1/√N where N is the number of residual layers", here two per layer."""
    changes = {"family": family, "causal": FORM[family], "num_layers": 3}
    one, other = (parameters(**changes, residual_init=start) for start in ("as_init", "depth"))
    scaled = {name for name, value in one.items() if (value != other[name]).any()}
    for name in scaled:
        np.testing.assert_allclose(other[name], one[name] / np.sqrt(6), rtol=1e-6)
        assert name.endswith(("output/kernel", "down/kernel"))
    sublayers = {name.split("/")[1] for name in one if "/sublayer_" in name}
    gated = set() if ROWS[family].ends_with_map else {"sublayer_0"}
    assert {name.split("/")[1] for name in scaled} == sublayers - gated


@pytest.mark.parametrize(
    ("family", "changes", "start"),
    [
        ("flash", {}, "as_init"),
        ("flash_quad", {}, "as_init"),
        ("flash", {"gau.attention_function": "softmax"}, "depth"),
        ("flash_quad", {"gau.query_key": "dense"}, "depth"),
        ("flash", {"gau.query_key": "dense"}, "as_init"),
        ("flash", {"gau.query_key": "dense", "divides": "weights"}, "depth"),
        ("flash", {"gau.attention_function": "laplace"}, "depth"),
        ("flash_quad", {"gau.attention_function": "laplace"}, "as_init"),
        ("flash", {"scale_init": "as_init"}, "depth"),
        ("flash", {"scale_init": "as_init", "init": "normal"}, "as_init"),
        ("flash", {"gau.attention_function": "softmax", "init": "normal"}, "as_init"),
        ("transformer", {"init": "normal"}, "depth"),
        ("mc_tfm", {}, "depth"),
        ("transformer", {}, "depth"),
        ("transformer", {"residual_init": "as_init"}, "as_init"),
    ],
)
def test_default_of_residual_init(family, changes, start):
    assert complete(parse_model(model_config(family, True, **changes))).residual_init == start


def test_parameter_dtype():
    assert {value.dtype.name for value in parameters(param_dtype="bfloat16").values()} == {"bfloat16"}
