"""The flags of every command that reads an existing run, and the setup that all commands share."""

import argparse
import pathlib

from flash_lm.cli.types import mesh_shapes, split_words
from flash_lm.config.plugins import import_plugins
from flash_lm.errors import InputError
from flash_lm.runs.clusters import is_one_of_several
from flash_lm.runs.run_name import HUB, RunName
from flash_lm.runs.storage import reach

ALONE = "alone"
HOSTS = "auto | alone | ADDRESS:PORT,COUNT,NUMBER"
HOSTS_HELP = (
    "run as one of several processes: of the cluster that JAX finds, or of COUNT, with process 0 at ADDRESS:PORT; or "
    "alone. Default: auto if srun, mpirun or a TPU pod runs several, else alone"
)
PLUGINS_HELP = "modules that the run asks for: importing them runs their code, so only those named here are imported"
CACHE_HELP = "do not read or write the compilation cache; JAX_COMPILATION_CACHE_DIR selects another cache folder"


def add_begin_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `begin` reads: --hosts and --no_compile_cache."""
    parser.add_argument("--hosts", metavar=HOSTS, help=HOSTS_HELP)
    add_cache_flag(parser)


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --no_compile_cache."""
    parser.add_argument("--no_compile_cache", action="store_true", help=CACHE_HELP)


def add_plugins_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --plugins, which `use_plugins` reads."""
    parser.add_argument("--plugins", metavar="MODULE[,…]", default="", help=PLUGINS_HELP)


def use_plugins(arguments: argparse.Namespace) -> None:
    """Imports the modules that --plugins names.

    Raises:
        InputError: no such module exists, or its import fails.
    """
    if names := split_words(arguments.plugins):
        import_plugins(names)


def add_run_flags(parser: argparse.ArgumentParser, flag: str = "--workdir") -> None:
    """Adds --workdir, perhaps by another name, --mesh, --plugins and the flags of `begin`."""
    parser.add_argument(
        flag,
        dest="workdir",
        required=True,
        metavar="RUN[@newest|@best|@STEP]",
        help="the run's folder, perhaps at gs://, and which checkpoint; or the folder of an export, or hub:OWNER/NAME; "
        "a word alone, as in evaluate runs/x, means the same",
    )
    parser.add_argument("--mesh", default="-1,1,1", help="devices along data, fsdp and tensor; one may be -1: the rest")
    add_plugins_flag(parser)
    add_begin_flags(parser)


def parse_run(arguments: argparse.Namespace) -> tuple[RunName, tuple[int, ...]]:
    """Parses the run and the mesh, imports the plugins, and calls `begin` before JAX looks for devices.

    Raises:
        InputError: the checkpoint's name or the mesh is wrong, or the other hosts cannot be reached.
    """
    from flash_lm.training.hub import download  # noqa: PLC0415 (slow to import)

    # Plugins may use JAX, so hosts are joined before them.
    name, meshes = download(arguments.workdir), mesh_shapes(arguments.mesh, "--mesh")
    if len(meshes) > 1:
        raise InputError(f"--mesh={arguments.mesh} must be a single mesh of three numbers, such as 1,2,4")
    begin(arguments)
    use_plugins(arguments)
    return name, meshes[0]


def results_file(arguments: argparse.Namespace, name: RunName, default: str) -> pathlib.Path:
    """The file to which a command adds its lines: that of --results, or one in the run's folder.

    Raises:
        InputError: a model on the hub has no folder of results; or it is in a bucket that cannot be reached.
    """
    if arguments.results is None and arguments.workdir.startswith(HUB):
        raise InputError(f"{arguments.workdir} is on the hub and has no folder for results: give --results=FILE.jsonl")
    return reach(arguments.results or name.workdir / default)


def begin(arguments: argparse.Namespace) -> None:
    """Sets up JAX's compilation cache, and joins the other processes if there are any.

    Raises:
        InputError: the other hosts cannot be reached.
        PassingError: a TPU VM cannot find out whether there are others.
    """
    set_cache(arguments)
    hosts = arguments.hosts or ("auto" if is_one_of_several() else ALONE)
    if hosts != ALONE:
        from flash_lm.runs.hosts import join, parse_hosts  # noqa: PLC0415 (slow to import)

        join(*parse_hosts(hosts))


def set_cache(arguments: argparse.Namespace) -> None:
    """Sets up JAX's compilation cache; `begin` without hosts."""
    from flash_lm.cli.compile_cache import compile_without_cache, keep_compiled  # noqa: PLC0415 (slow to import)

    (compile_without_cache if arguments.no_compile_cache else keep_compiled)()
