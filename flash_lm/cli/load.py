"""Reads the config that a command names: a config file, a config of the package, or the folder of a run."""

import difflib
import importlib.util
import logging
import pathlib
import types
from typing import Any

from ml_collections import ConfigDict

from flash_lm.config.experiment import add_sections, unread_keys
from flash_lm.config.overrides import apply_overrides, check_path, parse_tuple
from flash_lm.config.plugins import import_plugins, plugins_of
from flash_lm.config.registry import TASKS
from flash_lm.errors import InputError

_log = logging.getLogger(__name__)
_CONFIGS = pathlib.Path(__file__).parent.parent / "configs"


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
    from flash_lm.runs.run_folder import RunFolder  # noqa: PLC0415 (--help need not wait for JAX)

    return RunFolder(pathlib.Path(folder)).config


def _names(text: str) -> tuple[str, ...]:
    try:
        return plugins_of({"plugins": parse_tuple(text)})
    except (ValueError, SyntaxError):
        return ()  # `override` reports it


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
