"""Parameters, moments and batches on a mesh of eight fake devices."""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.config.mesh import MESH_AXES, MeshConfig
from flash_lm.errors import InputError
from flash_lm.training import sharding
from flash_lm.training.resume import new_state
from flash_lm.training.setup import build_experiment
from flash_lm.training.sharding import (
    batch_sharding,
    check_batch,
    host_share,
    make_mesh,
    param_shardings,
    report_shared_heads,
    shard_batch,
)

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return small_config(write_corpus(folder / "text"), folder / "cache", "flash")


def test_moments_are_sharded_like_parameters_from_the_start(config):
    config = config.copy_and_resolve_references()
    config.mesh.shape = (2, 2, 2)
    experiment = build_experiment(parse(config))
    with jax.set_mesh(experiment.mesh):
        state = new_state(experiment)
    gate = state.params["layers"]["sublayer_0"]["gate"]["kernel"]
    assert gate.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert gate.addressable_shards[0].data.size == gate.size // 4
    output = state.params["layers"]["sublayer_0"]["output"]["kernel"]
    assert output.sharding.spec == jax.sharding.PartitionSpec(None, ("tensor", "fsdp"), None)
    assert output.addressable_shards[0].data.shape == (len(output), output.shape[1] // 4, output.shape[2])
    assert state.params["embedding"].addressable_shards[0].data.size == state.params["embedding"].size // 4
    for moment in ("mu", "nu"):
        moments = optax.tree_utils.tree_get(state.opt_state, moment)
        same = jax.tree.map(lambda m, p: m.sharding == p.sharding, moments, state.params)
        assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 2, 1), (-1, 3, 1)])
def test_a_mesh_that_does_not_fit_the_devices(shape):
    with pytest.raises(InputError, match="must make 8, the number of devices"):
        make_mesh(MeshConfig(shape=shape, rules=()))


