"""Scores of slices add up to the total score, and a needle may lie further back than the sequence length."""

import numpy as np
import pytest
from small import command, finish, small_config, write_corpus

from flash_lm.errors import InputError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def run(tmp_path_factory, usual_promotion):
    """A run of a language model."""
    folder = tmp_path_factory.mktemp("text")
    config = small_config(write_corpus(folder / "text"), folder / "cache", "linear_transformer")
    config.model.max_length, config.data.length = 80, 32
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    train(config, folder / "run")
    return folder / "run"


def mean(lines, key="loss"):
    return np.average([line[key] for line in lines], weights=[line["tokens"] for line in lines])


def test_recall_and_rest_add_up_to_the_total(run):
    (total,), slices = evaluate(run, "validation"), evaluate(run, "validation", slices=("recall",), rare=100)
    assert [line["slice"] for line in slices] == ["recall", "rest"]
    assert sum(line["tokens"] for line in slices) == total["tokens"] and min(line["tokens"] for line in slices) > 0
    assert mean(slices) == pytest.approx(total["loss"], rel=1e-5)
    assert mean(slices, "accuracy") == pytest.approx(total["accuracy"], rel=1e-6)
    by_position = evaluate(run, "validation", [16, 80], slices=("positions",))
    assert [(line["length"], line["slice"]) for line in by_position] == [(16, "0–15"), (80, "0–63"), (80, "64–79")]
    (longer,) = evaluate(run, "validation", [80])
    assert mean(by_position[1:]) == pytest.approx(longer["loss"], rel=1e-5)
    fewer = evaluate(run, "validation", slices=("recall",), rare=60)
    assert 0 < fewer[0]["tokens"] < slices[0]["tokens"]
    with pytest.raises(InputError, match="the slice recall of the validation split has no target: change --rare"):
        evaluate(run, "validation", slices=("recall",), rare=1)


def test_slices_of_one_pass_are_those_of_each(run):
    """The line of all targets is the one without slices."""
    kinds = ("positions", "recall")
    full, *together = evaluate(run, "validation", slices=("all", *kinds), rare=100)
    (alone,) = evaluate(run, "validation")
    assert full == pytest.approx(alone, rel=1e-6)
    each = [*evaluate(run, "validation", slices=kinds[:1]), *evaluate(run, "validation", slices=kinds[1:], rare=100)]
    assert [(x["slices"], x["slice"]) for x in together] == [
        ("positions", "0–31"),
        ("recall", "recall"),
        ("recall", "rest"),
    ]
    for one, other in zip(together, each, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_blocks_add_up_to_the_total_and_to_each_slice(run):
    (full,) = evaluate(run, "train", blocks=5)
    assert len(full["nll_blocks"]) == 5 and len(set(full["nll_blocks"])) == 5
    *before, last = full["tokens_blocks"]
    assert sum(before) + last == full["tokens"] and all(0.95 < count / 1024 <= 1 for count in before)  # of four batches
    assert sum(full["nll_blocks"]) == pytest.approx(full["nll"], rel=1e-5)
    slices = evaluate(run, "train", slices=("recall",), rare=100, blocks=5)
    for key in ("nll_blocks", "tokens_blocks"):
        np.testing.assert_allclose(sum(np.array(line[key]) for line in slices), full[key], rtol=1e-4)
    (few,) = evaluate(run, "validation", blocks=50)
    assert 1 < len(few["nll_blocks"]) < 50  # a block has a batch at least
    assert "nll_blocks" not in evaluate(run, "validation")[0]


@pytest.mark.slow("starts a process that scores a run")
def test_the_command_writes_a_line_for_each_slice(run):
    out, _ = finish(
        command("flash_lm.evaluate", f"--workdir={run}", "--split=validation", "--slices=recall", "--rare=100")
    )
    assert "validation, recall at length 32" in out and "validation, rest at length 32" in out
    assert [line["slice"] for line in read_jsonl(run / "slices.jsonl")] == ["recall", "rest"]
    assert not (run / "results.jsonl").exists()


def test_pairs_are_counted_in_the_text_of_training(run, tmp_path):
    other = write_corpus(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="score a split of the run's corpus"):
        evaluate(run, "validation", slices=("recall",), overrides=[f"--config.data.path={other}"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"slices": ("other",)}, "--slices is some of all, recall, positions, parts"),
        ({"slices": ()}, "--slices is some of all, recall, positions, parts"),
        ({"slices": ("recall",), "carry": True}, "without --carry"),
        ({"rare": 3}, "--rare belongs to --slices=recall"),
        ({"slices": ("parts",)}, "--slices=parts needs a corpus of parts"),
    ],
)
def test_what_cannot_be_sliced(run, options, expected):
    with pytest.raises(InputError, match=expected):
        evaluate(run, "validation", **options)


