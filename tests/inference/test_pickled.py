"""PyTorch's pickles: their tensors are read, and nothing else."""

import pathlib
import zipfile

import numpy as np
import pytest

import flash_lm
from flash_lm.errors import InputError
from flash_lm.inference.sources.pickled import open_pickled


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "posix.system|os.system"),
        (b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.", "eval"),
        (b"not a pickle", "cannot be read as tensors"),
        (b"\x80\x02]q\x00.", "no dict of tensors"),
    ],
    ids=["system", "eval", "no pickle", "no dict"],
)
def test_a_pickle_runs_no_code(content, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pth", "w") as file:
        file.writestr("model/data.pkl", content)
    with pytest.raises(InputError, match=message):
        flash_lm.import_hf(tmp_path / "model.pth", tmp_path / "out")


def write_tensor(path: pathlib.Path, storage: bytes = b"ctorch\nFloatStorage\n", where: bytes = b"I0\n(I2\nt(I1\nt"):
    """A file of `torch.save` with one tensor x, in opcodes: its storage's class; offset, shape and strides."""
    persistent = b"(Vstorage\n" + storage + b"V0\nVcpu\nI2\ntQ"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", b"}Vx\nctorch._utils\n_rebuild_tensor_v2\n(" + persistent + where + b"tRs.")
        file.writestr("a/data/0", np.float32([3, 5]).tobytes())


def read_tensor(path: pathlib.Path) -> np.ndarray:
    with open_pickled(path) as (arrays, _):
        return arrays["x"]()


def test_tensors_of_a_pickle(tmp_path):
    path = tmp_path / "x.pth"
    for where, expected in (
        (b"I0\n(I2\nt(I1\nt", [3, 5]),
        (b"I1\n(I1\nt(I1\nt", [5]),
        (b"I0\n(I2\nI2\nt(I0\nI1\nt", [[3, 5], [3, 5]]),
        (b"I0\n(I2\nI1\nt(I1\nI2\nt", [[3], [5]]),
    ):
        write_tensor(path, where=where)
        np.testing.assert_array_equal(read_tensor(path), expected)


@pytest.mark.parametrize(
    ("storage", "where", "message"),
    [
        (b"VO\n", b"I0\n(I1\nt(I1\nt", "unknown kind"),
        (b"Vi4\n", b"I0\n(I1\nt(I1\nt", "unknown kind"),
        (b"ctorch\nLongStorage\n", b"I0\n(I1\nt(I1\nt", "x is a LongStorage: only FloatStorage"),
        (b"ctorch\nFloatStorage\n", b"I-1\n(I1\nt(I1\nt", "damaged tensor"),
        (b"ctorch\nFloatStorage\n", b"I0\n(I2\nt(I-1\nt", "damaged tensor"),
        (b"ctorch\nFloatStorage\n", b"I0\n(I3\nt(I1\nt", "cannot be read as tensors"),
        (b"ctorch\nFloatStorage\n", b"I0\n(I2\nt(I9\nt", "cannot be read as tensors"),
    ],
    ids=str,
)
def test_a_pickle_reads_nothing_outside_of_its_storages(storage, where, message, tmp_path):
    write_tensor(tmp_path / "x.pth", storage, where)
    with pytest.raises(InputError, match=message):
        read_tensor(tmp_path / "x.pth")
