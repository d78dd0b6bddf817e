"""/v1/completions against the same model in Python, the openai client, and lm_eval's local-completions."""

import concurrent.futures
import json
import math
import random
import threading

import openai
import pytest

from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.service.completion_format import CompletionAsked, TokenizeAsked
from flash_lm.inference.service.completions import BEGIN, END, Completions
from flash_lm.inference.service.requests import TextAsked
from flash_lm.inference.service.stop_strings import StopStringFilter
from flash_lm.inference.token_scores import TokenScorer
from inference.service.serving import gauge, service, wait_until

pytestmark = pytest.mark.usefixtures("usual_promotion")
NAME = "a_text_run"


def complete(text, **asked):
    answer = text.post("/v1/completions", json={"model": NAME, "temperature": 0, **asked})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(prompt: str) -> list[int]:
    return ByteTokenizer().encode([prompt])[0].tolist()


def test_completions_of_texts_and_ids_equal_those_of_generate(text, generator):
    prompts = ["a naïve tree", "def f(", "猫"]
    alone = generator.generate(prompts, 12, Sampling(temperature=0))
    for asked in (prompts, [*map(ids, prompts)], [[ByteTokenizer.begin, *ids(x)] for x in prompts]):
        answer = complete(text, prompt=asked, max_tokens=12)
        assert [one["text"] for one in answer["choices"]] == [one.text for one in alone]
        assert [one["finish_reason"] for one in answer["choices"]] == [
            {"end": "stop", "length": "length"}[one.finish_reason] for one in alone
        ]
    assert answer["object"] == "text_completion" and answer["model"] == NAME
    new = sum(len(one.tokens) for one in alone)
    count = sum(map(len, asked))
    assert answer["usage"] == {"prompt_tokens": count, "completion_tokens": new, "total_tokens": count + new}


def test_samples_differ_and_repeat_with_their_seed(text, generator):
    answer = complete(text, prompt="ab", n=3, seed=5, temperature=1, max_tokens=9)
    alone = generator.generate(["ab"] * 3, 9, Sampling(), 5)
    assert [one["text"] for one in answer["choices"]] == [one.text for one in alone]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    twice = [complete(text, prompt="ab", temperature=1, max_tokens=20)["choices"][0]["text"] for _ in range(2)]
    assert twice[0] != twice[1]  # without a seed


@pytest.mark.parametrize("seed", [2**40 + 5, 2**63 - 1, -(2**63), -5])
def test_a_seed_has_64_bits(text, generator, seed):
    one = lambda seed: complete(text, prompt="ab", seed=seed, temperature=1, max_tokens=20)["choices"][0]["text"]
    (alone,) = generator.generate(["ab"], 20, Sampling(), seed)
    assert one(seed) == alone.text != one(seed % 2**32)


def test_a_seed_of_minus_one_means_no_seed(text):
    asked = {"prompt": "ab", "seed": -1, "max_tokens": 20}
    assert len({complete(text, **asked, temperature=1)["choices"][0]["text"] for _ in range(3)}) == 3
    assert len({text.post("/api/generate", json=asked).json()["text"] for _ in range(3)}) == 3


def test_null_is_the_default_and_parameters_without_effect_are_accepted(text):
    asked = {"prompt": "a naïve", "seed": 3, "max_tokens": 9}
    full = complete(text, **asked, temperature=1.0)["choices"]
    optional = CompletionAsked.model_fields.keys() - asked.keys()
    assert complete(text, **asked, **dict.fromkeys(optional))["choices"] == full
    nothing = {
        "logit_bias": {},
        "suffix": "",
        "best_of": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "stop": [],
    }
    nothing |= {"user": "somebody", "stream_options": {"include_usage": None, "include_obfuscation": False}}
    client = openai.OpenAI(base_url=f"{text.server.url}/v1", api_key="none", max_retries=0)
    assert client.completions.create(model=NAME, **asked, **nothing).choices[0].text == full[0]["text"]
    assert complete(text, **asked, temperature=1, logit_bias={"50": 0})["choices"] == full
    for path, kind, actual in (("/api/generate", TextAsked, "text"), ("/tokenize", TokenizeAsked, "tokens")):
        bodies = {"prompt": "ab"}, dict.fromkeys(kind.model_fields) | {"prompt": "ab"}
        without, null = (text.post(path, json=body).json()[actual] for body in bodies)
        assert without == null


