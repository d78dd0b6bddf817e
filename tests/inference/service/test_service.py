"""The JSON API against the same models in Python; clients that disconnect, and too many clients."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import random
import signal
import socket

import httpx
import pytest
from small import command, finish, small_config, write_corpus

from flash_lm.data.tokenizer import ByteTokenizer, CharacterTokenizer
from flash_lm.inference.couplets import CoupletWriter
from flash_lm.inference.running_batch import RunningBatch
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.service.metrics import Metrics
from flash_lm.inference.service.requests import TextAsked
from flash_lm.inference.service.services import TextService
from flash_lm.training.train_loop import train
from inference.service.serving import CHARACTERS, LIMITS, gauge, raise_error, random_model, service, wait_until

pytestmark = pytest.mark.usefixtures("usual_promotion")


ENDLESS = 2**20  # tokens: they take minutes, even with so small a model


def events(lines) -> list[tuple[str, dict]]:
    """The events of a stream that has ended."""
    blocks = "\n".join(lines).strip().split("\n\n")
    fields = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [(block["event"], json.loads(block["data"])) for block in fields]


def test_many_clients_get_the_answers_of_single_requests(text, generator):
    """200 requests from 16 clients through four rows: none is lost or mixed up."""
    draw = random.Random(0)
    asked = [
        {
            "prompt": "".join(draw.choices("abc 猫é", k=draw.randint(1, 12))),
            "max_tokens": draw.randint(1, 12),
            "temperature": draw.choice([0, 0, 1.0]),
            "seed": number,
        }
        for number in range(200)
    ]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: text.post("/api/generate", json=body), asked))
    assert {answer.status_code for answer in answers} == {200}
    for body, answer in zip(asked, answers, strict=True):
        sampling = Sampling(temperature=body["temperature"])
        (alone,) = generator.generate([body["prompt"]], body["max_tokens"], sampling, body["seed"])
        actual = answer.json()
        assert (actual["text"], actual["finish_reason"]) == (alone.text, alone.finish_reason)
        assert actual["tokens"] == len(alone.tokens)
    wait_until(lambda: gauge(text, "running_rows") == 0)
    assert gauge(text, "tokens_total") >= sum(answer.json()["tokens"] for answer in answers)


def test_a_stream_adds_up_to_the_answer(text):
    body = {"prompt": "猫 sees", "max_tokens": 40, "seed": 3}
    full = text.post("/api/generate", json=body).json()
    with text.stream("POST", "/api/generate/stream", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        actual = events(response.iter_lines())
    *pieces, (last, answer) = actual
    assert {name for name, _ in pieces} == {"text"} and last == "done" and len(pieces) > 3
    assert "".join(data["text"] for _, data in pieces) == answer["text"] == full["text"]
    counts = [data["tokens"] for _, data in pieces]
    assert counts == sorted(counts) and counts[-1] == answer["tokens"]
    model = text.get("/api/model").json()
    assert {data["state_bytes"] for _, data in pieces} == {model["state_bytes"]} and model["state_bytes"] > 0


def test_the_served_checkpoint_is_reported(text):
    model = text.get("/api/model").json()
    assert (model["name"], model["kind"], model["step"], model["family"]) == ("a_text_run", "text", 7, "flash")
    assert text.get("/health").json() == {"status": "ok"}
    assert "<title>" in text.get("/").text


def test_no_request_waits_for_a_compiler():
    text = TextService(random_model("text"), LIMITS, Metrics())
    loop = text._generator.engine._loop
    compiled = [loop.start, loop.prefill, loop.unstack, loop.join, loop.advance, loop.leave]
    before = [function._cache_size() for function in compiled]

    async def answer(asked: TextAsked) -> int:
        return len([piece async for piece in text.stream(text.check(asked))])

    for length in (1, 15, 17, 40, 63):
        for sampling in ({}, {"top_k": 3}, {"temperature": 0.0, "repetition_penalty": 2.0}):
            assert asyncio.run(answer(TextAsked(prompt="a" * length, max_tokens=5, **sampling))) > 1
    text.close()
    assert [function._cache_size() for function in compiled] == before


@pytest.mark.slow("compiles a model beside its service")
def test_second_lines_equal_those_of_the_command(couplets):
    writer = CoupletWriter(random_model("couplets"))
    for first, seed in (("春", 0), ("東山水", 5)):
        body = {"first": first, "candidates": 6, "temperature": 1.5, "seed": seed}
        answer = couplets.post("/api/second_lines", json=body).json()["candidates"]
        alone = writer(first, 6, Sampling(temperature=1.5), seed)
        assert [one["text"] for one in answer] == [one.text for one in alone]
        assert [one["log_prob"] for one in answer] == pytest.approx([one.log_prob for one in alone], abs=1e-4)
        assert all(len(one["text"]) == len(first) and set(one["text"]) <= set(CHARACTERS) for one in answer)


BAD = {
    "no prompt": ({"prompt": ""}, "prompt: "),
    "no number": ({"prompt": "a", "max_tokens": "x"}, "max_tokens: "),
    "too many tokens": (
        {"prompt": "a", "max_tokens": 65},
        "max_tokens, an answer of 65 tokens is over the limit of 64",
    ),
    "a long prompt": (
        {"prompt": "a" * 64},
        "a prompt of 65 tokens is over the limit of 64 of this service: shorten it",
    ),
    "a temperature between": ({"prompt": "a", "temperature": 1e-9}, "temperature=1e-09 must be 0"),
    "a negative one": ({"prompt": "a", "temperature": -1}, "temperature: "),
    "an unknown key": ({"prompt": "a", "top": 1}, "top: "),
    "a large seed": ({"prompt": "a", "seed": 2**63}, "seed: "),
    "no object": ([], "the body: "),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("path", ["/api/generate", "/api/generate/stream"])
def test_bad_input_is_reported_in_one_sentence(text, path, name):
    body, sentence = BAD[name]
    answer = text.post(path, json=body)
    assert answer.status_code == 422 and sentence in answer.json()["error"]


def test_bad_input_of_other_kinds(couplets, fill_in):
    for client, path, body, sentence in (
        (couplets, "/api/second_lines", {"first": "猫"}, "does not know what begins with '猫' in the first line"),
        (couplets, "/api/second_lines", {"first": "春", "candidates": 65}, "candidates: "),
        (couplets, "/api/second_lines", {"first": "春" * 31, "candidates": 64}, "64 answers have 4096 tokens with"),
        (couplets, "/api/second_lines", {"first": "春" * 65}, "a first line of 67 tokens is over the limit of 64"),
        (fill_in, "/api/fill_in", {"prompt": "a cat"}, "the prompt has no [MASK]"),
        (fill_in, "/api/fill_in", {"prompt": "[MASK]" + "a" * 63}, "a prompt of 65 tokens is over the limit of 64"),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 422 and sentence in answer.json()["error"]


def test_no_json_and_no_such_page(text):
    json_ = {"Content-Type": "application/json"}
    assert text.post("/api/generate", content=b"{", headers=json_).status_code == 422
    assert "parsing the body" in text.post("/api/generate", content=b"\xff", headers=json_).json()["error"]
    answer = text.post("/api/generate", content=b"{", headers=json_)
    assert answer.json() == {"error": "the body: JSON decode error at character 1"}
    answer = text.post("/api/generate", content=b'{"prompt": "%s"}' % (b"a" * 2_000_000), headers=json_)
    assert (
        answer.status_code == 413
        and "a request of 2,000,014 bytes is over the limit of 6,400: shorten it" in answer.json()["error"]
    )
    answer = text.post("/api/generate", json={"prompt": "a", "x\n" * 500: 1})
    assert answer.status_code == 422 and len(answer.json()["error"]) <= 500 and "\n" not in answer.json()["error"]
    assert text.get("/nothing").status_code == 404
    assert text.get("/api/generate").status_code == 405


def test_a_client_that_disconnects_frees_its_row():
    """During a stream, and while it waits for a full answer; the next client gets the only row at once."""
    with service("text", rows=1, new_tokens=ENDLESS) as client:
        body = {"prompt": "a", "max_tokens": ENDLESS, "temperature": 0}
        with client.stream("POST", "/api/generate/stream", json=body) as response:
            next(lines := response.iter_lines())  # kept, or httpx would close the stream
            assert gauge(client, "running_rows") == 1 and lines
        wait_until(lambda: gauge(client, "running_rows") == 0)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/api/generate", json=body, timeout=0.3)
        wait_until(lambda: gauge(client, "running_rows") == 0)
        assert gauge(client, "tokens_total") < ENDLESS / 10
        assert client.post("/api/generate", json={"prompt": "a", "max_tokens": 2}).json()["tokens"] == 2


@pytest.mark.slow("starts another service")
def test_an_answer_ends_at_the_longest_position():
    with service("text", family="transformer") as client:  # 32 positions, though 64 + 64 tokens are allowed
        model = client.get("/api/model").json()
        assert (model["most_prompt_tokens"], model["most_new_tokens"]) == (32, 31)
        answer = client.post("/api/generate", json={"prompt": "abc", "temperature": 0}).json()
        assert answer["tokens"] == 28 or answer["finish_reason"] == "end"
        answer = client.post("/api/generate", json={"prompt": "abc", "max_tokens": 29})
        assert answer.status_code == 422 and "lower max_tokens" in answer.json()["error"]


@pytest.mark.slow("starts another service")
def test_second_lines_are_no_longer_than_answers_may_be():
    with service("couplets", new_tokens=4) as client:
        assert client.post("/api/second_lines", json={"first": "春夏秋冬"}).status_code == 200
        answer = client.post("/api/second_lines", json={"first": "春夏秋冬東"})
        assert answer.status_code == 422 and "a second one of 5 tokens is over the limit of 4" in answer.json()["error"]


@pytest.mark.slow("starts two other services")
def test_too_many_requests_are_refused():
    with service("couplets", rows=1, waiting=2) as client:
        answer = client.post("/api/second_lines", json={"first": "春", "candidates": 4})
        assert answer.status_code == 422
        assert "4 sequences are over the limit of 3 of this service" in answer.json()["error"]
        assert client.post("/api/second_lines", json={"first": "春", "candidates": 3}).status_code == 200
    with service("text", rows=1, waiting=1, new_tokens=ENDLESS) as client, contextlib.ExitStack() as open_:
        body = {"prompt": "a", "max_tokens": ENDLESS, "temperature": 0}
        ask = lambda: open_.enter_context(client.stream("POST", "/api/generate/stream", json=body))
        next(lines := ask().iter_lines())
        ask()
        wait_until(lambda: gauge(client, "waiting_rows") == 1)
        answer = client.post("/api/generate", json=body)
        assert answer.status_code == 503 and "try again later" in answer.json()["error"]
        assert answer.headers["retry-after"] == "1"
        assert ask().status_code == 503 and lines


@pytest.mark.slow("starts another service")
def test_answers_have_a_time_limit():
    with service("text", rows=1, new_tokens=ENDLESS, seconds=0.2) as client:
        body = {"prompt": "a", "max_tokens": ENDLESS, "temperature": 0}
        answer = client.post("/api/generate", json=body)
        assert answer.status_code == 504 and "took longer than 0.2 s" in answer.json()["error"]
        with client.stream("POST", "/api/generate/stream", json=body) as response:
            name, data = events(response.iter_lines())[-1]
        assert name == "error" and "took longer" in data["error"]
        wait_until(lambda: gauge(client, "running_rows") == 0)
        assert gauge(client, "tokens_total") < ENDLESS / 10


@pytest.mark.slow("starts another service")
def test_running_answers_finish_when_the_service_ends():
    with service("text", new_tokens=4096) as client:
        body = {"prompt": "a", "max_tokens": 4096, "temperature": 0}
        with client.stream("POST", "/api/generate/stream", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            client.server.should_exit = True
            name, answer = events([first, *lines])[-1]
        assert name == "done" and answer["tokens"] == 4096


@pytest.mark.slow("starts another service")
@pytest.mark.parametrize("step", ["join", "advance"])
def test_a_model_that_always_fails_is_reported(monkeypatch, step):
    """Waiting clients get an answer, and later ones, too."""
    with service("text") as client:
        monkeypatch.setattr(RunningBatch, step, raise_error)
        for healthy in (200, 200, 200, 500, 500):
            answer = client.post(
                "/api/generate", json={"prompt": "a"}, timeout=20
            )  # the timeout of the service is 60 s
            assert answer.status_code == 500 and "see the service's log" in answer.json()["error"]
            assert client.get("/health").status_code == healthy


@pytest.mark.parametrize(
    "step", ["join", pytest.param("advance", marks=pytest.mark.slow("another step that fails: the same code answers"))]
)
def test_a_failed_step_ends_only_its_rows(generator, monkeypatch, step):
    """Waiting requests and later ones are answered as usual."""
    expected = [generator.generate([prompt], 6, Sampling(temperature=0))[0].text for prompt in "abcdefgh"]
    with service("text", rows=2) as client:
        ask = lambda prompt: client.post("/api/generate", json={"prompt": prompt, "max_tokens": 6, "temperature": 0})
        full, calls = getattr(RunningBatch, step), itertools.count(1)
        fails_once = lambda *words: raise_error() if next(calls) == 3 else full(*words)
        monkeypatch.setattr(RunningBatch, step, fails_once)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, "abcdefgh"))
        failed = [answer for answer in answers if answer.status_code != 200]
        assert 1 <= len(failed) <= 2 and all("the model failed" in answer.json()["error"] for answer in failed)
        for answer, text in zip(answers, expected, strict=True):
            assert answer in failed or answer.json()["text"] == text
        assert [ask(prompt).json()["text"] for prompt in "abcdefgh"] == expected
        assert client.get("/health").json() == {"status": "ok"} and gauge(client, "running_rows") == 0


@pytest.mark.parametrize("kind", ["text", "couplets", "fill_in"])
def test_a_text_that_is_too_long_is_not_tokenized(kind, request, monkeypatch):
    client = request.getfixturevalue(kind)
    path, field = {
        "text": ("generate", "prompt"),
        "couplets": ("second_lines", "first"),
        "fill_in": ("fill_in", "prompt"),
    }[kind]
    kinds = (ByteTokenizer, CharacterTokenizer)
    tokenised = []
    for tokenizer in kinds:
        monkeypatch.setattr(tokenizer, "encode", lambda self, texts: tokenised.append(texts) or [])
    answer = client.post(f"/api/{path}", json={field: "[MASK]" + "春" * 500})
    assert answer.status_code == 422 and "of 506 characters is over the limit of 64 tokens" in answer.json()["error"]
    assert not tokenised


def test_another_hosts_name_is_refused(text):
    """Such a request comes from a web page that reaches this machine by another host name."""
    for name, status in (("evil.example", 400), ("", 400), ("[::1]:8000", 200), ("LOCALHOST:1", 200), ("[x", 400)):
        answer = text.get("/health", headers={"host": name})
        assert answer.status_code == status, name
    assert (
        "this service is not evil.example: start it with a further --host=evil.example"
        in text.get("/health", headers={"host": "evil.example:80"}).json()["error"]
    )


@pytest.mark.slow("trains a run and starts a process")
def test_the_command(tmp_path):
    """Trained, served and asked; stopped during an answer, which is finished."""
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache")
    config.train.update(steps=4, eval_every=0, checkpoint_every=0)
    config.mesh.shape = (-1, 1, 1)
    train(config, tmp_path / "run")
    words = [f"--workdir={tmp_path / 'run'}", "--new_tokens=2000"]
    process = command("flash_lm.serve", *words, "--port=0")
    url = process.stdout.readline().split()[0]
    asked = {"prompt": "the cat", "max_tokens": 2000}
    with httpx.stream("POST", f"{url}/api/generate/stream", json=asked, timeout=120) as response:
        lines = response.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        assert events([first, *lines])[-1][0] == "done"
    finish(process)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, err = finish(command("flash_lm.serve", *words, f"--port={port}"), code=2)
    assert err.count("\n") == 1 and f"cannot listen on 127.0.0.1:{port}" in err and "choose another" in err
