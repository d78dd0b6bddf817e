"""The commands of the queue: what they find, and what they say if something is missing."""

import json
import os
import subprocess
import sys

from small import ROOT

from flash_lm.cli.run import run
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.sweeps.jobs import read_job_lines
from studies.__main__ import _link_results, main
from studies.controls import design


def test_a_commit_finds_the_results_by_the_names_that_it_knows(tmp_path):
    """The links always exist, also while another process makes them again."""
    for _ in range(2):
        folder = _link_results(ROOT, tmp_path / "queue")
    controls, quality = design.folders(ROOT)
    assert (folder / "controls").resolve() == controls and (folder / "quality").resolve() == quality
    (file,) = (folder / "study" / "runs").glob("*.jsonl")  # as commits before 30 November 2026 read them
    assert read_jsonl(file) == read_job_lines(quality)
    assert not [path for path in folder.rglob("*") if path.name.endswith(str(os.getpid()))]


def test_the_command_says_what_is_missing(tmp_path, monkeypatch, capsys):
    here = [f"--root={tmp_path / 'root'}", f"--queue={tmp_path / 'queue'}"]
    words = [sys.executable, "-m", "studies", "next", "--hours=1", f"--data={tmp_path}", *here]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: no commit makes the runs yet: name one with python -m studies commit HEAD --data=…\n"
    )

    def call(*words: str) -> tuple[int, str, str]:
        """Runs a command in this process; returns its exit code, output and errors."""
        monkeypatch.setattr(sys, "argv", ["studies", *words, *here])
        try:
            run(main)
        except SystemExit as stop:
            return stop.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    code, _, err = call("next", "--hours=0", f"--data={tmp_path}")
    assert code == 2 and "--hours: 0 must be a number of hours above 0" in err
    code, _, err = call("commit", "no_such_name", f"--data={tmp_path}")
    assert code == 2 and "no_such_name" in err and err.startswith("error: git rev-parse")
    code, out, _ = call("status")
    assert code == 0 and "no commit is named yet" in out
    assert "anchor_transformer_seed_0" in out and "too long to be queued" in out
    assert json.dumps(sorted(x.name for x in tmp_path.iterdir())) == "[]"  # nothing was written
