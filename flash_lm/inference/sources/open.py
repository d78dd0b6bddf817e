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
    if path.suffix in _FILES and path.is_file():
        return _FILES[path.suffix](path)
    if path.is_dir() and not (path / "config.json").exists():
        files = [file for file in sorted(path.iterdir()) if file.suffix in _FILES]
        if len(files) == 1:
            return _FILES[files[0].suffix](files[0])
        if files:
            raise InputError(f"{path} has {len(files)} models, such as {files[0].name}: give one of these files")
    return open_folder(path)
