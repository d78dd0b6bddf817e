"""Time of a layer by sequence length, at tiny sizes."""

import pytest

from benchmarks.steps import layer
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = [f"--config.model.{key}={value}" for key, value in {"num_layers": 1, "model_dim": 8, "num_heads": 2}.items()]


@pytest.mark.slow("times layers of several lengths")
def test_time_of_a_layer_by_length(tmp_path, capsys):
    out = tmp_path / "new" / "out"
    families = ["longformer", "longformer+window.size=4"]
    words = ["--size=tiny", f"--families={' '.join(families)}", "--lengths=16 32", "--tokens_per_step=64"]
    layer.main([*words, "--rounds=1", f"--out={out}", *SMALL])
    lines = read_jsonl(out / "layers.jsonl")
    assert [(line["family"], line["length"]) for line in lines] == [(f, n) for f in families for n in (16, 32)]
    for short, long in (lines[:2], lines[2:]):
        assert short["over_shortest"] == 1
        assert long["over_shortest"] == pytest.approx(long["median_ms"] / short["median_ms"])
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"), [("--families=linformer", "no causal form"), ("--lengths=16 24", "not a multiple of .*24")]
)
def test_time_of_a_layer_of_nonsense_ends_before_anything_is_measured(tmp_path, word, message):
    out = tmp_path / "out"
    words = ["--size=tiny", "--families=longformer", "--lengths=16", "--tokens_per_step=64", f"--out={out}"]
    with pytest.raises(InputError, match=message):
        layer.main([*words, word])
    assert not out.exists()
