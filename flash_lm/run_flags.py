"""The flags of every command that takes a run which is there, and what all commands begin with."""

import argparse

from flash_lm.command import mesh_shapes
from flash_lm.errors import InputError
from flash_lm.run_name import RunName, run_name

HOSTS = "auto | ADDRESS:PORT,COUNT,NUMBER"
HOSTS_HELP = "one process of several: of the cluster that is discovered, or of COUNT, the first of which listens there"
CACHE_HELP = "compile anew, and keep nothing of it for the next run; JAX_COMPILATION_CACHE_DIR names another folder"


def add_begin_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what `begin` reads, --hosts and --no_compile_cache."""
    parser.add_argument("--hosts", metavar=HOSTS, help=HOSTS_HELP)
    add_cache_flag(parser)


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --no_compile_cache."""
    parser.add_argument("--no_compile_cache", action="store_true", help=CACHE_HELP)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --workdir, --mesh, and those of `begin`."""
    parser.add_argument(
        "--workdir", required=True, metavar="RUN[@newest|@best|@STEP]", help="folder of the run, and its checkpoint"
    )
    parser.add_argument("--mesh", default="-1,1,1", help="devices along data, fsdp and tensor")
    add_begin_flags(parser)


def run_of(arguments: argparse.Namespace) -> tuple[RunName, tuple[int, ...]]:
    """The run and the mesh that are meant; begins the work with them, before JAX looks for devices.

    Raises:
        InputError: no name of a checkpoint, no mesh, or no other hosts.
    """
    name, meshes = run_name(arguments.workdir), mesh_shapes(arguments.mesh, "--mesh")
    if len(meshes) > 1:
        raise InputError(f"--mesh={arguments.mesh} must be one mesh of three numbers, such as 1,2,4")
    begin(arguments)
    return name, meshes[0]


def begin(arguments: argparse.Namespace) -> None:
    """Says where JAX keeps what it compiles, and makes this process one of several, if the flags say so.

    Raises:
        InputError: no other hosts.
    """
    set_cache(arguments)
    if arguments.hosts:
        from flash_lm.training.hosts import join, parse_hosts  # noqa: PLC0415 (slow to import)

        join(*parse_hosts(arguments.hosts))


def set_cache(arguments: argparse.Namespace) -> None:
    """Says where JAX keeps what it compiles; `begin` without hosts."""
    from flash_lm.compiled import compile_anew, keep_compiled  # noqa: PLC0415 (slow to import)

    (compile_anew if arguments.no_compile_cache else keep_compiled)()
