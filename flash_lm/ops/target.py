"""The platform that a program is traced for: that of the mesh, which may be of a chip that is not in this machine."""

import jax


def target_platform() -> str:
    """The platform where the program will run: cpu, gpu or tpu."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
