"""The flags of every command that takes a run which is there: its name, the mesh, and the hosts."""

import argparse

from flash_lm.command import mesh_shapes
from flash_lm.errors import InputError
from flash_lm.run_name import RunName, run_name
from flash_lm.training.hosts import join, parse_hosts

HOSTS = "auto | ADDRESS:PORT,COUNT,NUMBER"
HOSTS_HELP = "one process of several: of the cluster that is discovered, or of COUNT, the first of which listens there"


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --workdir, --mesh and --hosts."""
    parser.add_argument(
        "--workdir", required=True, metavar="RUN[@newest|@best|@STEP]", help="folder of the run, and its checkpoint"
    )
    parser.add_argument("--mesh", default="-1,1,1", help="devices along data, fsdp and tensor")
    parser.add_argument("--hosts", metavar=HOSTS, help=HOSTS_HELP)


def run_of(arguments: argparse.Namespace) -> tuple[RunName, tuple[int, ...]]:
    """The run and the mesh that are meant; joins the other hosts, if there are any, before JAX looks for devices.

    Raises:
        InputError: no name of a checkpoint, no mesh, or no other hosts.
    """
    name, meshes = run_name(arguments.workdir), mesh_shapes(arguments.mesh, "--mesh")
    if len(meshes) > 1:
        raise InputError(f"--mesh={arguments.mesh} must be one mesh of three numbers, such as 1,2,4")
    join_hosts(arguments.hosts)
    return name, meshes[0]


def join_hosts(hosts: str | None) -> None:
    """Makes this process one of several, if the flag says so; raises as `parse_hosts` and `join` do."""
    if hosts:
        join(*parse_hosts(hosts))
