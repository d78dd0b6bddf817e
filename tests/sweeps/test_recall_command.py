"""flash-lm recall: an attention of a plugin beside families, in one command."""

import pytest

from flash_lm import recall
from flash_lm.cli.load import load_config
from flash_lm.errors import InputError
from flash_lm.report.recall import short_labels
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.sweeps.recall import name_models

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = [
    "--config.data.mqar.words=32",
    "--config.data.mqar.train=((16,2,64),)",
    "--config.data.mqar.validation=((16,2,8),)",
    "--config.data.mqar.test=((16,2,8),)",
    "--config.model.max_length=16",
    "--config.model.num_layers=1",
    "--config.data.tokens_per_batch=128",
    "--config.train.steps=2",
    "--config.train.eval_every=0",
]


@pytest.mark.slow("trains and scores two models, and times one")
def test_a_plugin_is_compared_with_a_family(tmp_path, capsys, monkeypatch):
    """The one of docs/extend.md, which does not decode: it has no state, and is in the table and the picture."""
    monkeypatch.chdir(tmp_path)
    words = ["--models=sigmoid_window aft_simple", "--config.plugins=sigmoid_window", "--widths=16", "--rates=0.01"]
    recall.main([*words, *SMALL, "--rounds=1", "--format=svg"])
    out = tmp_path / "runs" / "recall"
    lines = {line["model"]: line for line in read_jsonl(out / "summary.jsonl")}
    assert "state_bytes" not in lines["sigmoid_window"] and lines["aft_simple"]["ms_a_token"] > 0
    assert "| sigmoid_window |" in (out / "table.md").read_text()
    assert (out / "recall.png").stat().st_size > 5000 and (out / "recall.svg").exists()
    capsys.readouterr()
    recall.main([*words, *SMALL])  # all is done: nothing is trained again
    assert "all jobs are done" in capsys.readouterr().out


def test_all_is_every_family_that_can_do_the_task(capsys):
    config = load_config("recall/mqar", [])
    names = name_models(["all", "based", "flash+short_convolution=5"], config)
    assert {"flash", "based", "mamba2"} <= set(names) and len(names) == len(set(names))
    assert names[-1] == "flash+short_convolution=5" and "linformer" not in names
    assert "transformer_xl is left out: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models=flsh transformer_xl"], r"flsh must be .*\(did you mean flash\?\), or all\n.*no short convolutions"),
        (["--models=flash+gau.headz=2"], "unknown key model.gau.headz: did you mean model.gau.heads"),
        (["--config=quickstart"], "data.corpus=stdlib has no answers to score"),
        (["--rates=fast"], "--rates=fast must be positive numbers"),
        (["--format=gif"], "--format=gif must be one of png, pdf, svg"),
    ],
)
def test_wrong_input_is_named_before_anything_is_written(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"(?s){message}"):
        recall.main(words)
    assert not list(tmp_path.iterdir())


def test_labels_say_only_what_differs():
    names = ["flash+short_convolution=3", "linear_transformer+short_convolution=3+num_layers=4+pattern=a,a,a,b"]
    assert [*short_labels(names).values()] == ["flash", "linear_transformer, layers 4, pattern of 4"]
