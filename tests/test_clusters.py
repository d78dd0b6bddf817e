"""Whether a process is one of several, from what srun, mpirun and TPU pods tell it."""

import time

import pytest
from metadata_server import MetadataServer

from flash_lm.errors import PassingError
from flash_lm.runs import clusters, google_metadata
from flash_lm.runs.clusters import is_one_of_several, local_device_ids

VARIABLES = (*clusters._PROCESSES, *clusters._PROCESSES.values(), *clusters._PARTS)
VARIABLES += ("TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES", "JAX_LOCAL_DEVICE_IDS", "JAX_PLATFORMS")


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(clusters, "_has_tpu", lambda: False)


@pytest.mark.parametrize(
    ("variables", "several", "devices"),
    [
        ({}, False, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, True, []),  # all devices of its node
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, True, None),  # JAX: one for each
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, True, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, False, []),
        # The shell of salloc -n 4: the job will have four, this step has one.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False, None),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, False, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True, []),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "JAX_LOCAL_DEVICE_IDS": "0,1"}, False, None),  # the user says which
    ],
)
def test_processes_of_srun_and_mpirun(monkeypatch, variables, several, devices):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (is_one_of_several(), local_device_ids()) == (several, devices)


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_PROCESS_BOUNDS": "1,1,1"}, False),  # a part of the pod
    ],
)
def test_pods_in_kubernetes(monkeypatch, variables, several):
    monkeypatch.setattr(clusters, "_has_tpu", lambda: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_one_of_several() == several


@pytest.mark.parametrize(
    ("workers", "facts", "several"),
    [
        ("unknown:unknown:10.0.0.2", "ACCELERATOR_TYPE: 'v5litepod-4'", False),
        ("unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3", "", True),
        ("10.0.0.2", "ZONE: 'x'\nMEGASCALE_NUM_SLICES: '2'\n", True),
    ],
)
def test_tpu_machines_ask_the_metadata_server(monkeypatch, workers, facts, several):
    server = MetadataServer(worker_network_endpoints=workers, tpu_env=facts)
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    assert not is_one_of_several() and not server.asked  # without a TPU nothing is asked
    monkeypatch.setattr(clusters, "_has_tpu", lambda: True)
    assert is_one_of_several() == several
    server.shutdown()
    server.server_close()


def googles_machine(monkeypatch, folder):
    (folder / "product_name").write_text("Google Compute Engine\n")
    monkeypatch.setattr(google_metadata, "_PRODUCT", folder / "product_name")
    monkeypatch.setattr(clusters, "_has_tpu", lambda: True)


def test_a_tpu_machine_asks_again_while_it_boots(monkeypatch, tmp_path):
    googles_machine(monkeypatch, tmp_path)
    server = MetadataServer(worker_network_endpoints="a,b", tpu_env="")
    server.status = 503
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(google_metadata.time, "sleep", lambda seconds: setattr(server, "status", 200))
    assert is_one_of_several() and len(server.asked) == 3
    server.status = 404  # another machine with a TPU, which has no such keys
    assert not is_one_of_several()
    server.shutdown()
    server.server_close()


def test_a_tpu_machine_without_an_answer_does_not_train_alone(monkeypatch, tmp_path):
    googles_machine(monkeypatch, tmp_path)
    monkeypatch.setattr(google_metadata, "_BOOT_S", 0.0)
    with pytest.raises(PassingError, match=r"this TPU VM is one of several \(.*\): give --hosts=auto, or"):
        is_one_of_several()


def test_a_tpu_elsewhere_is_alone_and_does_not_wait(monkeypatch):
    monkeypatch.setattr(clusters, "_has_tpu", lambda: True)
    since = time.monotonic()  # nothing answers, see conftest.py
    assert not is_one_of_several() and time.monotonic() - since < 1
