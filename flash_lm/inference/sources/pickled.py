"""PyTorch's files of pickled tensors (.bin, .pth): reads the tensors, and nothing else that a pickle may ask for."""

import collections
import contextlib
import pathlib
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flash_lm.errors import InputError, first_line
from flash_lm.models.formats.format import Arrays

# Classes of storages by name -> dtype. Of those that are no weights, only names are read.
_STORAGES: dict[str, Any] = {
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    **dict.fromkeys(("DoubleStorage", "LongStorage", "IntStorage", "ShortStorage", "CharStorage", "ByteStorage"), None),
    "BoolStorage": None,
}
_MOST_BYTES = 2**26  # of the pickle itself, which has only names and shapes


class _Storage(NamedTuple):
    """A storage of a file: its class and its name. A pickle cannot make one itself."""

    kind: str
    name: str


class _Stored(NamedTuple):
    """A tensor: its storage, and where it is there, in numbers."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Stored:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(x) is int and x >= 0 for x in numbers):
        raise pickle.UnpicklingError("it has a damaged tensor")
    return _Stored(storage, offset, tuple(shape), tuple(strides))


_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    **{("torch", name): name for name in _STORAGES},
}


class _TensorsOnly(pickle.Unpickler):
    """Unpickles dicts of tensors. Every other class or function is refused, since a pickle can call any."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:200])
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        what, kind, name, *_ = pid
        if what != "storage" or kind not in _STORAGES or not isinstance(name, str):
            raise pickle.UnpicklingError("it has a storage of an unknown kind")
        return _Storage(kind, name)


@contextlib.contextmanager
def open_pickled(path: pathlib.Path) -> Iterator[tuple[Arrays, str]]:
    """Opens a file of `torch.save`; yields functions that read its tensors, by name, and a dtype for them.

    Raises:
        InputError: it is damaged, of PyTorch before 1.6, or no dict of tensors; one that is read is no floating-point
            number.
    """
    with contextlib.ExitStack() as stack:
        with _explained(path):
            file = stack.enter_context(zipfile.ZipFile(path))
            top, content = _read_index(file)
        dtypes = {_STORAGES[x.storage.kind] for x in content.values()} - {None}
        dtype = "bfloat16" if dtypes == {ml_dtypes.bfloat16} else "float32"

        def read(name: str) -> np.ndarray:
            storage, offset, shape, strides = content[name]
            if (of_file := _STORAGES[storage.kind]) is None:
                raise InputError(f"{name} is a {storage.kind}: only {', '.join(x for x in _STORAGES if _STORAGES[x])}")
            with _explained(path):
                # The constructor checks that shape and strides stay inside of the buffer.
                buffer, size = file.read(f"{top}data/{storage.name}"), np.dtype(of_file).itemsize
                steps = tuple(size * stride for stride in strides)
                return np.ndarray(shape, of_file, buffer, size * offset, steps)

        yield {name: lambda name=name: read(name) for name in content}, dtype


def _read_index(file: zipfile.ZipFile) -> tuple[str, dict[str, _Stored]]:
    """The folder inside of a file, and its tensors by name."""
    top = next(name for name in file.namelist() if name.endswith("data.pkl")).removesuffix("data.pkl")
    order = f"{top}byteorder"
    if order in file.namelist() and file.read(order) != b"little":
        raise ValueError("its numbers are big-endian")
    if file.getinfo(f"{top}data.pkl").file_size > _MOST_BYTES:
        raise ValueError("its index is too large")
    with file.open(f"{top}data.pkl") as index:
        content = _TensorsOnly(index).load()
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(x, _Stored) for name, x in content.items()
    ):
        raise ValueError("it is no dict of tensors")
    return top, content


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(
            f"{path} cannot be read as tensors of PyTorch ({first_line(error)}): convert it to safetensors where it "
            "comes from, or download it again"
        ) from None