def test_a_batch_that_does_not_divide():
    mesh = make_mesh(MeshConfig(shape=(4, -1, 1), rules=()))
    check_batch(mesh, 16, 2)
    with pytest.raises(InputError, match="multiple of data x fsdp x train.accumulate = 16"):
        check_batch(mesh, 24, 2)
    with pytest.raises(InputError, match="raise --config.data.tokens_per_batch to 4096, change"):
        check_batch(mesh, 4, 1, length=512)
    check_batch(mesh, 4096 // 512, 1, length=512)


def test_rules_that_do_not_fit_a_parameter(config):
    config = config.copy_and_resolve_references()
    config.mesh.update(
        shape=(1, 8, 1), rules=(("scale", ("fsdp", None, None, None)), ("shared/kernel", (None, "fsdp")))
    )
    config.model.gau.shared_dim = 12
    with pytest.raises(InputError) as error:
        build_experiment(parse(config))
    assert "more dimensions than the parameter" in str(error.value)
    assert "fsdp=8 does not divide a dimension of 12" in str(error.value)


def test_the_first_rule_that_divides_counts(config):
    """Of 6 inputs, two devices take three each, and eight cannot."""
    rules = parse(config).mesh
    matrix = {"layers": {"sublayer_0": {"output": {"kernel": True}}}}

    def spec(shape, inputs):
        mesh = jax.sharding.AbstractMesh(shape, MESH_AXES)
        abstract = {"layers": {"sublayer_0": {"output": {"kernel": jax.ShapeDtypeStruct((2, inputs, 64), "float32")}}}}
        return param_shardings(abstract, matrix, rules, mesh)["layers"]["sublayer_0"]["output"]["kernel"].spec

    assert spec((1, 4, 2), 64) == jax.sharding.PartitionSpec(None, ("tensor", "fsdp"), None)
    assert spec((1, 4, 2), 6) == jax.sharding.PartitionSpec(None, "tensor", "fsdp")
    with pytest.raises(InputError, match="tensor x fsdp=8 does not divide a dimension of 3"):
        spec((1, 4, 2), 3)


@pytest.mark.parametrize(
    ("family", "tensor", "heads", "said"),
    [("flash", 8, 1, True), ("flash", 4, 1, False), ("flash", 8, 8, False), ("mamba2", 8, 1, False)],
)
def test_what_a_large_tensor_axis_costs_shared_heads_is_said(config, family, tensor, heads, said, caplog):
    config = config.copy_and_resolve_references()
    config.model.update(family=family, gau={"heads": heads})
    with caplog.at_level("WARNING", "flash_lm"):
        report_shared_heads(parse(config).model, jax.sharding.AbstractMesh((1, 8 // tensor, tensor), MESH_AXES))
    assert ("tensor=8" in caplog.text and "1 head:" in caplog.text) == said
    assert len(caplog.records) == said


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX says of a device on several machines; what it calls a slice is a machine with GPUs, or a TPU slice."""

    id: int
    process_index: int
    slice_index: int
    platform: str
    device_kind: str
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


GPUS = [Chip(i, i // 4, i // 4, "gpu", "NVIDIA H100") for i in range(16)]
TPUS = [  # two slices of 4 x 2 chips, with two hosts of 2 x 2 each
    Chip(8 * number + 2 * x + y, 2 * number + x // 2, number, "tpu", "TPU v5 lite", (x, y, 0))
    for number, x, y in itertools.product(range(2), range(4), range(2))
]


@pytest.mark.parametrize("shape", [(-1, 1, 1), (1, -1, 1), (2, 2, 4), (4, 1, 4), (1, 8, 2), (1, 1, 16)], ids=str)
@pytest.mark.parametrize("devices", [GPUS, TPUS], ids=["GPUs", "TPUs"])
def test_machines_and_slices_divide_the_first_axes(shape, devices):
    """jax.make_mesh refuses them. The slices are the blocks of the mesh that are outermost."""
    mesh = make_mesh(MeshConfig(shape=shape, rules=()), devices)
    assert mesh.devices.shape == tuple(16 if n == -1 else n for n in shape) and {*mesh.devices.flat} == {*devices}
    count = len({device.slice_index for device in devices})
    blocks = mesh.devices.reshape(count, -1)
    assert [{device.slice_index for device in block} for block in blocks] == [{i} for i in range(count)]


def test_machines_with_different_numbers_of_devices_are_refused():
    with pytest.raises(InputError, match="the machines or slices have 4, 4, 3 devices: give each the same number"):
        make_mesh(MeshConfig(shape=(-1, 1, 1), rules=()), GPUS[:11])


class Permuted:
    """A host whose devices have these indices in a batch."""

    def __init__(self, *slices: slice):
        self.slices = slices

    def addressable_devices_indices_map(self, shape):
        return {i: (part,) for i, part in enumerate(self.slices)}


@pytest.mark.parametrize(
    ("hosts", "rows", "groups"),
    [
        ([(slice(0, 4), slice(4, 8))], [list(range(8))], 1),
        ([(slice(6, 8), slice(0, 2)), (slice(2, 4), slice(4, 6))], [[0, 1, 6, 7], [2, 3, 4, 5]], 2),
        # With a tensor axis across hosts, both have all rows, or pairs of hosts share theirs.
        ([(slice(None), slice(None))] * 2, [list(range(8))] * 2, 1),
        (
            [(slice(4, 8),), (slice(0, 4),), (slice(4, 8),), (slice(0, 4),)],
            [[4, 5, 6, 7], [0, 1, 2, 3]] * 2,
            2,
        ),
    ],
)
def test_a_host_reads_the_rows_of_its_devices(monkeypatch, hosts, rows, groups):
    monkeypatch.setattr(sharding, "gather_from_hosts", lambda value: rows)
    shares = [host_share(Permuted(*slices), 8) for slices in hosts]
    assert [share.rows for share in shares] == rows
    assert {share.groups for share in shares} == {groups}
    # One group's rows are together, each row once.
    order = shares[0].order
    assert sorted(order) == list(range(8)) and all(share.order == order for share in shares)
    assert all(sorted(order[i : i + 8 // groups]) in rows for i in range(0, 8, 8 // groups))


def test_each_device_gets_its_rows():
    """In any order of devices."""
    devices = np.array(jax.devices())[[3, 1, 7, 0, 5, 2, 6, 4]]
    mesh = jax.sharding.Mesh(devices.reshape(4, 1, 2), MESH_AXES)
    batch = {"x": np.arange(24).reshape(8, 3)}
    spread = batch_sharding(mesh)
    share = host_share(spread, 8)
    assert share.rows == list(range(8))
    sharded = shard_batch(batch, spread, share)["x"]
    assert np.array_equal(sharded, batch["x"]) and sharded.sharding == spread
    assert np.array_equal(sharded.addressable_data(0), batch["x"][sharded.addressable_shards[0].index])
