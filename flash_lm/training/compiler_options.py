"""XLA's options for a training step: what they do and what was read in programs is in docs/scaling.md."""

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import jax

_log = logging.getLogger(__name__)
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # in which users set options, which then count
# Platform of the devices -> options. Collectives run in the background of work that does not need their results.
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "tpu": {
        "xla_enable_async_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
    },
}
# XLA times several kernels for a product and takes the fastest, but without a device it cannot; products are cuBLAS's.
_ABSENT_GPU = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_UNKNOWN = re.compile(r"No such compile option: '(\w+)'")


def compile_for(lowered: jax.stages.Lowered, device: Any) -> jax.stages.Compiled:
    """Compiles a program for a device, of this machine or of `chip_devices`, with the options of its platform."""
    platform = "gpu" if device.platform == "cuda" else device.platform
    options = choose_options(platform, os.environ)
    if platform == "gpu" and device not in jax.devices():
        options |= _ABSENT_GPU
    # Options come and go with XLA's versions.
    while True:
        try:
            return lowered.compile(options or None)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN.search(str(error))
            if not unknown or options.pop(unknown[1], None) is None:
                raise
            _log.warning("this version of XLA has no option %s: it is left out", unknown[1])


def choose_options(platform: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The options of a platform, without those that the user has set in XLA_FLAGS or LIBTPU_INIT_ARGS."""
    theirs = " ".join(environment.get(name, "") for name in _VARIABLES)
    names = {word.removeprefix("--").partition("=")[0] for word in theirs.split()}
    return {name: value for name, value in OPTIONS.get(platform, {}).items() if name not in names}
