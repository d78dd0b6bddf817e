"""The measures of a model beside its teacher: sums against values by hand, and all of them on a tiny model."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from inference.service.serving import random_model

from benchmarks.pretrained import linearise_measures
from benchmarks.pretrained.free_generation import equal_share, has_word, repeated_share
from benchmarks.pretrained.held_out import HeldOut
from benchmarks.pretrained.likelihood import Comparison, by_position
from benchmarks.pretrained.needles import NeedleTest
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")
KEYS = {"model.absolute_positions": "none", "model.rotary": True, "model.max_length": 512, "data.tokens_per_batch": 512}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of held-out text; document i has the words i·1000, i·1000 + 1, …."""
    folder = tmp_path_factory.mktemp("data")
    for text in ("wiki", "books"):
        (folder / text).mkdir()
        documents = [" ".join(str(1000 * i + j) for j in range(800)) for i in range(1, 6)]
        pyarrow.parquet.write_table(pa.table({"text": documents}), folder / text / "test.parquet")
    return folder


def test_passages_lie_within_documents_and_begin_with_a_word(data):
    passages = HeldOut(data, "wiki", "test").passages(ByteTokenizer(), 6, 100)
    assert passages.shape == (6, 101) and len({row.tobytes() for row in passages}) == 6
    for row in passages:
        first, *others = map(int, ByteTokenizer().decode(row[1:]).split(" ")[:-1])  # the last may be cut
        assert first >= 1000 and others == [*range(first + 1, first + 1 + len(others))]
    with pytest.raises(InputError, match="too few passages of 5000 tokens"):
        HeldOut(data, "wiki", "test").passages(ByteTokenizer(), 6, 5000)
    with pytest.raises(InputError, match="cannot read .*wiki.validation.parquet"):
        HeldOut(data, "wiki", "validation")


def test_scores_by_position():
    by_target = {
        "loss": np.log([[2.0, 8.0, 3.0], [2.0, 8.0, 3.0]]),
        "teacher_loss": np.log([[2.0, 2.0, 3.0]] * 2),
        "kl": np.array([[0.0, 1.0, 0.5], [2.0, 1.0, 0.5]]),
        "agreement": np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]]),
    }
    first, last = by_position(by_target, edges=(0, 2, 4, 8))
    assert (first["from"], first["to"], first["tokens"]) == (0, 2, 4) and (last["from"], last["to"]) == (2, 3)
    assert first["perplexity"] == pytest.approx(4.0) and first["teacher_perplexity"] == pytest.approx(2.0)
    assert (first["kl"], first["agreement"]) == (1.0, 0.5) and (last["kl"], last["agreement"]) == (0.5, 0.5)


def test_first_tokens():
    assert equal_share([[1, 2, 3, 9], [1, 9, 3]], [[1, 2, 3, 4], [1, 2, 3]], first=3) == pytest.approx(5 / 6)
    # Both end after a token; then one goes on, and so misses the end.
    assert equal_share([[1]], [[1]], first=3) == 1.0
    assert equal_share([[1, 2]], [[1]], first=3) == 0.5
    assert equal_share([[]], [[1, 2, 3]], first=3) == 0.0


def test_repeated_4_grams():
    # 1 2 3 4 occurs twice among the five of the first text, and those of other texts do not count.
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4]], n=4) == pytest.approx(1 / 6)
    assert repeated_share([[7] * 10], n=4) == pytest.approx(6 / 7)
    assert repeated_share([[1, 2, 3]], n=4) == 0.0


def test_words_of_answers():
    assert has_word("It is paris.", ["Paris"]) and has_word("There are 24 hours", ["twenty-four", "24"])
    assert not has_word("There are 240", ["24"]) and not has_word("A comparison", ["Paris"])