def test_echo_and_logprobs_equal_those_of_the_model(text, generator):
    prompt, after = "a tree and ", "naïve"
    (scored,) = generator.score([prompt], [after])
    answer = complete(text, prompt=prompt + after, max_tokens=0, echo=True, logprobs=2)["choices"][0]
    assert answer["text"] == prompt + after and answer["finish_reason"] == "length"
    actual = answer["logprobs"]
    count = len(scored.log_probs)
    assert actual["token_logprobs"][-count:] == pytest.approx(scored.log_probs, abs=1e-4)
    assert None not in actual["token_logprobs"] and len(actual["tokens"]) == len(ids(prompt + after))
    assert actual["tokens"][:3] == ["a", " ", "t"] and actual["tokens"][-4:-1] == ["bytes:\\xc3", "bytes:\\xaf", "v"]
    assert actual["text_offset"][-4:] == [13, 13, 14, 15]
    for value, top in zip(actual["token_logprobs"], actual["top_logprobs"], strict=True):
        assert len(top) in (2, 3) and value in top.values() and value <= max(top.values()) < 0


def test_logprobs_of_generated_tokens(text, generator):
    (alone,) = generator.generate(["def "], 10, Sampling(temperature=0))
    answer = complete(text, prompt="def ", max_tokens=10, logprobs=1)["choices"][0]["logprobs"]
    assert answer["token_logprobs"][: len(alone.tokens)] == pytest.approx(alone.log_probs, abs=1e-4)
    for value, top in zip(answer["token_logprobs"], answer["top_logprobs"], strict=True):
        assert [*top.values()] == [value]  # the most likely token was chosen
    alone = complete(text, prompt="def ", max_tokens=10, logprobs=0)["choices"][0]["logprobs"]
    assert alone["top_logprobs"] is None and alone["token_logprobs"] == pytest.approx(
        answer["token_logprobs"], abs=1e-5
    )


def test_a_generated_end_token_has_a_logprob(text, generator):
    """Clients expect as many tokens as they asked for."""
    for number in range(200):
        (alone,) = generator.generate(["ab"], 4, Sampling(temperature=3.0), number)
        if alone.finish_reason == "end":
            break
    answer = complete(text, prompt="ab", max_tokens=4, temperature=3.0, seed=number, logprobs=1)["choices"][0]
    assert answer["finish_reason"] == "stop" and answer["text"] == alone.text
    assert answer["logprobs"]["tokens"][-1] == END and len(answer["logprobs"]["tokens"]) == len(alone.tokens) + 1


