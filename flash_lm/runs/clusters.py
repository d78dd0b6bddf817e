"""Whether a cluster has started this process as one of several, found without JAX and at once.

JAX finds the addresses itself, but does not say whether there are others: where there are none, it would wait for them.
"""

import glob
import os
import re

from flash_lm.errors import PassingError, first_line
from flash_lm.runs import google_metadata

# The variables that srun and mpirun set: the number of processes, and that on this machine. Those of the job, which
# a shell in salloc sees as well, would not do: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
_PROCESSES = {"SLURM_STEP_NUM_TASKS": "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE"}
# Of libtpu: one of them is set to use a part of a pod.
_PARTS = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS", "TPU_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")


def is_one_of_several() -> bool:
    """Whether srun, mpirun or a TPU pod runs more processes than this one.

    Raises:
        PassingError: the metadata server of a TPU VM does not answer.
    """
    return any(os.environ.get(count, "1") not in ("", "0", "1") for count in _PROCESSES) or _is_in_pod()


def local_device_ids() -> list[int] | None:
    """The devices of this process, as `jax.distributed.initialize` takes them; None: JAX chooses.

    JAX gives each process of srun and mpirun one GPU. A process that is alone on its machine takes all of them.
    """
    if os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    alone = any(re.fullmatch(r"1(\(x\d+\))?", os.environ.get(name, "")) for name in _PROCESSES.values())
    return [] if alone else None


def _is_in_pod() -> bool:
    """Whether this is a TPU VM of a slice with several, or of several slices; elsewhere nothing is asked.

    Raises:
        PassingError: the metadata server of a TPU VM does not answer.
    """
    platforms = os.environ.get("JAX_PLATFORMS") or "tpu"
    if "tpu" not in platforms or any(os.environ.get(name) for name in _PARTS) or not _has_tpu():
        return False
    # In Kubernetes the environment says it, on a TPU VM the metadata server.
    if names := os.environ.get("TPU_WORKER_HOSTNAMES"):
        return "," in names or int(os.environ.get("MEGASCALE_NUM_SLICES", "1")) > 1
    try:
        workers = google_metadata.ask_patiently("attributes/worker-network-endpoints")
        facts = google_metadata.ask_patiently("attributes/tpu-env")
    except FileNotFoundError:  # not a TPU VM
        return False
    except google_metadata.ERRORS as error:
        if not google_metadata.is_googles_machine():
            return False
        # Each host of a pod would else train alone, in the same folder.
        raise PassingError(
            f"the metadata server does not say whether this TPU VM is one of several ({first_line(error)}): give "
            "--hosts=auto, or --hosts=alone"
        ) from None
    slices = re.search(r"MEGASCALE_NUM_SLICES: '(\d+)'", facts)
    return "," in workers or (slices is not None and int(slices[1]) > 1)


def _has_tpu() -> bool:
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
