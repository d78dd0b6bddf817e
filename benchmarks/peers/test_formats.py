"""The comparison of formats, with an oracle of Llamas instead of the peers' environment."""

import json
import sys

import numpy as np
import pytest
from oracles import llama as oracle_llama
from safetensors.numpy import load_file, save_file

from benchmarks.peers import formats
from flash_lm.errors import InputError, RunError
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")


def test_formats_need_the_peers_environment(tmp_path):
    with pytest.raises(InputError, match="make peers"):
        formats.main([f"--python={tmp_path / 'none'}", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("off", [None, "theirs", "again", "gradients"])
def test_models_are_imported_and_exported(off, tmp_path, monkeypatch):
    """`off`: what the oracle, or the gradient, is wrong in."""
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    case = formats.Case("llama", formats._LLAMA | small | {"num_key_value_heads": 1})
    monkeypatch.setattr(formats, "CASES", {"all share one": case})
    monkeypatch.setattr(formats, "LENGTH", 12)
    monkeypatch.setattr(formats, "CONTINUED", 4)
    monkeypatch.setattr(formats, "gradient_difference", lambda *_: 1e-3 * (off == "gradients"))

    def ask(python, kind, folder, settings=None):
        if settings:
            settings |= {"model_type": "llama", "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
            save_file(oracle_llama.draw(settings), folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(settings))
        arrays, about = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        rows, shift = np.load(folder / "ids.npy"), 1e-3 * (folder.name == off)
        text = rows[0]
        for _ in range(formats.CONTINUED):
            text = np.append(text, 1 + oracle_llama.logits(arrays, about, text)[-1, 1:].argmax())
        logits = np.stack([oracle_llama.logits(arrays, about, row) for row in rows]) + shift
        return formats.Answer(logits, text[rows.shape[1] :], {})

    monkeypatch.setattr(formats, "ask", ask)
    words = [f"--python={sys.executable}", f"--out={tmp_path}"]
    if off:
        with pytest.raises(RunError, match="all share one: not the same model"):
            formats.main(words)
    else:
        formats.main(words)
    (line,) = read_jsonl(tmp_path / "formats.jsonl")
    assert line["same_continuation"]
    assert [way for way in ("import", "export") if line[f"{way}_difference"] > 1e-5] == {
        None: [],
        "theirs": ["import", "export"],  # what both are compared with
        "again": ["export"],
        "gradients": [],
    }[off]
