"""Commands that draw, and the shell scripts."""

import subprocess

import pytest
from small import ROOT, small_config, write_corpus

from flash_lm import attention_maps, positions
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.slow("trains a run")
def test_attention_maps_of_a_run(tmp_path, capsys):
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache")
    config.model.update(pattern=("flash", "aft_local"), num_layers=2)
    train(config, tmp_path / "run")
    out = tmp_path / "out" / "attention.png"
    words = [f"--workdir={tmp_path / 'run'}", f"--out={out.parent}", "--tokens=20"]
    attention_maps.main([*words, "--text=the cat sat on the mat, and"])
    assert "6 maps of 20 tokens" in capsys.readouterr().out  # two parts of two units, and AFT with exp(w)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_perplexity_by_position(tmp_path, capsys):
    """One column per span, with both values in each cell; one curve per run."""
    file = tmp_path / "positions.jsonl"
    names = ("from", "to", "tokens", "perplexity", "perplexity_alone")
    first, second = (dict(zip(names, line, strict=True)) for line in ((0, 256, 9, 200, 200), (256, 512, 9, 150, 190)))
    lines = [
        {"run": "a", "family": "flash", "by_position": [first, second]},
        {"run": "b", "family": "aft_conv", "by_position": [first]},
        {"run": "c", "family": "flash"},
    ]
    write_jsonl(file, lines)
    positions.main([str(file), f"--out={tmp_path / 'out'}"])
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert [line["run"] for line in read_jsonl(tmp_path / "out" / "spans.jsonl")] == ["a", "a", "b"]
    assert "150.0 (190.0)" in table and "256–511" in table and "| c " not in table
    assert (tmp_path / "out" / "positions.png").stat().st_size > 1000
    for name, message in (("none.jsonl", "no file"), ("other.jsonl", "--carry")):
        (tmp_path / "other.jsonl").write_text('{"run": "c"}\n')
        with pytest.raises(InputError, match=message):
            positions.main([str(tmp_path / name), f"--out={tmp_path / 'out'}"])


SHELL = [path for folder in ("scripts", "benchmarks") for path in sorted((ROOT / folder).rglob("*.sh"))]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse(path):
    subprocess.run(["bash", "-n", path], check=True)
