"""Metrics replayed into a tracker, whose package is replaced by a recorder."""

import shutil
import sys
import types

import pytest

from flash_lm import track
from flash_lm.configs import quickstart
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import write_jsonl


class Recorder(types.ModuleType):
    """Has the function of trackers that is used."""

    def __init__(self, name):
        super().__init__(name)
        self.runs, self.identities = [], []

    def init(self, *, project, name, config, resume, id=None, reinit=None):
        assert resume == "allow"
        self.identities.append(id or name)
        self.runs.append({"project": project, "name": name, "config": config, "steps": {}, "open": True})
        return RecordedRun(self.runs[-1])


class RecordedRun:
    """What init returns; like wandb's, it refuses steps that do not increase."""

    def __init__(self, about):
        self.about = about

    def log(self, values, *, step):
        assert self.about["open"] and step > max(self.about["steps"], default=-1)
        self.about["steps"][step] = values

    def finish(self):
        self.about["open"] = False


@pytest.fixture
def tracker(monkeypatch):
    recorder = Recorder("trackio")
    monkeypatch.setitem(sys.modules, "trackio", recorder)
    return recorder


@pytest.fixture
def runs(tmp_path):
    folders = []
    for i, name in enumerate(("a", "b")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(quickstart.get_config().to_json())
        lines = [{"step": n, "split": "train", "loss": i + n} for n in (10, 20)]
        lines.append({"step": 20, "split": "validation", "loss": 9.0, "perplexity": 8.0})
        write_jsonl(folder / "metrics.jsonl", lines)
        folders.append(str(folder))
    return folders


def test_every_line_arrives(tracker, runs, capsys):
    track.main([*runs, "--to=trackio", "--project=mine"])
    a, b = tracker.runs
    assert a["project"] == "mine" and a["name"].startswith("a-") and b["name"].startswith("b-")
    assert not a["open"] and not b["open"]
    assert a["config"]["train"]["steps"] == 240 and a["config"]["train"]["warmup_steps"] == 24
    last = {"train/loss": 20, "validation/loss": 9.0, "validation/perplexity": 8.0}
    assert a["steps"] == {10: {"train/loss": 10}, 20: last}
    assert b["steps"][10] == {"train/loss": 11}
    assert "3 lines to project mine of trackio, as b" in capsys.readouterr().out


def test_what_was_sent_is_not_sent_again(tracker, runs):
    """The run there is the same one, also after the run here has gone on."""
    track.main([runs[0], "--to=trackio"])
    track.main([runs[0], "--to=trackio"])
    with open(f"{runs[0]}/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 30, "split": "train", "loss": 3.0}\n')
    track.main([runs[0], "--to=trackio"])
    assert [run["steps"].keys() for run in tracker.runs] == [{10, 20}, set(), {30}]
    assert len({*tracker.identities}) == 1
    # In another place it is still this run; in another project it is all new.
    shutil.move(runs[0], f"{runs[0]}_moved")
    track.main([f"{runs[0]}_moved", "--to=trackio"])
    assert len({*tracker.identities}) == 1 and not tracker.runs[-1]["steps"]
    track.main([f"{runs[0]}_moved", "--to=trackio", "--project=other"])
    assert tracker.runs[-1]["steps"].keys() == {10, 20, 30}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "{run}/nowhere"], "nowhere: no run with metrics.jsonl is there"),
        (["{run}@best"], "leave @best out"),
    ],
)
def test_a_missing_run_is_refused_before_anything_is_sent(tracker, runs, words, message):
    with pytest.raises(InputError, match=message):
        track.main([*(word.format(run=runs[0]) for word in words), "--to=trackio"])
    assert not tracker.runs


def test_a_tracker_that_is_not_installed_is_named(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[wandb\]'"):
        track.main([*runs, "--to=wandb"])