def test_the_first_token_has_no_logprob_after_an_explicit_begin_of_text(text):
    begin = ByteTokenizer.begin
    explicit = complete(text, prompt=[begin, *ids("ab")], max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    put = complete(text, prompt=ids("ab"), max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert explicit["tokens"] == [BEGIN, *put["tokens"]] and explicit["text_offset"] == [0, 0, 1]
    assert explicit["token_logprobs"] == [None, *put["token_logprobs"]] and explicit["top_logprobs"][0] is None
    alone = complete(text, prompt=[begin], max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert alone["logprobs"]["token_logprobs"] == [None] and alone["text"] == ""


def test_a_stop_ends_the_text_and_the_row(text, generator):
    (full,) = generator.generate(["x"], 40, Sampling(temperature=0))
    index = next(i for i in range(4, 40) if full.text.index(full.text[i : i + 2]) == i)
    stop = full.text[index : index + 2]
    before = gauge(text, "tokens_total")
    answer = complete(text, prompt="x", max_tokens=40, stop=["never ever", stop], logprobs=1)["choices"][0]
    assert answer["text"] == full.text[:index] and answer["finish_reason"] == "stop"
    assert len(answer["logprobs"]["tokens"]) == len([x for x in answer["logprobs"]["text_offset"] if x < index]) > 0
    assert gauge(text, "tokens_total") - before < 40  # the row ended early
    wait_until(lambda: gauge(text, "running_rows") == 0)


def chunks(text, **asked):
    with text.stream("POST", "/v1/completions", json={"temperature": 0, "stream": True, **asked}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_adds_up_to_the_answer(text):
    asked = {"prompt": ["a naïve", "猫"], "n": 2, "seed": 3, "temperature": 1, "max_tokens": 21, "stop": ["x"]}
    full = complete(text, **asked, echo=True)
    actual = chunks(text, **asked, echo=True, stream_options={"include_usage": True})
    texts, reasons = [""] * 4, [None] * 4
    for chunk in actual[:-1]:
        (choice,) = chunk["choices"]
        assert reasons[choice["index"]] is None  # nothing follows the last piece
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [one["text"] for one in full["choices"]]
    assert reasons == [one["finish_reason"] for one in full["choices"]]
    assert actual[-1]["choices"] == [] and actual[-1]["usage"] == full["usage"]
    assert {chunk["id"] for chunk in actual} == {actual[0]["id"]}
    assert [chunk["choices"][0]["text"] for chunk in chunks(text, prompt="ab", max_tokens=0, echo=True)] == ["ab"]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"prompt": ""}, "prompt: Value error, must be a text, a list of texts, a list of token ids"),
        ({"prompt": ["a", 3]}, "prompt: Value error, must be a text"),
        ({"prompt": [999999]}, "token 999999 is none of a_text_run"),
        ({"prompt": [-1]}, "token -1 is none of a_text_run"),
        ({"prompt": "a", "max_tokens": 65}, "max_tokens, an answer of 65 tokens is over the limit of 64"),
        ({"prompt": "a", "best_of": 3}, "best_of=3 is not supported"),
        ({"prompt": "a", "logprobs": 6}, "logprobs: Input should be less than or equal to 5"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty: Input should be less than or equal to 0"),
        ({"prompt": "a", "suffix": "b"}, "suffix: Input should be ''"),
        ({"prompt": "a", "logit_bias": {"50": 1}}, "logit_bias.50: Input should be less than or equal to 0"),
        ({"prompt": None}, "prompt: Value error, must be a text"),
        ({"prompt": "a", "seed": 2**63}, "seed: Input should be less than 9223372036854775808"),
        ({"prompt": "a", "stop": [""]}, "stop: Value error, must be at most 16 texts of 1 to 200 characters"),
        ({"prompt": "a", "stream": True, "logprobs": 1}, "logprobs are not streamed"),
        ({"prompt": ["a"] * 69}, "69 sequences are over the limit of 68"),
        ({"prompt": ["a"] * 40, "n": 2, "max_tokens": 0, "echo": True}, "80 sequences are over the limit of 68"),
        (
            {"prompt": ["a"], "n": 62, "max_tokens": 64},
            "62 answers have 4092 tokens with their prompts, over",
        ),
        ({"prompt": "a", "chat": True}, "chat: Extra inputs are not permitted"),
    ],
)
def test_bad_input_gets_one_line(text, asked, problem):
    answer = text.post("/v1/completions", json=asked)
    error = answer.json()["error"]
    assert answer.status_code == 422 and error["type"] == "invalid_request_error"
    assert error["message"].startswith(problem) and "\n" not in error["message"]


def test_a_scored_text_must_fit_the_positions():
    with service("text", "linear_transformer", prompt_tokens=40, rows=1) as text:
        answer = text.post("/v1/completions", json={"prompt": "a" * 35, "max_tokens": 0, "echo": True, "logprobs": 1})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert "a prompt of 36 tokens and 0 after it are over the limit of" in answer.json()["error"]["message"]
        fits = complete(text, prompt="a" * 20, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
        assert all(math.isfinite(x) for x in fits["token_logprobs"])


def test_another_model_is_not_available(text):
    answer = text.post("/v1/completions", json={"model": "gpt", "prompt": "a"})
    assert (
        answer.status_code == 404 and answer.json()["error"]["message"] == "no model gpt: this service has a_text_run"
    )
    assert text.get("/v1/models/gpt").status_code == 404
    (served,) = text.get("/v1/models").json()["data"]
    assert served["id"] == NAME and served == text.get(f"/v1/models/{NAME}").json()


def test_tokenize_and_detokenize(text):
    post = lambda path, **asked: text.post(path, json=asked).json()
    assert post("/tokenize", prompt="a naïve 猫", add_special_tokens=False)["tokens"] == ids("a naïve 猫")
    full = {"tokens": [ByteTokenizer.begin, *ids("ab")], "count": 3, "max_model_len": 64}
    assert post("/tokenize", prompt="ab") == full
    assert post("/detokenize", tokens=[ByteTokenizer.begin, *ids("a naïve 猫")])["prompt"] == "a naïve 猫"
    info = text.get("/tokenizer_info").json()
    names = [info[x] for x in ("bos_token", "eos_token")]
    special = [post("/tokenize", prompt=name, add_special_tokens=False)["tokens"] for name in names]
    assert special == [[ByteTokenizer.begin], [ByteTokenizer.end]]
    assert post("/detokenize", tokens=[10**9])["error"].startswith("token 1000000000 is none of")


def test_the_openai_client(text):
    client = openai.OpenAI(base_url=f"{text.server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    answer = client.completions.create(model=NAME, prompt="ab", max_tokens=8, temperature=0, logprobs=1, echo=True)
    assert answer.choices[0].text.startswith("ab") and answer.usage.completion_tokens <= 8
    assert math.isfinite(sum(answer.choices[0].logprobs.token_logprobs))
    pieces = client.completions.create(model=NAME, prompt="ab", max_tokens=8, temperature=0, stream=True)
    assert "ab" + "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens, an answer of 1000 tokens is over the limit"):
        client.completions.create(model=NAME, prompt="ab", max_tokens=1000)
    with pytest.raises(openai.NotFoundError, match="no model gpt: this service has a_text_run"):
        client.completions.create(model="gpt", prompt="ab")


@pytest.mark.parametrize(
    ("prompt", "numbers"),
    [
        ("a" * 64, ("65 tokens", "64")),
        ([97] * 64, ("65 tokens", "64")),
        ("a" * 2000, ("2000 characters", "64 tokens")),
        ("a" * 10_000, ("bytes", "6,400")),
    ],
)
def test_a_prompt_that_is_too_long_has_its_code(text, prompt, numbers):
    client = openai.OpenAI(base_url=f"{text.server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt=prompt)
    assert refused.value.code == "context_length_exceeded" and refused.value.type == "invalid_request_error"
    assert all(number in refused.value.message for number in numbers) and "shorten it" in refused.value.message


def test_equal_texts_are_scored_once(text, monkeypatch):
    scored, call = [], TokenScorer.__call__
    monkeypatch.setattr(TokenScorer, "__call__", lambda self, rows: scored.extend(rows) or call(self, rows))
    asked = {"prompt": ["ab", "猫", "ab"], "max_tokens": 0, "echo": True, "logprobs": 5}
    answer = complete(text, **asked, n=8)["choices"]
    assert sorted(scored) == sorted([ByteTokenizer.begin, *ids(prompt)] for prompt in ("ab", "猫"))
    once = complete(text, **asked)["choices"]
    assert [one["logprobs"] for one in answer] == [once[i // 8]["logprobs"] for i in range(24)]


def test_others_are_answered_while_an_answer_is_assembled(text, monkeypatch):
    built, begun, release = Completions._build_response, threading.Event(), threading.Event()

    def build_slowly(*words):
        begun.set()
        assert release.wait(30)
        return built(*words)

    monkeypatch.setattr(Completions, "_build_response", build_slowly)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, text, prompt="ab", max_tokens=2, logprobs=2)
        assert begun.wait(30)
        assert text.get("/health", timeout=20).json() == {"status": "ok"} and not answer.done()
        release.set()
        assert len(answer.result()["choices"]) == 1


def test_a_text_up_to_a_stop_does_not_depend_on_its_pieces():
    draw = random.Random(0)
    for _ in range(3000):
        full = "".join(draw.choices("ab", k=draw.randint(0, 14)))
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3))]
        ends = [(full.find(stop) + len(stop), full.find(stop)) for stop in stops if stop in full]
        end = min(ends)[1] if ends else len(full)
        up_to, actual, position = StopStringFilter(stops), "", 0
        while position < len(full):
            after = draw.randint(position + 1, len(full))
            actual += up_to(full[position:after], last=after == len(full))
            assert full[:end].startswith(actual)
            position = after
        assert actual == full[:end] and up_to.stopped == (end < len(full))
