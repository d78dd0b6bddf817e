"""The evaluate command: extreme numbers, and runs that are still training."""

import math
import shutil

import pytest
from small import small_config, write_corpus

from flash_lm.config.changes import apply_changes
from flash_lm.errors import InputError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.provenance import provenance
from flash_lm.runs.run_folder import RunFolder, run_hash
from flash_lm.training.evaluation import perplexity
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = small_config(write_corpus(folder / "text"), folder / "cache")
    config.train.steps = 3
    train(config, folder / "run")
    return folder / "run"


def test_perplexity_at_its_edges():
    assert perplexity(2.0, 4) == math.exp(0.5)
    assert perplexity(1e6, 10) == math.inf
    assert math.isnan(perplexity(1.0, 0))


def test_evaluation_does_not_change_a_run_that_is_training(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    writing = tmp_path / "run" / "checkpoints" / "6.orbax-checkpoint-tmp"
    writing.mkdir()
    (writing / "half").write_text("written")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "spl')
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    (result,) = evaluate(tmp_path / "run", "test", [])
    assert result["step"] == 3 and result["train_step_ms"] > 0
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before


def test_a_result_records_its_provenance(run):
    """Seed and config of the run; device, versions and commit of the scoring, and those of the training."""
    (line,) = evaluate(run, "test", [])
    expected = provenance("cpu")
    assert expected.items() <= line.items() and line["seed"] == 0 and line["batch_tokens"] == 256
    assert {name: line[f"trained_{name}"] for name in expected} == expected
    # What computed the attention, in training and in scoring.
    assert line["implementations"] == line["trained_implementations"] == "softmax attention: blocked"
    config = RunFolder(run).config
    compute_hash = lambda **changes: run_hash(apply_changes(config, changes).to_dict())
    assert line["config_hash"] == compute_hash() == compute_hash(**{"data.path": "moved", "data.cache_dir": "too"})
    assert line["config_hash"] != compute_hash(**{"train.learning_rate": 1.0})


def test_line_ends_count_as_words(run):
    """As in the published figures for WikiText: the same nats over more words."""
    (line,) = evaluate(run, "test", [])
    words, eos = (line["nll"] / math.log(line[name]) for name in ("word_perplexity", "word_perplexity_eos"))
    assert words == pytest.approx(round(words)) and eos == pytest.approx(round(eos)) and eos > words


def test_figures_do_not_depend_on_the_batch(run, tmp_path):
    (one,) = evaluate(run, "test", [])
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"tokens_per_batch": 256', '"tokens_per_batch": 1024'))
    (other,) = evaluate(tmp_path / "run", "test", [])
    for name in ("loss", "bits_per_byte"):
        assert math.isclose(one[name], other[name], rel_tol=1e-6)
    for name in ("perplexity", "word_perplexity"):  # the rounding of exp(sum) grows with the sum
        assert math.isclose(math.log(one[name]), math.log(other[name]), rel_tol=1e-6)
    assert one["tokens"] == other["tokens"]


def test_a_run_without_a_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(InputError, match="has no checkpoint yet"):
        evaluate(tmp_path / "run", "test", [])
    assert not (tmp_path / "run" / "checkpoints").exists()
