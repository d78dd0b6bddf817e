"""The platform of a program: that of the mesh's devices, else of this machine."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from flash_lm.ops.target import target_platform


def test_the_platform_is_that_of_the_mesh(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert target_platform() == "cpu"
    chip = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=chip)):
        assert target_platform() == "gpu"
