"""Windows of a long text: made-up ones with the answer known, and a small run's."""

import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.train_loop import train
from studies.claims import long_text

pytestmark = pytest.mark.usefixtures("usual_promotion")


def test_a_text_that_repeats_itself_shows():
    fresh, stuck = np.arange(16), np.full(16, 7)
    tokens = np.stack([np.concatenate([fresh, stuck]), np.concatenate([fresh, fresh])])
    log_probs = np.concatenate([np.full((2, 16), -3.0), np.full((2, 16), -0.5)], axis=1)
    first, last = long_text.window_statistics(tokens, log_probs, 16)
    assert first == {"start": 0, "nll": 3.0, "distinct": 1.0}
    # 13 runs of four in a window: one different among those of the stuck text, all of the fresh one.
    assert last["start"] == 16 and last["nll"] == 0.5 and last["distinct"] == pytest.approx((1 / 13 + 1) / 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    config = small_config(write_corpus(folder / "text"), folder / "cache")
    config.train.update(steps=2, warmup_steps=0)
    train(config, folder / "mine")
    return folder


@pytest.mark.slow("trains a run and generates long texts")
def test_a_run_beyond_the_length_of_its_training(folder, capsys):
    script, out = long_text, folder / "out.jsonl"
    script.main([str(folder / "mine"), "--tokens=80", "--samples=2", f"--out={out}"])
    lines = read_jsonl(out)
    length = lines[0]["length"]
    assert [line["start"] for line in lines] == list(range(0, 80 - length + 1, length))
    # An untrained model draws words of about the same likelihood all along.
    vocabulary = lines[0]["nll"]
    assert all(line["nll"] == pytest.approx(vocabulary, rel=0.2) and 0 < line["distinct"] <= 1 for line in lines)
    assert all(line["run"] == "mine" and "git" in line for line in lines)
    assert "different runs of four" in capsys.readouterr().out
    with pytest.raises(InputError, match=f"--tokens=8 must be at least {length}"):
        script.main([str(folder / "mine"), "--tokens=8", f"--out={out}"])