@pytest.fixture(scope="module")
def needles(tmp_path_factory, usual_promotion):
    """A run without a longest position, on sequences of 192 bytes."""
    folder = tmp_path_factory.mktemp("needles")
    config = small_config(write_corpus(folder / "text"), folder / "cache", "linear_transformer")
    config.model.update(absolute_positions="none", rotary=True, max_length=192)
    config.data.update(corpus="needle", pack="examples", length=192, tokens_per_batch=8 * 192)
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    train(config, folder / "run")
    return folder / "run"


@pytest.mark.slow("needs a run that only slow tests share")
def test_examples_that_fill_a_row_follow_its_length(needles):
    with pytest.raises(InputError, match="have no fixed length: set --config.data.needle.length"):
        evaluate(needles, "validation", carry=True)


@pytest.mark.slow("trains a run, scores it twice, and starts a process")
def test_the_optimal_bigram_loss_is_next_to_the_score(tmp_path):
    config = small_config(None, tmp_path, "linear_transformer")
    config.model.update(absolute_positions="none", rotary=True)
    config.data.update(corpus="bigrams", pack="examples", length=32)
    config.data.bigrams.symbols = 4
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    train(config, tmp_path / "run")
    (line,) = evaluate(tmp_path / "run", "validation")
    assert 0.3 < line["best_loss"] < line["loss"]
    (long,) = evaluate(tmp_path / "run", "validation", carry=True, overrides=["--config.data.bigrams.length=80"])
    assert long["tokens"] == 512 * 80
    out, _ = finish(command("flash_lm.evaluate", f"--workdir={tmp_path / 'run'}", "--split=validation"))
    assert "the best reader's perplexity is" in out


@pytest.mark.slow("needs a run that only slow tests share")
def test_parts_add_up_to_the_total(needles):
    (total,), parts = evaluate(needles, "validation"), evaluate(needles, "validation", slices=("parts",))
    assert len(parts) == 10 and {line["tokens"] for line in parts} == {80}
    assert mean(parts) == pytest.approx(total["loss"], rel=1e-5)


@pytest.mark.slow("scores a run five times, at several lengths")
def test_a_needle_beyond_the_row(needles):
    """A text as long as a row has the same score with and without a carried state; a longer one needs the state."""
    (row,) = evaluate(needles, "validation")
    length = "--config.data.needle.length={}".format
    (same,) = evaluate(needles, "validation", carry=True, overrides=[length(192)])
    assert same["loss"] == pytest.approx(row["loss"], rel=1e-4) and same["tokens"] == row["tokens"] == 800
    (long,) = evaluate(needles, "validation", carry=True, overrides=[length(500)])
    assert long["tokens"] == 800 and not long["own_corpus"]
    (span,) = long["by_position"]
    assert (span["from"], span["to"], span["tokens"]) == (384, 768, 800)
    # The same in one sequence of 500 tokens, as positions have no limit.
    (full,) = evaluate(needles, "validation", [500])
    assert long["loss"] == pytest.approx(full["loss"], rel=1e-4)
    with pytest.raises(InputError, match="--first is of documents of text"):
        evaluate(needles, "validation", carry=True, first=192)
