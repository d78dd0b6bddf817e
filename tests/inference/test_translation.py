"""Answers to a full split of pairs, and their scores."""

import dataclasses
import json
import math

import numpy as np
import pytest
from small import small_config, write_pairs

from flash_lm import translate as command
from flash_lm.data.couplets import couplets
from flash_lm.data.splits import load_splits
from flash_lm.data.synthetic.copying import copying
from flash_lm.data.synthetic.mqar import MQAROptions, mqar
from flash_lm.errors import InputError
from flash_lm.inference.generation import Generator
from flash_lm.inference.settings import BeamSearch
from flash_lm.inference.translation import Translation, compute_scores, translate
from flash_lm.training.train_loop import train
from inference.service.serving import CHARACTERS, random_model

pytestmark = pytest.mark.usefixtures("usual_promotion")
PAIRS = [("eins zwei", "one two"), ("drei", "three"), ("ein Satz", "a sentence"), ("ja", "yes"), ("nein", "no")]
OF_PAIRS = {"data.corpus": "hf", "data.pair_column": "en", "data.text_column": "de", "data.pack": "examples"}
FORMS = {
    "decoder": {"model.family": "linear_transformer"},
    "prefix": {"task": "prefix_lm", "model.family": "linear_transformer"},
    "encoder": {"task": "seq2seq", "model.encoder.family": "transformer_plus_plus"},
}
GREEDY = BeamSearch(1)


@pytest.fixture
def folder(tmp_path):
    return write_pairs(tmp_path / "pairs", PAIRS)


def make_model(folder, form: str, **keys):
    """A model with random parameters, and the pairs."""
    paths = {"data.path": str(folder), "data.cache_dir": str(folder.parent / "cache")}
    trained = random_model("text", keys=OF_PAIRS | paths | FORMS[form] | keys)
    return trained, load_splits(trained.config.data)


@pytest.mark.parametrize(
    "form",
    [
        "encoder",
        *(pytest.param(x, marks=pytest.mark.slow("another form of the same task")) for x in ("decoder", "prefix")),
    ],
)
def test_each_first_text_gets_its_answer(form, folder):
    """In the order of the split, though batches are sorted by length; equal to those of `generate`."""
    trained, corpus = make_model(folder, form)
    translations = translate(trained, corpus, "test", BeamSearch(2), max_tokens=6)
    assert [(one.first, one.second) for one in translations] == PAIRS
    answers = Generator(trained).search([first for first, _ in PAIRS], 6, BeamSearch(2))
    assert [one.answer for one in translations] == [best.text for best, *_ in answers]
    assert len({one.answer for one in translations}) > 1
    assert translate(trained, corpus, "test", BeamSearch(2), first=2, max_tokens=6) == translations[:2]


def test_a_source_is_truncated_as_in_training_and_a_second_text_is_not(folder):
    trained, corpus = make_model(folder, "encoder", **{"data.length": 6, "data.tokens_per_batch": 48})
    translations = translate(trained, corpus, "test", GREEDY, first=1)
    assert (translations[0].first, translations[0].second) == ("eins ", "one two")


@pytest.mark.slow("compiles a model for other lengths")
def test_an_answer_has_the_positions_that_its_prompt_leaves(folder):
    """Sequences of 24 tokens: each answer has the rest after its prompt, whatever else is in the batch."""
    keys = {"model.family": "aft_full", "model.max_length": 24, "data.length": 24, "data.tokens_per_batch": 96}
    trained, corpus = make_model(folder, "decoder", **keys)
    generator = Generator(trained)
    translations = translate(trained, corpus, "test", GREEDY)
    for one, (first, _) in zip(translations, PAIRS, strict=True):
        ((best,),) = generator.search([first], 24 - len(f"<{first}><"), GREEDY)
        assert one.answer == best.text


