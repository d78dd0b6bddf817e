"""Second lines of a model that was trained on couplets."""

import dataclasses
import itertools
import json
import pathlib

import numpy as np
import pytest

from flash_lm import generate
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.inference.couplets import CoupletWriter
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.scoring import evaluate
from flash_lm.inference.trained_model import load_model
from flash_lm.training.loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")
OTHER = dict(zip("春夏東南山", "秋冬西北水", strict=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Each character of a first line has one that answers it."""
    folder = tmp_path_factory.mktemp("couplets")
    firsts = ["".join(x) for n in (1, 2, 3) for x in itertools.product(OTHER, repeat=n)] * 5
    for name, lines in (("in.txt", firsts), ("out.txt", ["".join(OTHER[x] for x in first) for first in firsts])):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = get_config()
    config.model.update(
        family="transformer", num_layers=2, model_dim=32, num_heads=2, max_length=8, init="lecun", kernels="xla"
    )
    config.data.update(corpus="couplets", pack="examples", path=str(folder), tokens_per_batch=32 * 8)
    config.train.update(steps=150, learning_rate=1e-2, warmup_steps=10, eval_every=0, checkpoint_every=0)
    train(config, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def writer(run: pathlib.Path):
    return CoupletWriter(load_model(run))


def test_it_has_learned_the_answers(run):
    (scores,) = evaluate(run, "test", [])
    assert scores["accuracy"] > 0.95 and "word_perplexity" not in scores


def test_other_couplets_are_scored_with_the_characters_of_the_run(run, tmp_path):
    """In whose order they are, whatever the other text's are; one that it does not know counts as wrong."""
    firsts = ["山山", "南山", "東東", "?南"]
    for split in ("train", "validation", "test"):
        (tmp_path / split).mkdir()
        for name, lines in (("in.txt", firsts), ("out.txt", ["".join(OTHER.get(x, "!") for x in y) for y in firsts])):
            (tmp_path / split / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (scores,) = evaluate(run, "test", overrides=[f"--config.data.path={tmp_path}"])
    assert not scores["own_corpus"] and 0.6 < scores["accuracy"] < 0.95


def test_second_lines_are_as_long_as_the_first_and_ranked(writer):
    for first in ("春", "東山", "夏南春"):
        found = writer(first, candidates=16, sampling=Sampling(temperature=3.0))
        assert {len(one.text) for one in found} == {len(first)}
        assert len({one.text for one in found}) == len(found) > 1
        log_probs = [one.log_prob for one in found]
        assert log_probs == sorted(log_probs, reverse=True)
        (likeliest,) = writer(first, candidates=1, sampling=Sampling(temperature=0))
        assert likeliest.text == "".join(OTHER[x] for x in first)


def test_a_log_probability_is_the_models_own(run, writer):
    """The greedy second line's, against the logits of the whole row."""
    trained = load_model(run)
    (found,) = writer("東山", candidates=1, sampling=Sampling(temperature=0))
    begin, (first, second) = trained.tokenizer.begin, trained.tokenizer.encode(["東山", found.text])
    ids = np.concatenate([[begin], first, [begin], second])
    logits = np.asarray(trained.model.bind(trained.params)(ids[None, :-1]), np.float64)[0]
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = log_probs[np.arange(len(ids) - 1), ids[1:]][-2:].sum()
    assert found.log_prob == pytest.approx(expected, abs=1e-4)


def test_the_command(run, capsys):
    generate.main([f"--workdir={run}", "--prompt=春山", "--samples=4", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["text"] == "秋水" and lines[0]["first"] == "春山"
    generate.main([f"--workdir={run}", "--prompt=春山\n東", "--samples=1", "--temperature=0"])
    written = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert written == ["春山", "秋水", "東", "西"]
    with pytest.raises(InputError, match="couplets do not support --max_tokens"):
        generate.main([f"--workdir={run}", "--prompt=春", "--max_tokens=3"])


@pytest.mark.parametrize(
    ("first", "candidates", "expected"),
    [
        ("", 1, "the first line is empty"),
        ("春x", 1, "does not know what begins with 'x' in the first line"),
        ("春春春春", 1, "a first line of 4 characters is over the limit of 3"),
        ("春", 0, "samples=0 must be from 1"),
    ],
)
def test_what_cannot_be_answered(writer, first, candidates, expected):
    with pytest.raises(InputError, match=expected):
        writer(first, candidates)


def test_other_models_answer_no_couplets(run):
    trained = load_model(run)
    of_text = dataclasses.replace(trained.config.data, corpus="stdlib", pack="stream")
    other = dataclasses.replace(trained, config=dataclasses.replace(trained.config, data=of_text))
    with pytest.raises(InputError, match="was not trained to continue couplets"):
        CoupletWriter(other)
