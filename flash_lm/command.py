"""What the commands share: config files with overrides, and one clear line for an error."""

import argparse
import ast
import difflib
import errno
import importlib.util
import logging
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from flash_lm.allocator import use_huge_pages
from flash_lm.config import add_sections, open_type, plugins_of, unread_keys
from flash_lm.errors import InputError, RunError
from flash_lm.plugins import import_plugins
from flash_lm.schema import unknown_key
from flash_lm.tables import CORPORA, TASKS

_log = logging.getLogger(__name__)
_CONFIGS = pathlib.Path(__file__).parent / "configs"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_NAME = {errno.ENAMETOOLONG, errno.ELOOP}


def run(main: Callable[[list[str]], None], flags: Callable[[], argparse.ArgumentParser] | None = None) -> None:
    """Runs a command; bad input ends it with exit code 2, a RunError with 1, and a line a problem.

    Args:
        main: takes the words of the command line.
        flags: makes the parser that `main` has, so that --help and wrong flags end a process that starts but once.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)  # absl has set it up
    logging.getLogger("flash_lm").setLevel(logging.INFO)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells which folders it opens
    if flags:
        flags().parse_known_args(sys.argv[1:])
    use_huge_pages()
    try:
        main(sys.argv[1:])
    except PermissionError as error:
        print(f"error: no permission for {error.filename}: choose another folder", file=sys.stderr)
        sys.exit(2)
    except (FileExistsError, NotADirectoryError) as error:
        print(f"error: {error.filename} is a file: choose another folder", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in _FULL | _NO_NAME:
            raise
        name, advice = str(error.filename or "a file"), "make room" if error.errno in _FULL else "choose another name"
        print(f"error: {name[:80]}: {error.strerror}: {advice}", file=sys.stderr)
        sys.exit(1 if error.errno in _FULL else 2)
    except (InputError, RunError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)


def load_module(path: str) -> types.ModuleType:
    """Runs a config file.

    Args:
        path: of a file, or a name of one of the project's, such as quickstart or tables/c4.

    Raises:
        InputError: there is none, or it defines no get_config().
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
        raise InputError(f"{path} is no Python file: give one that defines get_config()")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"{path} is no Python, line {error.lineno}: {error.msg}") from None
    except ModuleNotFoundError as error:
        advice = "say from flash_lm.configs import …" if error.name == "configs" else "install it"
        raise InputError(f"{path} imports {error.name}, and there is no such module: {advice}") from None
    if not hasattr(module, "get_config"):
        raise InputError(f"{path} defines no get_config(): start from configs/base.py")
    return module


def load_config(path: str, overrides: list[str]) -> ConfigDict:
    """Reads a config file and applies overrides.

    Args:
        path: of a Python file that defines get_config(), the name of one in `configs`, or the folder of a run or an
            exported model, whose config it is then.
        overrides: command-line words such as --config.model.num_layers=4.

    Raises:
        InputError: no such file, or with every override that does not fit, one a line.
    """
    flag = [word.partition("=")[2] for word in overrides if word.startswith("--config.plugins=")]
    import_plugins(_names(flag[-1]) if flag else ())
    of_ours = (_CONFIGS / f"{path}.py").exists()
    is_run = not of_ours and (pathlib.Path(path) / "config.json").exists()
    config = _of_run(path) if is_run else load_module(path).get_config()
    import_plugins(() if flag else plugins_of(config))  # the flag takes their place
    add_sections(config)
    apply_overrides(config, overrides)
    check_path(config, overrides)
    _tell_unread(config, overrides)
    return config


def _of_run(folder: str) -> Any:
    from flash_lm.training.workdir import read_config  # noqa: PLC0415 (--help need not wait for JAX)

    return read_config(pathlib.Path(folder))


def _names(text: str) -> tuple[str, ...]:
    try:
        return plugins_of({"plugins": _tuple(text)})
    except (ValueError, SyntaxError):
        return ()  # `override` says so


def check_path(config: Any, overrides: Sequence[str]) -> None:
    """Checks that a path that is given is read: else the text would be another than its user thinks.

    Raises:
        InputError: the corpus of the config does not read it.
    """
    corpus, given = config.data.corpus, any(re.match("--config.data.path=.", word) for word in overrides)
    if given and corpus in CORPORA and not CORPORA[corpus].reads_path:
        raise InputError(
            f"data.corpus={corpus} does not read data.path: add --config.data.corpus=text for text files, or "
            f"--config.data.corpus=hf for a data set"
        )


def _tell_unread(config: Any, overrides: list[str]) -> None:
    """One line on keys that somebody has set for nothing."""
    from flash_lm.models.family import unread  # noqa: PLC0415 (slow to import)

    by_hand = {word.partition("=")[0].removeprefix("--config.") for word in overrides}
    families = config.model.pattern or (config.model.family,)
    if for_nothing := sorted(by_hand & unread(families)):
        _log.info("family %s does not read %s", "/".join(families), ", ".join(for_nothing))
    chosen = {"task": config.task, "data.corpus": config.data.corpus, "train.optimizer": config.train.optimizer}
    if config.task in TASKS:
        chosen["model.head"] = config.model.head or TASKS[config.task].head
    if for_nothing := sorted(by_hand & unread_keys(chosen)):
        _log.info("%s read no %s", ", ".join(f"{key}={name}" for key, name in chosen.items()), ", ".join(for_nothing))


def apply_overrides(config: ConfigDict, overrides: list[str]) -> None:
    """Applies command-line words to a config.

    Raises:
        InputError: with every override that does not fit, one a line.
    """
    problems = [problem for word in overrides if (problem := override(config, word))]
    if problems:
        raise InputError.of(problems)


def variant(config: ConfigDict, word: str) -> tuple[str, ConfigDict]:
    """The family that a word such as flash+kernels=xla+remat=full names, and the config with these keys of the model.

    Raises:
        InputError: with every key that does not fit.
    """
    family, *changes = word.split("+")
    changed = config.copy_and_resolve_references()
    apply_overrides(changed, [f"--config.model.{change}" for change in changes])
    return family, changed


def positive(word: str) -> int:
    """A positive whole number: a type for argparse."""
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word} must be a positive whole number")
    return int(word)


def words_of(text: str) -> list[str]:
    """The words of a list on the command line, between commas or blanks."""
    return text.replace(",", " ").split()


def mesh_shapes(text: str, flag: str) -> list[tuple[int, ...]]:
    """Meshes, each of the numbers of devices along data, fsdp and tensor.

    Args:
        text: the numbers.
        flag: that has them, for the message.

    Raises:
        InputError: something else.
    """
    words = words_of(text)
    if not words or len(words) % 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        raise InputError(f"{flag}={text} must be three whole numbers, or as many for each mesh, such as 1,2,4")
    numbers = tuple(int(word) for word in words)
    return [numbers[i : i + 3] for i in range(0, len(numbers), 3)]


def whole_numbers(words: str, flag: str = "") -> list[int]:
    """Positive numbers between blanks or commas, one or more.

    Args:
        words: the numbers.
        flag: that has them, for the message.

    Raises:
        InputError: something else.
    """
    numbers = words_of(words)
    if not numbers or not all(number.isdecimal() and int(number) for number in numbers):
        told = f"{flag}={words}" if flag else repr(words)
        raise InputError(f"{told} must be positive whole numbers, such as 512,2048")
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
        kind = open_as  # the config of a run that left it open does not say
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
    """A number; or a word, such as a name or a regex, as it is."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_PARSERS: dict[type, Callable[[str], Any]] = {bool: lambda text: _BOOLS[text.lower()], tuple: _tuple}
