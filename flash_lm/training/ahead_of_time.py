"""Devices of chips that are not in this machine, to compile for: XLA's compilers need no device.

That of a TPU is in the package libtpu, that of an NVIDIA GPU in JAX's CUDA plugin. Programs can be read, not run.
"""

import glob
import importlib.metadata
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from flash_lm.errors import InputError
from flash_lm.training.chips import CHIPS, Chip

# XLA times several kernels for a product and takes the fastest, but without a device it cannot; products are cuBLAS's.
GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# What the compiler asks of a GPU of compute capability 9.0. Sources: NVIDIA's CUDA C++ Programming Guide, table of
# technical specifications; number of cores, clock and L2 cache: data sheet of the H100 SXM.
_HOPPER = """
platform_name: "CUDA" device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 9 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory:.0f}
}}
"""
_GPUS_OF_A_HOST = 8
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")  # of a host that has TPUs
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def chip_devices(name: str, count: int = 1) -> list[Any]:
    """Devices to compile for.

    Args:
        name: a row of `CHIPS`.
        count: number of devices.

    Raises:
        InputError: the chip's compiler is not installed, or it has none.
    """
    chip = CHIPS[name]
    if chip.name is None:
        compiled = ", ".join(key for key, row in CHIPS.items() if row.name)
        raise InputError(f"programs for {name} can be compiled only where one is; without it: {compiled}")
    return (_tpus if name.startswith("TPU") else _gpus)(name, chip, count)


def compile_for(lowered: jax.stages.Lowered, device: Any) -> jax.stages.Compiled:
    """Compiles a program for a device, of this machine or of `chip_devices`."""
    is_absent_gpu = device.platform in ("gpu", "cuda") and device not in jax.devices()
    return lowered.compile(GPU_OPTIONS if is_absent_gpu else None)


def compiler(name: str | None) -> str:
    """The package of a chip's compiler and its version; None: of a CPU."""
    packages = ("jaxlib",) if name is None else ("libtpu",) if name.startswith("TPU") else _CUDA_PLUGINS
    package = next(x for x in packages if importlib.util.find_spec(x))
    return f"{package} {importlib.metadata.version(package)}"


def _tpus(name: str, chip: Chip, count: int) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(f"no compiler for {name}: install it with pip install libtpu")
    shape = tpu_shape(count)
    if shape is None:
        raise InputError(
            f"{count} x {name} are no slice: give a power of two, such as {name}:{1 << count.bit_length()}"
        )
    # Without a TPU it would look for its metadata server, and warn that it does not know the host.
    if not any(glob.glob(files) for files in _TPU_FILES):
        for variable, value in _NO_TPU.items():
            os.environ.setdefault(variable, value)
    three = "x1" if chip.name == "v5p" else ""
    try:
        topology = topologies.get_topology_desc(f"{chip.name}:{shape[0]}x{shape[1]}{three}", "tpu")
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"libtpu has no slice of {count} x {name}: {str(error).splitlines()[0]}") from error
    return list(topology.devices)[:count]


def tpu_shape(count: int) -> tuple[int, int] | None:
    """Rows and columns of the smallest slice with so many chips, of which the first are used; None: there is none.

    The smallest slice is a square of four. libtpu ends the process for a part of a larger one.
    """
    if count & (count - 1):
        return None
    rows = max(2, 1 << (count.bit_length() - 1) // 2)
    return rows, max(2, count // rows)


def _gpus(name: str, chip: Chip, count: int) -> list[Any]:
    if not any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS):
        raise InputError(f"no compiler for {name}: install it with pip install 'jax[cuda12]'")
    description = _HOPPER.format(name=chip.name, memory=chip.memory * 1e9, bandwidth=chip.bandwidth * 1e9)
    hosts = -(-count // _GPUS_OF_A_HOST)
    if count % hosts:
        raise InputError(f"{count} x {name} are no equal number on each of {hosts} hosts")
    shape: dict[str, Any] = {"target_config": description, "topology": f"1x{hosts}x{count // hosts}"}
    return list(topologies.get_topology_desc(platform="cuda", **shape).devices)
