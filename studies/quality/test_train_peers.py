"""`studies/quality/train_peers.py` with a peer that is NumPy: uniform logits."""

import json
import math
import sys

import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.changes import apply_changes
from flash_lm.errors import InputError, RunError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.sweeps.jobs import read_job_lines, try_lock
from flash_lm.training.train_loop import train
from studies.quality import train_peers
from studies.quality.run import Part, list_trunks, schedules

pytestmark = pytest.mark.usefixtures("usual_promotion")

FAMILY = "linear_transformer"
UNIFORM = """
import json, math, pathlib, sys
import numpy as np
folder = pathlib.Path(sys.argv[1])
question = json.loads((folder / "question.json").read_text())
found = {"parameters": question["parameters"], "device": "uniform", "peer_versions": "uniform 1"}
for split in question["splits"]:
    tokens = (np.load(folder / f"{split}.npz")["targets_NxBxL"] >= 0).sum(axis=(1, 2))
    found[split] = {"nll": (math.log(question["shape"]["vocab_size"]) * tokens).tolist(), "tokens": tokens.tolist()}
if question["seed"] == 1:
    found = {"failed": "the loss of step 3 is nan"}
if question["seed"] == 2:
    found = {"error": "ValueError: it has 5 parameters"}
if question["seed"] < 3:
    (folder / "answer.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def script():
    return train_peers


@pytest.fixture
def trunks(tmp_path, script, monkeypatch):
    """Returns our trunks by seed, with a fake worker."""
    worker = tmp_path / "worker.py"
    worker.write_text(UNIFORM)
    monkeypatch.setattr(script, "WORKER", worker)
    monkeypatch.setattr(script, "PEERS", {"uniform": FAMILY, "uniform/changed": FAMILY})
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache", FAMILY)
    config.data.pack = "stream"
    config.train.update(warmup_steps=4, eval_every=0, eval_steps=1, checkpoint_every=0, log_every=1)
    return list_trunks(config, [Part("peers", {FAMILY: {}}, {}, seeds=range(4), steps=20)])


@pytest.mark.slow("trains and scores a run of ours")
def test_a_peer_is_scored_as_ours_is(script, trunks, tmp_path):
    trunk = trunks[0]
    lines = script.train_and_score(script.PeerRun("uniform", trunk, 2e-3), sys.executable, tmp_path / "peer")
    ((_, schedule),) = schedules(trunk, 2e-3, tmp_path).items()
    train(apply_changes(trunk.config, schedule), tmp_path / "ours")
    ours = [evaluate(tmp_path / "ours", split, blocks=script.BLOCKS)[0] for split in script.SPLITS]
    for line, our_line in zip(lines, ours, strict=True):
        same = ("split", "tokens", "bytes", "tokens_blocks", "corpus", "corpus_hash", "length", "step", "batch_tokens")
        assert {key: line[key] for key in same} == {key: our_line[key] for key in same}
        assert line.keys() >= {"task", "family", "parameters", "trained_length", "perplexity", "nll_blocks", "git"}
        assert line["device"] == "uniform"
    question = json.loads((tmp_path / "peer" / "question.json").read_text())
    words = question["shape"]["vocab_size"]
    assert lines[1]["perplexity"] == pytest.approx(words) and sum(lines[1]["nll_blocks"]) == pytest.approx(
        math.log(words) * lines[1]["tokens"], abs=0.1
    )
    metrics = [x for x in read_jsonl(tmp_path / "ours" / "metrics.jsonl") if x["split"] == "train"]
    assert question["rates"] == pytest.approx([x["learning_rate"] for x in metrics])
    assert question["parameters"] == ours[0]["parameters"]
    with np.load(tmp_path / "peer" / "train.npz") as arrays:
        inputs, targets = arrays["inputs_NxBxL"], arrays["targets_NxBxL"]
    are_targets = (targets[:, :, :-1] >= 0) & (targets[:, :, 1:] >= 0)
    assert len(inputs) == 20 and (targets[:, :, :-1] == inputs[:, :, 1:])[are_targets].all()
    assert sum((targets[i] >= 0).sum() for i in range(20)) == sum(x["tokens"] for x in metrics)


def test_what_a_peer_says_is_reported(script, trunks, tmp_path):
    train_seed = lambda seed: script.train_and_score(
        script.PeerRun("uniform", trunks[seed], 2e-3), sys.executable, tmp_path / str(seed)
    )
    assert train_seed(1) == [
        {"part": "peers", "peer": "uniform", "beside": "linear_transformer", "run": "uniform at 0.002"}
        | {"seed": 1, "rate": 2e-3, "failed": "the loss of step 3 is nan"}
    ]
    with pytest.raises(RunError, match="uniform: ValueError: it has 5 parameters"):
        train_seed(2)
    with pytest.raises(RunError, match="uniform: its process ended with code 0"):
        train_seed(3)


def test_each_peer_has_three_rates(script, trunks, tmp_path):
    with pytest.raises(InputError, match=f"no rate of {FAMILY} in"):
        script.list_runs(["uniform"], trunks[:1], tmp_path)
    with pytest.raises(InputError, match="--peers=nobody: must be among uniform, uniform/changed"):
        script.list_runs(["nobody"], trunks[:1], tmp_path)
    write_rate(tmp_path, 3e-3)
    tasks = script.list_runs(["uniform", "uniform/changed"], trunks[:1], tmp_path)
    named = ("uniform_0.003", "uniform_changed_0.003", "uniform_0.0015", "uniform_0.006")
    assert [task.name for task in tasks] == [f"peers_{name}_seed_0" for name in named]


def write_rate(out, value):
    (out / "rates").mkdir(parents=True)
    line = {"model": FAMILY, "round": 3, "key": "train.learning_rate", "value": value, "loss": 1.0}
    write_jsonl(out / "rates" / f"{FAMILY}.jsonl", [line])


def test_each_run_of_a_peer_is_made_once(script, trunks, tmp_path, monkeypatch, capsys):
    """Until its lines are there, whoever begins it; then its batches are gone."""
    out, runs, made = tmp_path / "out", tmp_path / "runs", []

    def make(task, python, folder):
        folder.mkdir(parents=True)
        made.append(task.name)
        return [task.about | {"split": "test"}]

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("{}")
    write_rate(out, 4e-3)
    monkeypatch.setattr(script, "list_trunks", lambda config, parts: trunks[:1])
    monkeypatch.setattr(script, "train_and_score", make)
    monkeypatch.setattr(script, "check_python", lambda python: None)
    argv = ["--peers=uniform", f"--corpus={tmp_path / 'texts'}", f"--workdir={runs}", f"--out={out}"]
    names = [f"peers_uniform_{rate}_seed_0" for rate in (0.004, 0.002, 0.008)]
    with try_lock(runs / f"{names[1]}.lock"):
        script.main(argv)
    assert made == [names[0], names[2]] and {x["rate"] for x in read_job_lines(out)} == {4e-3, 8e-3}
    for _ in range(2):
        script.main(argv)
    assert made == [names[0], names[2], names[1]] and not [path for path in runs.iterdir() if path.is_dir()]
    (tmp_path / "texts" / "a.jsonl").write_text("other")
    with pytest.raises(InputError, match=f"{names[0]} in .*runs.jsonl is of another config, rate, texts or scores"):
        script.main(argv)


def test_lines_of_a_peer_stand_when_ours_starts_otherwise(script, trunks, tmp_path):
    with_key = lambda key, value: trunks[0]._replace(config=apply_changes(trunks[0].config, {key: value}))
    hash_of = lambda trunk, rate=2e-3, data="texts": (
        script.PeerRun("uniform", trunk, rate).job(data, tmp_path).study_hash
    )
    assert (
        hash_of(with_key("model.residual_init", "as_init"))
        == hash_of(with_key("model.residual_init", "depth"))
        == hash_of(trunks[0])
    )
    others = hash_of(with_key("model.mlp_dim", 99)), hash_of(trunks[0], 1e-3), hash_of(trunks[0], data="others")
    assert hash_of(trunks[0]) not in others
