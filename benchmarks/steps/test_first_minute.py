"""The first minute of a tiny run."""

import pytest
from small import override_flags, small_config, write_corpus

from benchmarks.steps import first_minute
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.slow("starts processes that train")
def test_the_first_minute(tmp_path, monkeypatch, capsys):
    """Each round begins with an empty home, and the user's home is left alone."""
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(first_minute, "COMMANDS", ("train",))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = override_flags(small_config(write_corpus(tmp_path / "text"), tmp_path / "tokens", "flash"))
    first_minute.main(["--config=base", "--rounds=1", f"--out={out}", *config])
    lines = read_jsonl(out)
    assert [line.get("case", line.get("command")) for line in lines] == [
        "train",
        "first_run",
        "first_compilation",
        "second_run",
    ]
    assert all(line["rounds_s"] == [line["seconds"]] and line["seconds"] > 0 for line in lines)
    assert lines[0]["until"] == "--help" and "second_run: " in capsys.readouterr().out
    assert not (tmp_path / "home").exists()
