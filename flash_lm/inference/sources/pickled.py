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

# Classes of storages by name -> dtype.
_STORAGES = {"FloatStorage": np.float32, "HalfStorage": np.float16, "BFloat16Storage": ml_dtypes.bfloat16}
_MOST_BYTES = 2**26  # of the pickle itself, which has only names and shapes


class _Stored(NamedTuple):
    """A tensor in a file: the name of its storage, and where it is there, in numbers."""

    storage: str
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild(storage: tuple[str, Any], offset: int, shape: Any, strides: Any, *_: Any) -> _Stored:
    return _Stored(*storage, offset, tuple(shape), tuple(strides))


_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _TensorsOnly(pickle.Unpickler):
    """Unpickles dicts of tensors. Every other class or function is refused, since a pickle can call any."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:200])
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it has a {kind!r:.80}")
        return key, dtype


@contextlib.contextmanager
def open_pickled(path: pathlib.Path) -> Iterator[tuple[Arrays, str]]:
    """Opens a file of `torch.save`; yields functions that read its tensors, by name, and their dtype.

    Raises:
        InputError: it is damaged, of PyTorch before 1.6, or has more than tensors of floating-point numbers.
    """
    try:
        with zipfile.ZipFile(path) as file:
            top = next(name for name in file.namelist() if name.endswith("data.pkl")).removesuffix("data.pkl")
            order = f"{top}byteorder"
            if order in file.namelist() and file.read(order) != b"little":
                raise ValueError("its numbers are big-endian")
            if file.getinfo(f"{top}data.pkl").file_size > _MOST_BYTES:
                raise ValueError("its index is too large")
            with file.open(f"{top}data.pkl") as index:
                content = _TensorsOnly(index).load()
            if not isinstance(content, dict) or not all(isinstance(x, _Stored) for x in content.values()):
                raise ValueError("it is no dict of tensors")
            dtype = "bfloat16" if {x.dtype for x in content.values()} == {ml_dtypes.bfloat16} else "float32"

            def read(x: _Stored) -> np.ndarray:
                # The constructor checks that shape and strides stay inside of the buffer.
                buffer, size = file.read(f"{top}data/{x.storage}"), np.dtype(x.dtype).itemsize
                strides = tuple(size * stride for stride in x.strides)
                return np.ndarray(x.shape, x.dtype, buffer, size * x.offset, strides).astype(dtype)

            yield {name: lambda x=x: read(x) for name, x in content.items()}, dtype
    except InputError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(
            f"{path} cannot be read as tensors of PyTorch ({first_line(error)}): convert it to safetensors where it "
            "comes from, or download it again"
        ) from None
