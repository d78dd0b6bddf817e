"""A service of models that read their prompts as a prefix, or with an encoder."""

import pytest

from flash_lm.inference.couplets import CoupletWriter
from flash_lm.inference.generation import Generator
from flash_lm.inference.sampling import Sampling
from inference.service.serving import random_model, service

pytestmark = pytest.mark.usefixtures("usual_promotion")
PREFIX = {"task": "prefix_lm", "model.family": "linear_transformer"}
READS = {"task": "seq2seq", "model.encoder.family": "transformer_plus_plus"}
PAIRS = {"data.corpus": "hf", "data.path": "pairs", "data.pair_column": "answer", "data.pack": "examples"}
FORMS = {"prefix": PREFIX, "prefix_of_pairs": PREFIX | PAIRS, "pairs": READS | PAIRS}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(x, marks=pytest.mark.slow("another form of the same task") if x == "prefix" else ()) for x in FORMS
    ],
)
def form(request):
    with service("text", keys=FORMS[request.param]) as client:
        yield client, Generator(random_model("text", keys=FORMS[request.param]))


def test_texts_equal_those_of_the_command(form):
    client, generator = form
    prompts = ["a naïve tree", "def f(", "猫"]
    alone = generator.generate(prompts, 12, Sampling(temperature=0))
    asked = {"model": "a_text_run", "prompt": prompts, "temperature": 0, "max_tokens": 12}
    answer = client.post("/v1/completions", json=asked).json()
    assert [one["text"] for one in answer["choices"]] == [one.text for one in alone]


def test_scores_that_such_a_model_lacks(form):
    client, _ = form
    asked = {"model": "a_text_run", "prompt": "ab", "logprobs": 1}
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 422
    assert "does not read a prompt from left to right: leave out logprobs" in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long(form):
    client, generator = form
    limit = 32
    answer = client.post("/v1/completions", json={"model": "a_text_run", "prompt": "a" * 40, "max_tokens": 1})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    message = answer.json()["error"]["message"]
    if generator.engine.conditioning.separate_source:
        assert message == "a prompt of 42 tokens is over the limit of 32 of the encoder of a_text_run: shorten it"
    else:
        assert str(limit) in message


@pytest.mark.parametrize("keys", [PREFIX, READS], ids=["prefix", "source"])
@pytest.mark.slow("compiles two models and their services")
def test_second_lines_equal_those_of_the_command(keys):
    writer = CoupletWriter(random_model("couplets", keys=keys))
    body = {"first": "春南", "candidates": 4, "temperature": 1, "seed": 3}
    with service("couplets", keys=keys) as client:
        answer = client.post("/api/second_lines", json=body).json()["candidates"]
    alone = writer("春南", 4, Sampling(), 3)
    assert [one["text"] for one in answer] == [one.text for one in alone]
    assert all(len(one.text) == 2 for one in alone)
