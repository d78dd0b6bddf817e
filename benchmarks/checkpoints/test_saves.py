"""The cost of saving a tiny run."""

import pytest

from benchmarks.checkpoints import saves
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.slow("trains and saves")
def test_what_a_save_costs(tmp_path):
    out = tmp_path / "saves.jsonl"
    words = ["--config=configs/tiny.py", "--config.data.vocab_size=300", "--config.data.tokens_per_batch=4096"]
    saves.main([*words, "--rounds=1", f"--out={out}"])
    (line,) = read_jsonl(out)
    assert line["state_bytes"] >= 12 * line["parameters"] and 0 < line["blocked_s"] <= line["written_s"]
    assert line["blocked_share"] == line["blocked_s"] / (line["checkpoint_every"] * line["step_s"])
