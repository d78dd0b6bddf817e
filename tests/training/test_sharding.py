"""Parameters, moments and batches on a mesh of eight fake devices."""

import jax
import optax
import pytest
from small import small_config, write_corpus

from flash_lm.config import MeshConfig
from flash_lm.errors import InputError
from flash_lm.training.experiment import build_experiment
from flash_lm.training.loop import new_state
from flash_lm.training.sharding import check_batch, make_mesh

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return small_config(write_corpus(folder / "text"), folder / "cache")


def test_moments_follow_their_parameters_and_all_is_born_sharded(config):
    config = config.copy_and_resolve_references()
    config.mesh.shape = (2, 2, 2)
    experiment = build_experiment(config)
    with jax.set_mesh(experiment.mesh):
        state = new_state(experiment)
    gate = state.params["layers"]["sublayer_0"]["gate"]["kernel"]
    assert gate.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert gate.addressable_shards[0].data.size == gate.size // 4
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


def test_rules_that_do_not_fit_a_parameter(config):
    config = config.copy_and_resolve_references()
    config.mesh.update(
        shape=(1, 8, 1), rules=(("scale", ("fsdp", None, None, None)), ("shared/kernel", (None, "fsdp")))
    )
    config.model.shared_dim = 12
    with pytest.raises(InputError) as error:
        build_experiment(config)
    assert "more dimensions than the parameter" in str(error.value)
    assert "fsdp=8 does not divide a dimension of 12" in str(error.value)
