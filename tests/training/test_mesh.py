"""Every family on meshes of eight devices: the losses of one device, sharded arrays, checkpoints that change mesh."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import families as oracle_families
from oracles.row import Family
from small import text_tasks

from benchmarks.lib.collectives import count_collectives
from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.share import single_host_share
from flash_lm.families.family import FAMILIES, common_forms, complete
from flash_lm.layers import norms
from flash_lm.runs.run_name import run_name
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.checkpoint_write import Checkpoints, attach_shardings
from flash_lm.training.optimizer import OPTIMIZERS, make_optimizer
from flash_lm.training.sharding import batch_sharding, make_mesh, param_shardings, shard_batch, state_shardings
from flash_lm.training.train_state import ModelFunction, init_state
from flash_lm.training.train_step import make_scheduled_step

pytestmark = [pytest.mark.usefixtures("usual_promotion"), pytest.mark.representatives("flash")]

VOCAB, B, L, STEPS = 64, 8, 32, 3
MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2))


def batches(packed: bool):
    """Rows with padding at their end, of several documents if packed."""
    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        segments = np.sort(draw.integers(1, 4, (B, L), dtype=np.int32))
        segments = segments if packed else np.ones_like(segments)
        segments[:, L - 3 :] = 0
        starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=0) != 0, np.arange(L), 0), axis=1)
        yield {
            "inputs_BxL": draw.integers(VOCAB, size=(B, L), dtype=np.int32),
            "targets_BxL": draw.integers(VOCAB, size=(B, L), dtype=np.int32),
            "loss_mask_BxL": (segments > 0) * (draw.random((B, L)) < 0.7).astype(np.float32),
            "segment_ids_BxL": segments,
            "positions_BxL": (np.arange(L) - starts).astype(np.int32),
        }


HYBRID = "flash/transformer_plus_plus"


def get_family(family: str) -> Family:
    """The description of a family for these tests; an empty one for a hybrid."""
    return oracle_families.FAMILIES.get(family, Family(()))


class Run:
    """A few steps of a family, or of a pattern of families, on a mesh; `devices`: how many of the eight."""

    def __init__(self, family: str, task: str, shape: tuple, devices: int = 8, model: dict | None = None, **train_keys):
        config = get_config()
        config.task = task
        config.model.update(
            family=family.partition("/")[0],
            pattern=tuple(family.split("/")) if "/" in family else (),
            num_layers=2,
            model_dim=16,
            num_heads=4,
            gau={"shared_dim": 8},
            chunks={"size": 8},
            linear={"chunk_size": 8},
            mlp_dim=32,
            max_length=L,
        )
        # A window over the full sequence would leave AFT-conv's offset without a gradient.
        config.model.update(vocab_size=VOCAB, init="lecun", dropout=0.1, aft={"window": 5, "bias_dim": 8})
        config.model.update(dict(get_family(family).mesh) | (model or {}))
        config.data.tokens_per_batch = B * L
        # A large eps: where a gradient is only rounding error, so is the direction of Adam.
        config.train.update(warmup_steps=0, eps=1e-3, **train_keys)
        config.mesh.shape = shape
        parsed = parse(config)
        self.model = ModelFunction(complete(parsed.model), seed=0)
        self.optimizer = make_optimizer(parsed.train, self.model.traits())
        self.mesh = make_mesh(parsed.mesh, jax.devices()[:devices])
        abstract = jax.eval_shape(lambda: init_state(self.model, self.optimizer))
        self.shardings = state_shardings(abstract, self.model.traits().matrix, self.optimizer, parsed.mesh, self.mesh)
        self.abstract = attach_shardings(abstract, self.shardings)
        self._step = make_scheduled_step(self.model, self.optimizer, parsed.train, seed=0)
        self.losses = []

    def start(self):
        with jax.set_mesh(self.mesh):
            init = jax.jit(lambda: init_state(self.model, self.optimizer), out_shardings=self.shardings)
            return init()

    def go(self, state):
        with jax.set_mesh(self.mesh):
            step = jax.jit(self._step, out_shardings=(self.shardings, None))
            sharded = [
                shard_batch(batch, batch_sharding(self.mesh), single_host_share(B))
                for batch in batches("packed" in common_forms(self.model.config.families))
            ]
            compiled = step.lower(state, sharded[0]).compile()
            self.traffic = count_collectives(compiled.as_text())
            for batch in sharded:
                state, metrics = compiled(state, batch)
                self.losses.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        return state


@functools.cache
def one_device(family: str, task: str) -> Run:
    run = Run(family, task, (1, 1, 1), devices=1)
    run.final = run.go(run.start())
    return run


def assert_states_close(a, b):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.abs(x - y).max() <= 1e-4 * max(np.abs(y).max(), 1e-6), jax.tree_util.keystr(path)


# Each family causal over all three axes at once, and one masked; the other pairs are in `make test-all`.
# These pairs compile as long as aft_local and transformer do.
QUICK = [(family, text_tasks(family)[0], (2, 2, 2)) for family in FAMILIES]
ALL = [(family, task, shape) for family in FAMILIES for task in text_tasks(family) for shape in MESHES]
ALL.append((HYBRID, "causal_lm", (2, 2, 2)))


@pytest.mark.parametrize(
    ("family", "task", "shape"),
    [x if x in QUICK else pytest.param(*x, marks=pytest.mark.slow("another mesh or task")) for x in ALL],
)
def test_losses_and_updates_are_those_of_one_device(family, task, shape, monkeypatch):
    # A norm by head makes the first (q·k) v of a document v or −v, however small q·k is. With the usual ε of 1e-6 the
    # gradient norm of RetNet differs by 1e-4 between meshes, and two steps later by 5e-3.
    if get_family(family).normed_heads:
        monkeypatch.setattr(norms, "HEAD_EPSILON", 0.1)
    one, run = one_device(family, task), Run(family, task, shape)
    state = run.go(run.start())
    assert np.allclose(run.losses, one.losses, rtol=1e-5)
    assert_states_close(state, one.final)
    assert not one.traffic and run.traffic["all-reduce"].count
    # A rule that shards an array against the computation makes XLA redistribute activations.
    assert "all-to-all" not in run.traffic, run.traffic


@pytest.mark.slow("compiles the training step for one device and for eight")
@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_short_convolutions(task):
    """Filters are replicated; rows are sharded, and no row reads another."""
    keys = {"short_convolution": 4}
    one, run = Run("flash", task, (1, 1, 1), devices=1, model=keys), Run("flash", task, (2, 2, 2), model=keys)
    expected, state = one.go(one.start()), run.go(run.start())
    assert np.allclose(run.losses, one.losses, rtol=1e-5)
    assert_states_close(state, expected)
    assert "all-to-all" not in run.traffic, run.traffic
    filters = state.params["layers"]["sublayer_0"]["convolutions"]
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(filters))


_IN_TWO = "shared|beta|step_size|skip_map|taps"  # over fsdp alone, or tensor


def assert_matrices_are_sharded(tree) -> None:
    """Into four parts over fsdp and tensor; shared queries and keys of a unit, and maps to heads, into two."""
    cut = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if ("kernel" in name or "embedding" in name) and x.ndim > 1:
            cut[name] = len({str(shard.index) for shard in x.addressable_shards})
    assert cut and all(count == (2 if re.search(_IN_TWO, name) else 4) for name, count in cut.items()), cut


def test_a_matrix_without_a_rule_is_sharded_by_its_shape():
    """So a family of a plugin needs no rules; arrays that are no matrices, such as a bias, are replicated."""
    config = dataclasses.replace(parse(get_config()).mesh, shape=(2, 4, 1))
    shapes = {"layers": {"mine": (2, 8, 6), "wide": (2, 3, 5), "gains": (2, 8, 8)}, "mine": (6, 8), "bias": (8,)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple)
    matrix = {"layers": {"mine": True, "wide": True, "gains": False}, "mine": True, "bias": False}
    mesh = make_mesh(config, jax.devices()[:8])
    actual = jax.tree.map(lambda x: tuple(x.spec), param_shardings(abstract, matrix, config, mesh))
    assert actual == {
        "layers": {"mine": (None, "fsdp"), "wide": (None,), "gains": (None,)},
        "mine": (None, "fsdp"),
        "bias": (),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_moments_are_sharded_over_fsdp_and_tensor(family):
    state = Run(family, text_tasks(family)[0], (2, 2, 2)).start()
    moments = [optax.tree_utils.tree_get(state.opt_state, name) for name in ("mu", "nu")]
    for tree in (state.params, *moments):
        assert_matrices_are_sharded(tree)
        bytes_here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
        assert bytes_here < 0.45 * sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow("initialises, saves and restores a model of each family")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_restored_onto_another_mesh(family, tmp_path):
    source = Run(family, text_tasks(family)[0], (2, 2, 2))
    state = source.start()
    # Moments that are not zero, without the cost of a step.
    state = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) / 100, state)
    state = jax.tree.map(lambda x, s: jax.device_put(x.astype(s.dtype), s.sharding), state, source.abstract)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"corpus": "x"}, None)
    checkpoints.close()
    for shape, devices in (((1, 8, 1), 8), ((1, 1, 4), 4), ((1, 1, 1), 1)):
        target = Run(family, text_tasks(family)[0], shape, devices)
        restored, facts = restore(run_name(tmp_path), target.abstract)
        assert facts == {"corpus": "x"}
        for x, y, s in zip(*map(jax.tree.leaves, (restored, state, target.shardings)), strict=True):
            assert np.array_equal(x, y) and x.sharding.is_equivalent_to(s, x.ndim)


@pytest.mark.slow("compiles two training steps with each optimizer")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_is_sharded_and_agrees_with_one_device(name):
    keys = {"optimizer": name, "clip_mode": "parameter", "learning_rate": 1e-2}
    one, run = (Run("transformer", "causal_lm", *mesh, **keys) for mesh in (((1, 1, 1), 1), ((2, 2, 2), 8)))
    one.go(one.start())
    state = run.go(run.start())
    assert np.allclose(run.losses, one.losses, rtol=1e-5)
    assert_matrices_are_sharded(state.opt_state)
