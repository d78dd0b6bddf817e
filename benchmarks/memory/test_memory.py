"""The memory of a tiny step."""

import json

import pytest

from benchmarks.memory import __main__ as memory
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = [f"--config.model.{key}={value}" for key, value in {"num_layers": 1, "model_dim": 8, "num_heads": 2}.items()]


@pytest.mark.slow("compiles a step")
def test_memory_of_a_step(tmp_path):
    words = ["--config=configs/tiny.py", "--config.data.tokens_per_batch=64", "--config.model.max_length=32"]
    memory.main([*words, *SMALL, "--config.data.vocab_size=300", f"--out={tmp_path / 'm.jsonl'}"])
    (line,) = read_jsonl(tmp_path / "m.jsonl")
    assert 0 < line["temp_bytes"] < line["peak_bytes"] < line["peak_rss_bytes"]
    json.dumps(line)
