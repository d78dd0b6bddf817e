"""The provenance of a result line."""

import os
import subprocess

from flash_lm.runs import provenance as origin
from flash_lm.runs.provenance import config_hash, merge_provenance, provenance


def test_a_line_records_the_commit_and_whether_the_code_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "x.py"))
    assert provenance("NVIDIA H200")["git"] is None
    git = lambda *words: subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)
    git("init")
    (tmp_path / "x.py").write_text("1")
    (tmp_path / "a" / "results").mkdir(parents=True)
    (tmp_path / "a" / "results" / "x.jsonl").write_text("1")
    git("add", "x.py", "a")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "x")
    line = provenance("NVIDIA H200")
    assert (line["device"], len(line["git"]), line["dirty"]) == ("NVIDIA H200", 12, False)
    assert "jax " in line["versions"] and "python 3." in line["versions"]
    (tmp_path / "a" / "results" / "x.jsonl").write_text("2")
    assert provenance("cpu")["dirty"] is False  # results are no code
    (tmp_path / "x.py").write_text("2")
    assert provenance("cpu")["dirty"] is True
    assert provenance("cpu")["device"].endswith(f", {len(os.sched_getaffinity(0))} threads")


def test_equal_configs_have_one_hash():
    assert config_hash({"a": 1, "b": (2,)}) == config_hash({"b": [2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_a_run_of_two_sessions_has_the_code_of_both():
    now = {"git": "b", "dirty": False, "device": "cpu"}
    assert merge_provenance({}, now) == now == merge_provenance(now, now)
    assert merge_provenance({"git": "a", "dirty": True, "device": "cpu"}, now) == {
        "git": "a, b",
        "dirty": True,
        "device": "cpu",
    }
    assert merge_provenance({"git": None, "dirty": None}, now | {"git": None, "dirty": None})["git"] is None
