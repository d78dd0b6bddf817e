"""Names of checkpoints."""

import pathlib

import pytest

from flash_lm.errors import InputError
from flash_lm.runs.run_name import run_name


@pytest.mark.parametrize(
    ("word", "folder", "which"),
    [
        ("runs/x", "runs/x", "newest"),
        ("runs/x@newest", "runs/x", "newest"),
        ("runs/x@best", "runs/x", "best"),
        ("runs/x@300", "runs/x", 300),
        ("runs/me@home/x@0", "runs/me@home/x", 0),
        ("/missing/user@host/x", "/missing/user@host/x", "newest"),
        ("/missing/user@best/x@best", "/missing/user@best/x", "best"),
        (pathlib.Path("runs/x@best"), "runs/x", "best"),
    ],
)
@pytest.mark.parametrize("ema", [False, True])
def test_a_name_says_run_and_checkpoint(word, folder, which, ema):
    name = run_name(f"{word}@ema" if ema else word)
    assert name == (pathlib.Path(folder), which, ema) and run_name(name) == run_name(str(name)) == name


@pytest.mark.parametrize("word", ["runs/x@bets", "runs/x@", "@best", "runs/x@-3", "runs/x@³"])
def test_another_word_after_the_at_sign_is_refused(word):
    with pytest.raises(InputError, match="must be RUN, RUN@newest, RUN@best or RUN@STEP"):
        run_name(word)


def test_a_folder_name_may_contain_an_at_sign(tmp_path):
    (tmp_path / "x@best").mkdir()
    assert run_name(tmp_path / "x@best") == (tmp_path / "x@best", "newest", False)
    assert run_name(f"{tmp_path}/x@best@7") == (tmp_path / "x@best", 7, False)


@pytest.mark.parametrize("word", ["gs://bucket/x", "gs://bucket/x@best", pathlib.Path("gs://bucket/x")])
def test_an_address_is_a_folder(word, bucket):
    name = run_name(word)
    assert str(name.workdir) == "gs://bucket/x" and run_name(str(name)) == name
    assert name.which == ("best" if str(word).endswith("best") else "newest")


@pytest.mark.parametrize("word", ["s3://bucket/x", "s3://b", pathlib.Path("s3://bucket/x")])
def test_other_addresses_are_refused(word):
    with pytest.raises(InputError, match=r"^s3:/.*: s3:// is not supported: use gs://, or mount it as a folder"):
        run_name(word)
