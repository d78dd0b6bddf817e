"""Reads the config that a command names: a config file, a config of the package, or the folder of a run.

A config file defines get_config(). If it has presets, it declares them as PRESETS, a dict from each name to what
differs, and defines get_config(name): --config=FILE:NAME passes NAME. No file without PRESETS takes a name.
"""

import argparse
import importlib.util
import inspect
import logging
import pathlib
import re
import types
from typing import Any

from ml_collections import ConfigDict

from flash_lm.cli.finetune import finetune_config
from flash_lm.config.experiment import add_sections, unread_keys
from flash_lm.config.overrides import apply_overrides, parse_tuple
from flash_lm.config.plugins import import_plugins, plugin_names
from flash_lm.config.registry import TASKS
from flash_lm.errors import InputError, nearest
from flash_lm.runs.storage import reach

_log = logging.getLogger(__name__)
_CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
# A missing package that a config imports -> what to do; studies are no part of the installed package.
_ADVICE = {
    "configs": "write from flash_lm.configs import …",
    "studies": "run python -m flash_lm.… in the root of the repository",
}
_DECLARES = re.compile("^PRESETS\\b", re.MULTILINE)
_CONFIG_HELP = (
    "a config file, or the name of one, such as quickstart; FILE:NAME for a preset of a file that has them; MODEL:text "
    "or MODEL:chat to fine-tune the model in the folder MODEL; --config.KEY=VALUE sets one of its keys"
)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --config, and the configs of the package to --help."""
    parser.add_argument("--config", required=True, help=_CONFIG_HELP)
    configs = packaged_configs()
    parser.add_argument_group("configs", ", ".join(name for name, presets in configs.items() if not presets))
    for name, presets in configs.items():
        if presets:
            parser.add_argument_group(f"presets, as --config={name}:NAME", f"NAME is one of {', '.join(presets)}")


def packaged_configs() -> dict[str, tuple[str, ...]]:
    """The names of the package's configs, each with those of its presets, if it has any."""
    files = {str(x.relative_to(_CONFIGS).with_suffix("")): x for x in _CONFIGS.glob("**/[!_]*.py")}
    # Those without presets are not run: some import much, and --help need not wait for them.
    return {
        name: tuple(load_module(str(file)).PRESETS) if _DECLARES.search(file.read_text(encoding="utf-8")) else ()
        for name, file in sorted(files.items())
    }


def split_preset(path: str) -> tuple[str, str | None]:
    """Splits FILE:NAME; the path of a file or folder that has a colon is not split, with None for NAME."""
    file, colon, name = path.rpartition(":")
    is_name = colon and not {"/", "\\"} & {*name} and not pathlib.Path(path).exists()
    return (file, name) if is_name else (path, None)


def load_module(path: str) -> types.ModuleType:
    """Runs a config file.

    Args:
        path: a file, or the name of a config of the package, such as quickstart or ablations/chunk_size; without the
            name of a preset.

    Raises:
        InputError: no such config exists, or it defines no get_config().
    """
    # A path of a file comes before the name of a config of the package.
    file = pathlib.Path(path)
    if not file.is_file() and file.suffix != ".py":
        file = _CONFIGS / f"{path}.py"
    if not file.is_file():
        raise InputError(f"no config {path}: {_nearest(path)}")
    spec = importlib.util.spec_from_file_location(f"flash_lm_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file: give one that defines get_config()")
    # Run it; an error in it is the user's to fix, so it gets one line.
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"{path} is not valid Python, line {error.lineno}: {error.msg}") from None
    except ModuleNotFoundError as error:
        advice = _ADVICE.get(str(error.name).partition(".")[0], "install it")
        raise InputError(f"{path} imports {error.name}, which is not installed: {advice}") from None
    if not hasattr(module, "get_config"):
        raise InputError(f"{path} defines no get_config(): start from configs/base.py")
    return module


def read_config(path: str) -> ConfigDict:
    """Calls the get_config of a config file, or of one of its presets.

    Args:
        path: FILE or FILE:NAME, where FILE is as for `load_module`.

    Raises:
        InputError: no such config or preset exists, or FILE has presets and NAME is missing, or the reverse.
    """
    file, name = split_preset(path)
    module = load_module(file)
    presets: list[str] = list(getattr(module, "PRESETS", ()))
    # FILE:NAME needs presets, and FILE alone a get_config without a name.
    if name is not None and (name or not presets):
        if not presets or not _takes(module.get_config, name):
            raise InputError(f"{file} has no presets, that is PRESETS and get_config(name): leave :{name} out")
        if name not in presets:
            near = nearest(name, presets)
            advice = f"did you mean {file}:{near}?" if near else f"give one of {', '.join(presets)}"
            raise InputError(f"{file} has no preset {name}: {advice}")
        return module.get_config(name)
    if not _takes(module.get_config):
        known = f"where NAME is one of {', '.join(presets)}" if presets else "and declare what NAME may be as PRESETS"
        raise InputError(f"{file} needs the name of a preset: give --config={file}:NAME, {known}")
    return module.get_config()