def test_the_copy_task_has_answers_of_the_length_of_the_source():
    trained = random_model("text")
    trained = dataclasses.replace(trained, tokenizer=copying().tokenizer)
    (translations,) = translate(trained, copying(reverse=True), "test", GREEDY, first=1)
    assert translations.second == translations.first[::-1] and set(translations.answer) <= set("abcdefghij")
    assert len(translations.answer) == len(translations.second)


def test_a_couplets_answer_is_as_long_as_the_second_line(tmp_path):
    trained = random_model("couplets", "transformer_plus_plus")
    lines = [("春夏", "秋冬"), ("東南西", "北山水"), ("山", "水"), ("東春", "南夏")]
    for split in ("train", "validation", "test"):
        (tmp_path / split).mkdir()
        for name, column in zip(("in.txt", "out.txt"), zip(*lines, strict=True), strict=True):
            (tmp_path / split / name).write_text("\n".join(column) + "\n", encoding="utf-8")
    corpus = couplets(dataclasses.replace(trained.config.data, path=str(tmp_path)), trained.tokenizer)
    translations = translate(trained, corpus, "test", BeamSearch(3))
    assert [(one.first, one.second) for one in translations] == lines
    assert all(len(one.answer) == len(one.second) and set(one.answer) <= set(CHARACTERS) for one in translations)


def test_scores_of_answers_that_equal_the_reference_or_are_shorter():
    """Shorter answers are penalized: all their n-grams match, so BLEU is the brevity penalty alone."""
    scores = compute_scores([Translation("x", "the cat sat on the mat", "the cat sat on")], "13a")
    assert math.isclose(scores["bleu"], 100 * math.exp(1 - 6 / 4))
    assert scores["exact"] == 0 and scores["pairs"] == 1 and "tok:13a" in scores["bleu_signature"]
    two = [Translation("x", "春山水色青", "春山水色青"), Translation("x", "a b", "b a")]
    assert compute_scores(two, "char")["exact"] == 0.5
    assert math.isclose(compute_scores(two[:1], "char")["bleu"], 100) and compute_scores(two[:1], "13a")["bleu"] < 100


def test_data_without_a_second_text(folder):
    trained, corpus = make_model(folder, "decoder")
    with pytest.raises(InputError, match="was trained with task=masked_lm, and does not write texts"):
        translate(random_model("fill_in"), corpus, "test", GREEDY)
    text = load_splits(dataclasses.replace(trained.config.data, pair_column=None, pack="stream"))
    for other in (mqar(MQAROptions()), text):
        with pytest.raises(InputError, match="translations are of pairs of texts"):
            translate(trained, other, "test", GREEDY)
    with pytest.raises(InputError, match="an answer of reverse is as long as its second text; leave it out"):
        translate(trained, copying(reverse=True), "test", GREEDY, max_tokens=3)


@pytest.mark.slow("trains a run")
def test_the_command(folder, capsys):
    config = small_config(str(folder), folder.parent / "cache", "transformer_plus_plus")
    config.update_from_flattened_dict(OF_PAIRS | FORMS["encoder"] | {"mesh.shape": (-1, 1, 1)})
    config.train.update(steps=300, learning_rate=1e-2, eval_every=0, checkpoint_every=0)
    run = folder.parent / "run"
    train(config, run)
    command.main([f"--workdir={run}", "--beams=2", f"--answers={run / 'new' / 'answers.jsonl'}"])
    out = capsys.readouterr().out
    assert "100.00% equal, over 5 pairs" in out
    (line,) = map(json.loads, (run / "bleu.jsonl").read_text().splitlines())
    assert (line["exact"], line["beams"], line["split"]) == (1.0, 2, "test") and np.isclose(line["chrf"], 100)
    answers = [json.loads(x) for x in (run / "new" / "answers.jsonl").read_text().splitlines()]
    assert [(one["first"], one["answer"]) for one in answers] == PAIRS
    with pytest.raises(InputError, match="beams=0 must be from 1"):
        command.main([f"--workdir={run}", "--beams=0"])
    with pytest.raises(InputError, match="no split none"):
        command.main([f"--workdir={run}", "--split=none"])
