"""The commands of docs/classify.md, run in order on a small file and with small models."""

import csv
import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from small import ROOT, override_flags, small_config

from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.slow("starts six processes, two of which train")
# Keys of the page that stay; all others are those of small models.
KEPT = ("task", "model.family", "data.corpus", "data.path", "data.tokenizer", "data.vocab_size", "train.steps")


def test_from_a_file_to_a_classifier(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (block,) = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "classify.md").read_text(), re.M | re.S)
    pretrain, tune, evaluate, predict, serve, export = block.replace("\\\n", " ").splitlines()
    draw = np.random.default_rng(0)
    with open(tmp_path / "reviews.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        for label in draw.choice(["good", "bad"], 200):
            writer.writerow((f"it is {label} and {draw.choice(['long', 'short', 'new'])}", label))
    config = small_config("corpus", tmp_path / "cache")
    ours = [word for word in override_flags(config) if not word.startswith(tuple(f"--config.{key}=" for key in KEPT))]
    ours += [f"--config.train.steps={20}", "--config.data.vocab_size=320", "--config.data.length=32"]

    def run(line, more=()):
        words = shlex.split(line, comments=True)
        done = subprocess.run(
            [sys.executable, *words[1:], *more], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(pretrain, ours)
    assert "parameters taken; initialised: classifier/bias, classifier/map/kernel" in run(tune, ours)
    assert "macro F1" in run(evaluate) and "the most frequent label is" in run(evaluate)
    assert read_jsonl(tmp_path / "runs" / "reviews" / "results.jsonl")[-1]["tokens"] == 10  # one in twenty
    assert set(json.loads(run(predict).replace("'", '"'))[0]) == {"good", "bad"}
    assert serve.startswith("python -m flash_lm.serve --workdir=runs/reviews ")  # tests/inference/service
    run(export)
    assert (tmp_path / "exported" / "reviews" / "labels.json").exists()