def test_a_comparison_is_that_of_full_logits(data):
    """In float64, from all logits at once."""
    model, teacher = random_model("text", "transformer_plus_plus", KEYS), random_model("text", "mc_tfm", KEYS)
    ids_NxL = HeldOut(data, "wiki", "test").passages(model.tokenizer, 3, 200)
    actual = Comparison(model, teacher)(ids_NxL)

    def log_probs(one):
        x = one.logits(ids_NxL[:, :-1]).astype(np.float64)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    ours, theirs = log_probs(model), log_probs(teacher)
    target = lambda x: -np.take_along_axis(x, ids_NxL[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(actual["loss"], target(ours), atol=1e-4)
    np.testing.assert_allclose(actual["teacher_loss"], target(theirs), atol=1e-4)
    np.testing.assert_allclose(actual["kl"], (np.exp(theirs) * (theirs - ours)).sum(axis=-1), atol=1e-4)
    assert (actual["agreement"] == (ours.argmax(axis=-1) == theirs.argmax(axis=-1))).mean() > 0.99


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_needle_is_found_by_its_digits(data, kind):
    """By a reader that looks the name up in the text; one that is wrong in the last digit has three of four."""
    model = random_model(kind, "transformer_plus_plus", KEYS)
    test = NeedleTest(model, HeldOut(data, "books", "test"), codes=2)

    def read(params, ids_1xL, first):
        assert ids_1xL.shape[1] == 450
        text = model.tokenizer.decode(ids_1xL[0, : first + 1])
        name = text.rsplit("The code of ", 1)[1].removesuffix(" is ")
        return model.tokenizer.encode([text.split(f"\nThe code of {name} is ")[1][:4]])[0]

    test._likeliest = read
    line = test(450, 12)
    assert line["form"] == {"text": "plain", "chat": "chat"}[kind]
    assert line["accuracy"] == line["digit_accuracy"] == 1 and [x["rows"] for x in line["by_depth"]] == [2, 2] + [1] * 8
    test._likeliest = lambda *row: np.append(read(*row)[:3], 0)
    line = test(450, 12)
    assert (line["accuracy"], line["digit_accuracy"]) == (0, 0.75)
    with pytest.raises(InputError, match="a chat with needles has more than 200 tokens"):
        NeedleTest(random_model("chat", keys=KEYS), HeldOut(data, "books", "test"), codes=4)(200, 1)


def test_another_tokenizer_is_refused():
    with pytest.raises(InputError, match="a_chat_run and a_text_run have different tokenizers"):
        linearise_measures.about(random_model("chat", keys=KEYS), random_model("text", keys=KEYS))
    with pytest.raises(InputError, match="--only: typos must be among layers, likelihood"):
        linearise_measures.main(["--model=a", "--teacher=a", "--data=b", "--out=c", "--only=speed,typos"])


@pytest.mark.slow("compiles every measure")
def test_every_measure_of_a_tiny_model(data, tmp_path, monkeypatch):
    """Beside itself: all agree; a line for each measure, with its provenance."""
    monkeypatch.setattr(linearise_measures, "about", lambda model, teacher: {"model": model.name})
    monkeypatch.setattr(linearise_measures, "keep_compiled", lambda: None)
    load = lambda name, overrides: random_model("chat", name, KEYS)
    monkeypatch.setattr(linearise_measures.flash_lm, "load", load)
    sizes = "--rows=256x2 --needle_lengths=450 --needles=2 --prompts=2 --new_tokens=20 --contexts=64 --speed_rows=2"
    models = "--model=transformer_plus_plus --teacher=transformer_plus_plus --turns=1"
    words = [f"--data={data}", f"--out={tmp_path / 'lines.jsonl'}", *sizes.split(), *models.split()]
    linearise_measures.main(words)
    lines = read_jsonl(tmp_path / "lines.jsonl")
    expected = ["likelihood", "likelihood", "needle", "generation", "generation", "questions", "speed"]
    assert [line["measure"] for line in lines] == expected
    assert all(line["versions"] and line["device"] and line["model"] == "a_chat_run" for line in lines)
    likelihood, generation, questions, speed = lines[0], *lines[-3:]
    assert (likelihood["kl"], likelihood["agreement"], likelihood["loss_gap"]) == (0, 1, 0)
    assert [x["to"] for x in likelihood["by_position"]] == [128, 256]
    assert (
        generation["first_16_equal"] == 1 and generation["repeated_4_grams"] == generation["teacher_repeated_4_grams"]
    )
    assert questions["questions"] == len(questions["answers"]) == 50
    # Keys and values of one layer, two heads of eight, in float32; and a position.
    assert speed["state_bytes"] == 2 * (2 * 64 * 2 * 8 * 4 + 4)
