"""A service of a tiny run under load."""

import numpy as np
import pytest
from small import small_config, write_corpus

from benchmarks.service import __main__ as service
from flash_lm.errors import RunError
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.slow("trains a run and starts processes")
def test_a_service_under_load(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache")
    config.train.update(steps=4, eval_every=0, checkpoint_every=0)
    config.mesh.shape = (-1, 1, 1)
    train(config, tmp_path / "run")
    words = ["--clients=1 3", "--requests=6", "--tokens=5", "--more=8", f"--workdir={tmp_path / 'run'}"]
    service.main([*words, f"--out={out}"])
    lines = read_jsonl(out / "serve.jsonl")
    assert [(line["clients"], line["requests"]) for line in lines] == [(1, 6), (3, 6)]
    for line in lines:
        assert 0 < line["first_p50_ms"] <= line["p50_ms"] <= line["p99_ms"] and line["resident_mb"] > 50
        assert 0 < line["tokens_per_s"] <= 5 * line["requests_per_s"] * (1 + 1e-9)
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out
    monkeypatch.setattr(service, "EARLY", 4)
    service.main(
        ["--hostile", "--requests=8", "--turns=2", "--tokens=5", f"--workdir={tmp_path / 'run'}", f"--out={out}"]
    )
    *turns, median = read_jsonl(out / "hostile_text.jsonl")
    assert [line["turn"] for line in turns] == [1, 2] and median["turn"] == "median"
    for line in turns:
        assert line["p50_ratio"] == line["p50_ms_beside"] / line["p50_ms_alone"] > 0
    assert median["p99_ratio"] == np.median([line["p99_ratio"] for line in turns])
    with pytest.raises(RunError, match="did not start"):
        service.main([f"--workdir={tmp_path / 'none'}", f"--out={tmp_path / 'no_out'}"])
