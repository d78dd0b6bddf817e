"""Kernels of an installed package: the cores that they serve equal the oracles, and what they cannot do is said."""

import pathlib
import re

import jax
import numpy as np
import pytest
from models.cases import PACKED, Case, assert_close, assert_trees_close, model_config, real_tokens, standard, tokens

from flash_lm.config.experiment import parse
from flash_lm.config.mesh import MeshConfig
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.layers.kernel_packages import CORES, load_kernels
from flash_lm.ops.implementations import recorded
from flash_lm.training.sharding import make_mesh

# The cores token by token, from the equations of `CORES`: `scan` resets the state where a document begins.
PACKAGE = """
import jax
import jax.numpy as jnp
from flash_lm.extend import CoreKernel

def scan(next_state, by, v, runs):
    heads = v.shape[1]
    by = [jnp.broadcast_to(x, (x.shape[0], heads, *x.shape[2:])).astype(jnp.float32) for x in by]
    first = jnp.concatenate([jnp.ones_like(runs[:, :1], bool), runs[:, 1:] != runs[:, :-1]], axis=1)

    def step(state, inputs):
        (q, *rest), v, first = inputs
        state = next_state(jnp.where(first[:, None, None, None], 0, state), rest, v)
        return state, jnp.einsum("bhk,bhke->bhe", q, state)

    of_tokens = lambda x: jnp.moveaxis(x, 2, 0)
    state = jnp.zeros((*v.shape[:2], by[0].shape[-1], v.shape[-1]))
    inputs = ([of_tokens(x) for x in by], of_tokens(v.astype(jnp.float32)), first.T)
    return jnp.moveaxis(jax.lax.scan(step, state, inputs)[1], 0, 2).astype(v.dtype)

def write(k, v):
    return jnp.einsum("bhk,bhe->bhke", k, v)

def delta(state, rest, v):
    k, g, beta = rest
    state = jnp.exp(g)[..., None, None] * state
    return state + write(k, beta[..., None] * (v - jnp.einsum("bhk,bhke->bhe", k, state)))

STATES = {
    "linear_sums": lambda state, rest, v: state + write(rest[0], v),
    "decayed_sums": lambda state, rest, v: jnp.exp(rest[1])[..., None, None] * state + write(rest[0], v),
    "gated_sums": lambda state, rest, v: jnp.exp(rest[1])[..., None] * state + write(rest[0], v),
    "delta_rule": delta,
}

def kernel(next_state):
    return CoreKernel(lambda by, v, runs: scan(next_state, by, v, runs))

def fails(by, v, runs):
    raise NotImplementedError("no Hopper GPU")

KERNELS = {name: kernel(state) for name, state in STATES.items()}
PARTS = {"decayed_sums": CoreKernel(fails), "gated_sums": CoreKernel(fails, lambda by, v: f"values of {v.shape[-1]}")}
def of_many_heads(by, v, runs):
    if v.shape[1] == 1:
        raise ValueError("1 head")
    return v

MANY = {"decayed_sums": CoreKernel(of_many_heads)}
WRONG = {"sums": KERNELS["linear_sums"]}
LIST = ["linear_sums"]
"""
ENTRIES = {
    "scans": "token_scans:KERNELS",
    "parts": "token_scans:PARTS",
    "many": "token_scans:MANY",
    "wrong": "token_scans:WRONG",
    "list": "token_scans:LIST",
    "gone": "no_such_module:KERNELS",
}
FAMILIES = {
    "linear_transformer": "linear_sums",
    "retnet": "decayed_sums",
    "mamba2": "decayed_sums",
    "gla": "gated_sums",
    "gated_deltanet": "delta_rule",
}


def implementations(family: str, causal: bool, **keys) -> dict[str, list[str]]:
    """What the parts of a model use."""
    one = Case(family, causal, keys)
    with recorded() as said:
        jax.eval_shape(one.logits, one.params, tokens(), PACKED)
    return said


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """A package with these entry points, installed as pip would."""
    (tmp_path / "token_scans.py").write_text(PACKAGE)
    info: pathlib.Path = tmp_path / "token_scans-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: token_scans\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in ENTRIES.items())
    (info / "entry_points.txt").write_text(f"[flash_lm.kernels]\n{lines}")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("linear_transformer", "retnet") else pytest.param(name, marks=pytest.mark.slow("another core"))
        for name in FAMILIES
    ],
)
def test_a_compute_by_package_equals_the_oracle(family):
    one, keep = Case(family, True, {"kernels": "scans"}), real_tokens(PACKED)
    with recorded() as said:
        logits, loss, grads = one.run(PACKED)
    assert said == {FAMILIES[family].replace("_", " "): ["scans"]}
    assert_close(logits[keep], one.oracle(PACKED)[keep], 1e-5)
    _, expected_loss, expected_grads = standard(family, True)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    if family != "mamba2":  # which has a gradient that cancels, and RetNet's core
        assert_trees_close(grads, expected_grads, 1e-5)


@pytest.mark.parametrize(
    ("family", "causal", "kernels", "reason"),
    [
        ("retnet", True, "parts", "compiled by XLA, NotImplementedError: no Hopper GPU"),
        ("gla", True, "parts", r"compiled by XLA, values of \d+"),
        ("linear_transformer", True, "parts", "compiled by XLA, parts has no linear_sums"),
        ("linear_transformer", False, "scans", "compiled by XLA, the bidirectional form is two products"),
    ],
)
def test_what_a_package_cannot_compute_is_left_to_xla(family, causal, kernels, reason):
    assert re.fullmatch(reason, implementations(family, causal, kernels=kernels)[FAMILIES[family].replace("_", " ")][0])


@pytest.mark.slow("compiles another program, on a mesh")
def test_each_device_of_a_mesh_computes_its_part():
    """A package that cannot compute the part of a device leaves the core to XLA."""
    rows, ids = np.concatenate([tokens()] * 2), np.concatenate([PACKED] * 2)
    outputs, said = [], {}
    for kernels in ("auto", "scans", "many"):
        one = Case("retnet", True, {"kernels": kernels})
        with jax.set_mesh(make_mesh(MeshConfig(shape=(2, 2, 2), rules=()))), recorded() as said[kernels]:
            outputs.append(np.asarray(one.logits(one.params, rows, ids)))
    assert_close(outputs[1][ids > 0], outputs[0][ids > 0], 1e-5)
    np.testing.assert_array_equal(outputs[2], outputs[0])
    assert said["scans"] == {"decayed sums": ["scans"]}
    assert said["many"]["decayed sums"][0] == "compiled by XLA, ValueError: 1 head"


def test_auto_takes_no_package():
    assert implementations("retnet", True) == {"decayed sums": ["compiled by XLA, cpu has no kernels"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", f"there is no core sums: one of {', '.join(CORES)}"),
        ("list", "token_scans:LIST must be a dict from names of cores to CoreKernel"),
        ("gone", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_wrong_package_is_one_clear_line(name, message):
    with pytest.raises(InputError, match=f"^model.kernels={name}: {message}$"):
        load_kernels(name)


def test_only_installed_packages_can_be_named():
    config = get_config()
    config.model.kernels = "missing"
    with pytest.raises(
        InputError, match="model.kernels=.*one of auto, xla, pallas, gone, list, many, parts, scans, wrong, or install"
    ):
        parse(config)
    assert model_config("retnet", True, kernels="scans").kernels == "scans"


def test_every_core_has_a_family():
    assert CORES.keys() == set(FAMILIES.values())
