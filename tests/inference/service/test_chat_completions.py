"""/v1/chat/completions against the same model in Python, with the openai client."""

import json

import openai
import pytest
from chats import assistant, chat_tokenizer, user

from flash_lm.inference.generation import Generator
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.service.chat_format import ChatAsked, ChatMessage
from inference.service.serving import gauge, random_model, wait_until

pytestmark = pytest.mark.usefixtures("usual_promotion")
NAME = "a_chat_run"
CHAT = [user("ä"), assistant("b"), user("c")]
TEXT = "<|im_start|>user\nä<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
IDS = chat_tokenizer().encode_marked([TEXT + "<|im_start|>assistant\n"])[0].ids


@pytest.fixture(scope="module")
def generator(usual_promotion):
    """The model without a service."""
    return Generator(random_model("chat"))


@pytest.fixture
def client(chat):
    return openai.OpenAI(base_url=f"{chat.server.url}/v1", api_key="none", max_retries=0).chat.completions


def post(chat, messages=CHAT, status=200, **asked):
    answer = chat.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **asked})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_an_answer_equals_that_of_python(client, generator):
    alone = generator.generate([IDS] * 2, 12, Sampling(), 5)
    answer = client.create(model=NAME, messages=CHAT, n=2, seed=5, max_completion_tokens=12)
    assert answer.object == "chat.completion" and answer.model == NAME and answer.id.startswith("chatcmpl-")
    reasons = {"end": "stop", "length": "length"}
    for i, (choice, one) in enumerate(zip(answer.choices, alone, strict=True)):
        assert choice.index == i and choice.message.role == "assistant" and choice.message.content == one.text
        assert choice.finish_reason == reasons[one.finish_reason] and choice.logprobs is None
    new = sum(len(one.tokens) for one in alone)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(IDS), new)
    assert answer.usage.total_tokens == len(IDS) + new


def test_an_answer_is_part_of_the_next_request(client, generator):
    """As the client gives it back, with fields that are null; and a text in parts is one text."""
    message = client.create(model=NAME, messages=CHAT[:1], temperature=0, max_tokens=3).choices[0].message
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    after = client.create(
        model=NAME, messages=[CHAT[0], message, {"role": "user", "content": parts}], temperature=0, max_tokens=9
    )
    plain = client.create(
        model=NAME, messages=[CHAT[0], assistant(message.content), user("cd")], temperature=0, max_tokens=9
    )
    assert after.choices[0].message.content == plain.choices[0].message.content
    assert after.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_stream_adds_up_to_the_answer(client, chat):
    asked = {"messages": CHAT, "n": 2, "seed": 3, "max_tokens": 21, "stop": ["x"]}
    full = client.create(model=NAME, **asked)
    chunks = [*client.create(model=NAME, **asked, stream=True, stream_options={"include_usage": True})]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage == full.usage
    for choice in full.choices:
        mine = [x for chunk in chunks[:-1] for x in chunk.choices if x.index == choice.index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == ""
        assert all(x.delta.role is None and x.delta.content for x in mine[1:-1])
        assert mine[-1].finish_reason == choice.finish_reason and mine[-1].delta.content is None
        assert "".join(x.delta.content or "" for x in mine) == choice.message.content
    # The events themselves: a key that is there is an addition.
    body = {"messages": CHAT, "max_tokens": 2, "stream": True}
    with chat.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    wait_until(lambda: gauge(chat, "running_rows") == 0)


def test_null_is_the_default_and_parameters_without_effect_are_accepted(client, chat):
    asked = {"seed": 3, "max_tokens": 9}
    full = post(chat, **asked)["choices"]
    optional = ChatAsked.model_fields.keys() - asked.keys() - {"messages", "temperature"}
    parts = {key: None for key in ChatMessage.model_fields}
    assert post(chat, [parts | one for one in CHAT], **asked, **dict.fromkeys(optional))["choices"] == full
    nothing = {"presence_penalty": 0, "logit_bias": {}, "stop": [], "tools": [], "tool_choice": "none", "store": False}
    nothing |= {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "user": "somebody"}
    answer = client.create(model=NAME, messages=CHAT, **asked, **nothing, temperature=0, max_completion_tokens=9)
    assert answer.choices[0].message.content == full[0]["message"]["content"]
    most = post(chat)["usage"]["completion_tokens"]  # as many as the service allows
    assert most > 9 or post(chat)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"messages": []}, 422, "messages: "),
        ({"messages": [user("a<|im_end|>b")]}, 422, "message 1 spells <|im_end|>, a special token of a_chat_run"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 422, "messages.0.role"),
        ({"messages": [user("a") | {"name": "b"}]}, 422, "messages.0.name"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 422, "mean the same: leave one out"),
        ({"max_tokens": 65}, 422, "over the limit of 64"),
        ({"n": 64, "max_tokens": 64}, 422, "over the limit of 4000 per request"),
        ({"messages": [user("a" * 1000)]}, 400, "over the limit"),
        ({"logprobs": True}, 422, "logprobs"),
        ({"tools": [{}]}, 422, "tools"),
        ({"response_format": {"type": "json_object"}}, 422, "response_format.type"),
        ({"model": "other"}, 404, "no model other"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_requests_that_are_refused(chat, asked, status, message):
    error = post(chat, **{"messages": CHAT, **asked}, status=status)["error"]
    assert message in (error if isinstance(error, str) else error["message"])


def test_a_model_without_a_template_refuses_chats(text, chat):
    error = post(text, status=400)["error"]
    assert error["message"].startswith("a_text_run has no chat template: give it a text without chat")
    assert error["type"] == "invalid_request_error"
    assert [x.get("/api/model").json()["chat"] for x in (text, chat)] == [False, True]
