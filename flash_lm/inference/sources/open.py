"""Opens a model of another library, whatever its files are."""

import contextlib
import pathlib

from flash_lm.errors import InputError
from flash_lm.inference.sources.folder import open_folder
from flash_lm.inference.sources.gguf import open_gguf
from flash_lm.inference.sources.rwkv_pth import open_rwkv
from flash_lm.inference.sources.source import Source

_FILES = {".gguf": open_gguf, ".pth": open_rwkv}


def open_source(path: pathlib.Path) -> contextlib.AbstractContextManager[Source]:
    """Opens a folder of safetensors, or a file of another kind, which may be the only one of a folder.

    Raises:
        InputError: nothing there can be read.
    """
    path = find_file(path)
    kind = path.suffix.lower()
    return _FILES[kind](path) if kind in _FILES and path.is_file() else open_folder(path)


def find_file(path: pathlib.Path) -> pathlib.Path:
    """The only file of such a kind in a folder without a config.json, or else the path itself.

    Raises:
        InputError: there are several.
    """
    if not path.is_dir() or (path / "config.json").exists():
        return path
    files = [file for file in sorted(path.iterdir()) if file.suffix.lower() in _FILES]
    if len(files) > 1:
        raise InputError(f"{path} has {len(files)} models, such as {files[0].name}: give one of these files")
    return files[0] if files else path
