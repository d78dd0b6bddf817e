"""What the commands share: config files with overrides, and one clear line per error."""

import argparse
import ast
import contextlib
import difflib
import errno
import importlib.util
import logging
import os
import pathlib
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from flash_lm.allocator import use_huge_pages
from flash_lm.config import add_sections, open_type, plugins_of, unread_keys
from flash_lm.errors import STOPPED, InputError, RunError, Stopped
from flash_lm.plugins import import_plugins
from flash_lm.run_name import address_problem
from flash_lm.schema import unknown_key
from flash_lm.tables import CORPORA, TASKS
from flash_lm.terminal import CLOSED, output_is_closed, prepare_output

_log = logging.getLogger(__name__)
_CONFIGS = pathlib.Path(__file__).parent / "configs"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SHOWN = 200  # characters of a file's name
_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9}
# What is wrong with a file or a folder that a command could not write or read.
_OF_FILES = {
    errno.EACCES: "permission denied for {}: choose another folder",
    errno.EPERM: "permission denied for {}: choose another folder",
    errno.EROFS: "{} is on a disk that cannot be written: choose another folder",
    errno.EEXIST: "{} is a file: choose another folder",
    errno.ENOTDIR: "{} is a file: choose another folder",
    errno.EISDIR: "{} is a folder, where a file should be: remove it, or choose another place",
    errno.ENOENT: "{} does not exist and cannot be made: choose another place",
    errno.ENAMETOOLONG: "{}: File name too long: choose another name",
    errno.ELOOP: "{}: Too many levels of symbolic links: choose another name",
    errno.EIO: "{}: Input/output error: check the disk",
}


