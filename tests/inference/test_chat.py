"""Chats with a model in Python and on the command line."""

import dataclasses
import json

import numpy as np
import pytest
from chats import CHATML, assistant, chat_tokenizer, tokenizer_json, user

from flash_lm import generate
from flash_lm.cli import generate_output
from flash_lm.data.foreign_tokenizer import HuggingFaceTokenizer, read_tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.export import export
from flash_lm.inference.generation import Generator
from flash_lm.inference.sampling import Sampling
from inference.service.serving import random_model
from inference.test_export import trained_model
from inference.test_llama import SHAPE

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def model():
    return random_model("chat")


@pytest.fixture
def run(model, monkeypatch, capsys):
    """Runs the command on the model; returns what it prints."""
    monkeypatch.setattr(generate_output, "load_model", lambda *_, **__: model)

    def run(*words: str) -> str:
        generate.main(["--workdir=mine", "--max_tokens=9", "--temperature=0", *words])
        return capsys.readouterr().out

    return run


def assert_greedy(model, ids, text: str) -> None:
    """Checks that a text of bytes is what the model's logits alone continue ids with, up to its end or 9 tokens."""
    (new,) = model.tokenizer.encode([text])
    logits = model.logits(np.pad(np.concatenate([ids, new]), (0, 9 - len(new))))[len(ids) - 1 : len(ids) + 8]
    allowed = model.text_ids()
    allowed[model.tokenizer.end] = True
    best = np.where(allowed, logits, -np.inf).argmax(axis=1)[: len(new) + 1].tolist()
    assert best[:9] == [*new, *([model.tokenizer.end] if len(new) < 9 else [])]


def test_an_answer_continues_the_rendered_chat(model):
    chat = [user("ä"), assistant("b"), user("c")]
    text = "<|im_start|>user\nä<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    (marked,) = chat_tokenizer().encode_marked([text + "<|im_start|>assistant\n"])
    expected = model.chat(chat, 9, temperature=0)
    assert expected != model.generate("c", 9, temperature=0)
    assert_greedy(model, marked.ids, expected)
    assert isinstance(model.chat(chat, 4, beams=2), str)
    (alone,) = Generator(model).generate([marked.ids], 9, Sampling(temperature=0))
    assert alone.text == expected and alone.prompt == model.decode_text(marked.ids)


def test_the_command_prints_the_answer_alone(model, run):
    system = {"role": "system", "content": "Be brief."}
    expected = model.chat([system, user("ä")], 9, temperature=0)
    assert run("--chat", "--prompt=ä", "--system=Be brief.") == expected + "\n"
    assert run("--chat", "--prompt=ä") == model.chat([user("ä")], 9, temperature=0) + "\n"
    answer = json.loads(run("--chat", "--prompt=ä", "--system=Be brief.", "--json"))
    assert answer["text"] == expected and answer["prompt"] == "ä"
    assert run("--prompt=ä") == "ä" + model.generate("ä", 9, temperature=0) + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system=a"], "--system is a message of a chat: set --chat, too"),
        (["--chat", "--continuation=a"], "leave out --continuation or --chat"),
        (["--chat", "--prompt=<|im_end|>"], "message 1 spells <|im_end|>"),
        (["--chat", "--max_tokens=0"], "max_tokens=0 must be from 1"),
    ],
    ids=str,
)
def test_flags_that_are_refused(run, words, message):
    with pytest.raises(InputError) as error:
        run("--prompt=a", *words)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "a_text_run has no chat template: give it a text without chat"),
        ("couplets", "a_couplets_run writes second lines of couplets: leave out --chat"),
        ("fill_in", "a_fill_in_run is a masked language model and does not support --chat"),
    ],
)
def test_models_that_do_not_chat(kind, message, monkeypatch):
    other = random_model(kind)
    monkeypatch.setattr(generate_output, "load_model", lambda *_, **__: other)
    with pytest.raises(InputError, match=message):
        generate.main(["--workdir=mine", "--chat", "--prompt=a"])
    assert not other.can_chat


@pytest.mark.parametrize("has_begin", [True, False])
def test_a_model_for_transformers_keeps_its_template(has_begin, tmp_path):
    """And does not turn what texts begin with into a begin-of-text that the template would write."""
    trained = trained_model(tmp_path / "run", "transformer_plus_plus", **SHAPE)
    tokenizer = HuggingFaceTokenizer.of(json.loads(tokenizer_json()), 1, 2, CHATML, has_begin=has_begin)
    export(dataclasses.replace(trained, tokenizer=tokenizer), tmp_path / "out", "mit", "llama")
    assert read_tokenizer(tmp_path / "out").has_begin == has_begin
    assert read_tokenizer(tmp_path / "out").fingerprint == tokenizer.fingerprint
