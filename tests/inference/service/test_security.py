"""Headers of every answer, and the key that clients must send."""

import base64
import hashlib
import re
import socket

import openai
import pytest
from playwright.sync_api import expect

from flash_lm.errors import InputError
from flash_lm.serve import _key
from inference.service.serving import service

pytestmark = pytest.mark.usefixtures("usual_promotion")
KEY = "sk-only-ours"


@pytest.fixture(scope="module")
def locked_client():
    with service("labels", key=KEY) as client:
        yield client


def test_every_answer_has_security_headers(locked_client):
    mine = {"Authorization": f"Bearer {KEY}"}
    answers = [
        locked_client.get("/"),
        locked_client.get("/health"),
        locked_client.get("/api/model"),  # 401
        locked_client.get("/nothing", headers=mine),
        locked_client.get("/health", headers={"Host": "evil.example"}),
        locked_client.post("/api/classify", json={}, headers=mine),
        locked_client.post("/api/classify", content=b"a" * 100_000, headers=mine),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 401, 404, 400, 422, 413]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    with socket.create_connection(("127.0.0.1", int(locked_client.server.url.rpartition(":")[2])), timeout=30) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        assert b"nosniff" in b"".join(iter(lambda: raw.recv(4096), b""))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_runs_only_its_script(locked_client, path):
    answer = locked_client.get(path)
    (script,) = re.findall("<script>(.*)</script>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in answer.headers["content-security-policy"]


def test_without_the_key_there_is_no_answer(locked_client):
    ours = [f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Bearer {KEY.upper()}", KEY]
    for header in [*ours, "", "Bearer é", "Bearer"]:
        answer = locked_client.post(
            "/api/classify", json={"text": "a"}, headers={"Authorization": header.encode("latin-1")}
        )
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", header
        assert answer.json()["error"].startswith("the API key is missing or wrong: send the service's key")
    for path, status in {"/health": 200, "/": 200, "/metrics": 401, "/nothing": 401, "/v1/models": 401}.items():
        assert locked_client.get(path).status_code == status, path
    assert (
        locked_client.post("/api/classify", json={"text": "a"}, headers={"Authorization": f"bearer {KEY}"}).status_code
        == 200
    )


def test_the_openai_client_sends_the_key(locked_client):
    client = lambda key: openai.OpenAI(base_url=f"{locked_client.server.url}/v1", api_key=key, max_retries=0)
    assert [model.id for model in client(KEY).models.list()] == ["a_labels_run"]
    with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong") as refused:
        client("none").models.list()
    assert refused.value.code == "invalid_api_key"


def test_sources_of_the_key(monkeypatch):
    monkeypatch.delenv("FLASH_LM_API_KEY", raising=False)
    assert _key(None) is None and _key("a") == "a"
    monkeypatch.setenv("FLASH_LM_API_KEY", "b")
    assert _key(None) == "b" and _key("a") == "a"
    for wrong in ("", "a b", "clé", "a\n"):
        monkeypatch.setenv("FLASH_LM_API_KEY", wrong)
        with pytest.raises(InputError, match="FLASH_LM_API_KEY must be one or more visible ASCII characters"):
            _key(None)
        with pytest.raises(InputError, match="--api_key must be"):
            _key(wrong)


def test_the_page_asks_for_the_key(locked_client, browser):
    page = browser.new_page()
    page.goto(locked_client.server.url)
    expect(page.locator("#form")).to_be_hidden()
    page.get_by_label("API key").fill("guessed")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("the API key is missing or wrong")
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    page.locator("#text").fill("the cat")
    page.get_by_role("button", name="Classify").click()
    expect(page.locator("#answer li")).to_have_count(3)
    expect(page.locator("#locked")).to_be_hidden()
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'ran = 1'}))")
    assert page.evaluate("typeof ran") == "undefined"  # an injected script
    page.close()