def run(main: Callable[[list[str]], None], flags: Callable[[], argparse.ArgumentParser] | None = None) -> None:
    """Runs a command. Bad input exits with code 2, a RunError with 1; each problem is printed on its own line.

    Stopped by a signal before its end, it exits with 75.

    Args:
        main: takes the words of the command line.
        flags: makes the parser of `main`, so that --help and wrong flags end the process before it restarts.
    """
    if not {"", os.getcwd()} & {*sys.path} and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as with python -m, so that scripts find the same plugins
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)  # absl has set it up
    logging.getLogger("flash_lm").setLevel(logging.INFO)
    # Orbax logs the folders that it opens, and the tracebacks of failed writes, which reach us as exceptions as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    sys.unraisablehook = _report_unraisable
    prepare_output()
    if flags:
        flags().parse_known_args(sys.argv[1:])
    use_huge_pages()
    try:
        main(sys.argv[1:])
        print(end="", flush=True)  # here, where a full disk is reported
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO) and output_is_closed():
            sys.exit(CLOSED)
        if error.errno not in _FULL and (error.errno not in _OF_FILES or error.filename is None):
            raise
        name = str(error.filename or "a file")[:_SHOWN]
        line = _OF_FILES.get(error.errno or 0, f"{{}}: {error.strerror}: free space")
        print(f"error: {line.format(name)}", file=sys.stderr)
        sys.exit(1 if error.errno in _FULL else 2)
    except (InputError, RunError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except Stopped as stopped:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(*stopped.args, sep="\n", end="\n" if stopped.args else "", flush=True)
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _report_unraisable(unraisable: Any) -> None:
    """As usual, but for writes of a checkpoint that end after another one has failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def load_module(path: str) -> types.ModuleType:
    """Runs a config file.

    Args:
        path: a file, or the name of a config of the package, such as quickstart or tables/c4.

    Raises:
        InputError: there is no such config, or it defines no get_config().
    """
    file = pathlib.Path(path)
    if not file.is_file() and file.suffix != ".py":
        file = _CONFIGS / f"{path}.py"
    if not file.is_file():
        names = sorted(str(x.relative_to(_CONFIGS).with_suffix("")) for x in _CONFIGS.glob("**/[!_]*.py"))
        near = difflib.get_close_matches(str(pathlib.Path(path).with_suffix("")).removeprefix("configs/"), names, n=1)
        advice = f"did you mean {near[0]}?" if near else f"give a file, or one of {', '.join(names)}"
        raise InputError(f"no config {path}: {advice}")
    spec = importlib.util.spec_from_file_location(f"flash_lm_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file: give one that defines get_config()")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"{path} is not valid Python, line {error.lineno}: {error.msg}") from None
    except ModuleNotFoundError as error:
        advice = "write from flash_lm.configs import …" if error.name == "configs" else "install it"
        raise InputError(f"{path} imports {error.name}, which is not installed: {advice}") from None
    if not hasattr(module, "get_config"):
        raise InputError(f"{path} defines no get_config(): start from configs/base.py")
    return module


def load_config(path: str, overrides: list[str]) -> ConfigDict:
    """Reads a config file and applies overrides.

    Args:
        path: a Python file that defines get_config(), the name of one in `configs`, or the folder of a run or an
            exported model, whose config is then used.
        overrides: command-line words such as --config.model.num_layers=4.

    Raises:
        InputError: there is no such file, or overrides are wrong, one per line.
    """
    flag = [word.partition("=")[2] for word in overrides if word.startswith("--config.plugins=")]
    import_plugins(_names(flag[-1]) if flag else ())
    of_ours = (_CONFIGS / f"{path}.py").exists()
    is_run = not of_ours and (pathlib.Path(path) / "config.json").exists()
    config = _of_run(path) if is_run else load_module(path).get_config()
    import_plugins(() if flag else plugins_of(config))  # the flag replaces the config's plugins
    add_sections(config)
    apply_overrides(config, overrides)
    check_path(config, overrides)
    _report_unread(config, overrides)
    return config


def _of_run(folder: str) -> Any:
    from flash_lm.training.workdir import read_config  # noqa: PLC0415 (--help need not wait for JAX)

    return read_config(pathlib.Path(folder))


def _names(text: str) -> tuple[str, ...]:
    try:
        return plugins_of({"plugins": _tuple(text)})
    except (ValueError, SyntaxError):
        return ()  # `override` reports it


def check_path(config: Any, overrides: Sequence[str]) -> None:
    """Checks that the corpus reads a path given on the command line: else the user would get another text.

    Raises:
        InputError: the config's corpus does not read data.path.
    """
    corpus, given = config.data.corpus, any(re.match("--config.data.path=.", word) for word in overrides)
    if given and corpus in CORPORA and not CORPORA[corpus].reads_path:
        raise InputError(
            f"data.corpus={corpus} does not read data.path: add --config.data.corpus=text for text files, or "
            f"--config.data.corpus=hf for a data set"
        )


def _report_unread(config: Any, overrides: list[str]) -> None:
    """Logs the overridden keys that have no effect."""
    from flash_lm.families.family import unread  # noqa: PLC0415 (slow to import)

    by_hand = {word.partition("=")[0].removeprefix("--config.") for word in overrides}
    families = config.model.pattern or (config.model.family,)
    encoder = config.model.encoder.family
    cross = config.model.cross.kind if encoder else None
    if for_nothing := sorted(by_hand & unread([*families, *([encoder] if encoder else [])], cross)):
        _log.info("family %s does not read %s", "/".join(families), ", ".join(for_nothing))
    chosen = {"task": config.task, "data.corpus": config.data.corpus, "train.optimizer": config.train.optimizer}
    if config.task in TASKS:
        chosen["model.head"] = config.model.head or TASKS[config.task].head
    if for_nothing := sorted(by_hand & unread_keys(chosen)):
        _log.info(
            "%s do not read %s", ", ".join(f"{key}={name}" for key, name in chosen.items()), ", ".join(for_nothing)
        )


def apply_overrides(config: ConfigDict, overrides: list[str]) -> None:
    """Applies command-line words to a config.

    Raises:
        InputError: overrides are wrong, one per line.
    """
    problems = [problem for word in overrides if (problem := override(config, word))]
    if problems:
        raise InputError.of(problems)


def variant(config: ConfigDict, word: str) -> tuple[str, ConfigDict]:
    """The family that a word such as flash+kernels=xla+remat=full names, and the config with these model keys.

    Raises:
        InputError: some of the keys are wrong.
    """
    family, *changes = word.split("+")
    changed = config.copy_and_resolve_references()
    apply_overrides(changed, [f"--config.model.{change}" for change in changes])
    return family, changed


def local_path(word: str) -> pathlib.Path:
    """Parses a file or folder of this machine: a type for argparse."""
    if problem := address_problem(word):
        raise argparse.ArgumentTypeError(problem)
    return pathlib.Path(word)


def positive(word: str) -> int:
    """Parses a positive whole number: a type for argparse."""
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word} must be a positive whole number")
    return int(word)


def count(word: str) -> int:
    """A type for argparse: a positive number, which may end in k, M or G, such as 1.5M."""
    digits, factor = (word[:-1], _FACTORS[word[-1]]) if word[-1:] in _FACTORS else (word, 1)
    try:
        number = round(float(digits.replace("_", "")) * factor)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a positive number such as 200000, 200k or 1.5M")
    return number


def words_of(text: str) -> list[str]:
    """Splits a list on the command line at commas or spaces."""
    return text.replace(",", " ").split()


def mesh_shapes(text: str, flag: str) -> list[tuple[int, ...]]:
    """Parses meshes: the numbers of devices along data, fsdp and tensor of each.

    Args:
        text: the numbers.
        flag: the flag's name, for the error message.

    Raises:
        InputError: the text is not a list of meshes.
    """
    words = words_of(text)
    if not words or len(words) % 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        raise InputError(f"{flag}={text} must be three whole numbers per mesh, such as 1,2,4")
    numbers = tuple(int(word) for word in words)
    return [numbers[i : i + 3] for i in range(0, len(numbers), 3)]


def whole_numbers(words: str, flag: str = "") -> list[int]:
    """Parses one or more positive whole numbers, separated by spaces or commas.

    Args:
        words: the numbers.
        flag: the flag's name, for the error message.

    Raises:
        InputError: the text is not such a list.
    """
    numbers = words_of(words)
    if not numbers or not all(number.isdecimal() and int(number) for number in numbers):
        given = f"{flag}={words}" if flag else repr(words)
        raise InputError(f"{given} must be positive whole numbers, such as 512,2048")
    return [int(number) for number in numbers]


def override(config: ConfigDict, word: str) -> str | None:
    """Applies one --config.key=value; returns what is wrong with it, if anything."""
    name, equals, text = word.partition("=")
    if not name.startswith("--config.") or not equals:
        group, dot, _ = name.removeprefix("--").partition(".")
        if equals and dot and group in config:
            return f"unknown argument {word}: did you mean --config.{word.removeprefix('--')}?"
        return f"unknown argument {word}: overrides look like --config.model.num_layers=4, other flags are in --help"
    *parents, key = name.removeprefix("--config.").split(".")
    prefix, node = "", typing.cast(Any, config)
    for parent in parents:
        if not isinstance(node.get(parent), ConfigDict):
            return unknown_key(prefix, parent, list(node))
        prefix, node = f"{prefix}{parent}.", node[parent]
    if key not in node:
        return unknown_key(prefix, key, list(node))
    kind = node.get_type(key)
    if kind is ConfigDict:
        return f"{prefix}{key} is a group of keys: set one of them, such as {prefix}{key}.{next(iter(node[key]))}"
    if (open_as := open_type(prefix + key)) is not None:
        if not text:
            node[key] = None
            return None
        kind = open_as  # the config of a run that left it open does not have the type
    try:
        node[key] = (_PARSERS.get(kind) or kind)(text)
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        return f"{prefix}{key}={text} must be of type {kind.__name__}"
    return None


def _tuple(text: str) -> tuple[Any, ...]:
    if text.startswith(("(", "[", "{", "'", '"')):
        value = ast.literal_eval(text)
        return tuple(value) if isinstance(value, tuple | list) else (value,)
    return tuple(_literal(word) for word in words_of(text))


def _literal(word: str) -> Any:
    """A number, or the word itself, such as a name or a regex."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_PARSERS: dict[type, Callable[[str], Any]] = {bool: lambda text: _BOOLS[text.lower()], tuple: _tuple}