def config_name(path: str) -> str:
    """The name of a run of a config: quickstart, or base_110m_mamba2 for configs/base_110m.py:mamba2."""
    file, name = split_preset(path)
    return "_".join([pathlib.Path(file).stem, *([name] if name else [])])


def load_config(path: str, overrides: list[str]) -> ConfigDict:
    """Reads a config file and applies overrides.

    Args:
        path: a Python file that defines get_config(), or the name of one in `configs`, with :NAME for a preset; or
            the folder of a run or an exported model, whose config is then used; with :text or :chat, the config of a
            new run that fine-tunes it.
        overrides: command-line words such as --config.model.num_layers=4.

    Raises:
        InputError: no such file, folder or preset exists, or overrides are wrong, one per line.
    """
    # Plugins are imported before the config, which may use their keys.
    flag = [word.partition("=")[2] for word in overrides if word.startswith("--config.plugins=")]
    import_plugins(_names(flag[-1]) if flag else ())
    folder, name = split_preset(path)
    is_packaged = (_CONFIGS / f"{folder}.py").exists()
    is_run = not is_packaged and (reach(folder) / "config.json").exists()
    config: Any = _config_of_run(folder, name) if is_run else read_config(path)
    import_plugins(() if flag else plugin_names(config))  # the flag replaces the config's plugins
    return _apply(config, overrides)


def load_run_config(folder: pathlib.Path, overrides: list[str]) -> ConfigDict:
    """The config of a run or an export, with overrides; its plugins are those that were imported before.

    Raises:
        InputError: no such run exists, or overrides are wrong, one per line.
    """
    from flash_lm.runs.run_folder import RunFolder  # noqa: PLC0415 (--help need not wait for JAX)

    return _apply(RunFolder(folder).config.copy_and_resolve_references(), overrides)


def _apply(config: Any, overrides: list[str]) -> ConfigDict:
    from flash_lm.data.corpus_of_path import fit_corpus  # noqa: PLC0415 (--help need not wait for it)

    add_sections(config)
    apply_overrides(config, overrides)
    fit_corpus(config, overrides)
    _report_unread(config, overrides)
    return config


def _nearest(path: str) -> str:
    """Advice on a missing config: the most similar config or preset of the package, or all configs."""
    # Presets are suggested with their file; a config has priority over a preset of the same name.
    configs = packaged_configs()
    near_by = {preset: f"{name}:{preset}" for name, presets in reversed(configs.items()) for preset in presets}
    near_by |= {name: name for name in configs}
    asked = str(pathlib.Path(path).with_suffix("")).removeprefix("configs/")
    near = nearest(asked, near_by)
    return f"did you mean {near_by[near]}?" if near else f"give a file, or one of {', '.join(configs)}"


def _takes(get_config: Any, *names: str) -> bool:
    try:
        inspect.signature(get_config).bind(*names)
    except TypeError:
        return False
    return True


def _config_of_run(folder: str, preset: str | None) -> Any:
    from flash_lm.runs.run_folder import RunFolder  # noqa: PLC0415 (--help need not wait for JAX)

    config = RunFolder(folder).config
    return config if preset is None else finetune_config(folder, config, preset)


def _names(text: str) -> tuple[str, ...]:
    try:
        return plugin_names({"plugins": parse_tuple(text)})
    except (ValueError, SyntaxError):
        return ()  # `override` reports it


def given_keys(overrides: list[str]) -> set[str]:
    """The keys that command-line words such as --config.model.num_layers=4 set."""
    return {word.partition("=")[0].removeprefix("--config.") for word in overrides}


def _report_unread(config: Any, overrides: list[str]) -> None:
    """Logs the overridden keys that have no effect."""
    from flash_lm.families.family import unused_keys  # noqa: PLC0415 (slow to import)

    by_hand = given_keys(overrides)
    # Keys of families that the model does not have.
    families = config.model.pattern or (config.model.family,)
    encoder = config.model.encoder.family
    cross = config.model.cross.kind if encoder else None
    if for_nothing := sorted(by_hand & unused_keys([*families, *([encoder] if encoder else [])], cross)):
        _log.info("family %s does not read %s", "/".join(families), ", ".join(for_nothing))
    # Keys of tasks, corpora, optimizers and heads that are not selected.
    chosen = {"task": config.task, "data.corpus": config.data.corpus, "train.optimizer": config.train.optimizer}
    if config.task in TASKS:
        chosen["model.head"] = config.model.head or TASKS[config.task].head
    if for_nothing := sorted(by_hand & unread_keys(chosen)):
        _log.info(
            "%s do not read %s", ", ".join(f"{key}={name}" for key, name in chosen.items()), ", ".join(for_nothing)
        )
