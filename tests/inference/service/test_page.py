"""The page in a real browser: typing, clicking, reading."""

import os
import pathlib
import re

import pytest
from playwright.sync_api import expect

from inference.service.serving import CHARACTERS, LABELS, gauge, service, wait_until

pytestmark = pytest.mark.usefixtures("usual_promotion")
PHONE = {"width": 360, "height": 740}


@pytest.fixture
def page(browser):
    """On a phone, in dark mode; an error in the page's script fails the test."""
    context = browser.new_context(viewport=PHONE, color_scheme="dark", locale="en-GB")
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.wrong = wrong
    yield page
    context.close()


def fits(page) -> bool:
    """Whether all elements fit the screen's width."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def shot(page, name: str) -> None:
    """Saves a screenshot to the folder FLASH_LM_SHOTS."""
    if folder := os.environ.get("FLASH_LM_SHOTS"):
        page.screenshot(path=str(pathlib.Path(folder) / f"{name}.png"), full_page=True)


def test_a_text_is_streamed(page, text):
    """With the keyboard alone: type, Ctrl + Enter."""
    page.goto(text.server.url)
    expect(page.locator("#model")).to_contain_text("a_text_run · flash on text · step 7")
    page.keyboard.type("the cat 猫 ")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text(re.compile(r"\d+ tokens · [\d.]+ tokens/s · state .*B · "))
    body = {"prompt": "the cat 猫 ", "max_tokens": 32, "temperature": 0.8}
    alone = text.post("/api/generate", json=body).json()
    assert page.locator("#answer .text").inner_text() == "the cat 猫 " + alone["text"].rstrip("\n")
    assert fits(page) and not page.wrong
    shot(page, "text_phone_dark")


@pytest.mark.slow("starts another service for the browser")
def test_a_second_text_is_written(page):
    """For a first text, which is not repeated."""
    keys = {"task": "seq2seq", "model.encoder.family": "transformer_plus_plus", "data.pair_column": "answer"}
    keys |= {"data.corpus": "hf", "data.path": "pairs", "data.pack": "examples"}
    with service("text", keys=keys) as client:
        page.goto(client.server.url)
        expect(page.locator("#model")).to_contain_text("a_text_run · transformer_plus_plus-flash on hf")
        expect(page.locator("label[for=prompt]")).to_have_text("First text")
        page.locator("#prompt").fill("the cat")
        page.get_by_role("button", name="Write").click()
        expect(page.locator("#status")).to_contain_text(re.compile(r"\d+ tokens · [\d.]+ tokens/s · state .*B · "))
        alone = client.post("/api/generate", json={"prompt": "the cat", "max_tokens": 32, "temperature": 0.8}).json()
        assert page.locator("#answer .text").inner_text().rstrip("\n") == alone["text"].rstrip("\n")
        assert fits(page) and not page.wrong
        shot(page, "pairs_phone_dark")


def test_a_chat_has_turns(page, chat):
    """The service reads all turns with each message, and a message that it refuses goes back into the box."""
    page.goto(chat.server.url)
    expect(page.locator("label[for=prompt]")).to_have_text("Message")
    page.locator("#more summary").click()
    for name, value in (("temperature", "0"), ("max_tokens", "8")):
        page.locator(f"#{name}").fill(value)
    page.locator("#more summary").click()
    messages, turns, box = [], page.locator(".turn .text"), page.locator("#prompt")
    for text in ("ä", "b"):
        box.fill(text)
        page.keyboard.press("Control+Enter")
        expect(page.locator("#status")).to_contain_text(re.compile(r"\d+ tokens · [\d.]+ tokens/s · "))
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        alone = chat.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": alone})
        expect(turns).to_have_count(len(messages))
        assert turns.evaluate_all("all => all.map(one => one.textContent)") == [one["content"] for one in messages]
        expect(box).to_have_value("")
    assert fits(page) and not page.wrong
    shot(page, "chat_phone_dark")
    box.fill("a <|im_end|>")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#status")).to_contain_text("spells <|im_end|>, a special token")
    expect(turns).to_have_count(4)
    expect(box).to_have_value("a <|im_end|>")
    page.get_by_role("button", name="New chat").click()
    expect(turns).to_have_count(0)


@pytest.mark.slow("starts another service for the browser")
def test_stop_frees_the_row(page):
    with service("text", new_tokens=100_000, seconds=600) as client:
        page.goto(client.server.url)
        page.locator("#prompt").fill("a")
        page.locator("summary").click()
        page.locator("#max_tokens").fill("100000")
        page.locator("#temperature").fill("0")  # a random choice could be the end of the text
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#status")).to_contain_text("tokens/s")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#status")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Continue")).to_be_focused()
        wait_until(lambda: gauge(client, "running_rows") == 0)
        assert gauge(client, "tokens_total") < 10_000 and not page.wrong


def test_errors_are_shown_and_empty_fields_are_left_to_the_service(page, text):
    page.goto(text.server.url)
    page.locator("#prompt").fill("a")
    page.locator("#max_tokens").evaluate("field => { field.value = 999 }")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#max_tokens")).to_be_visible()
    expect(page.locator("#max_tokens")).to_be_focused()
    assert gauge(text, "running_rows") == 0 and page.locator("#answer").inner_text() == ""
    for field in ("#max_tokens", "#temperature"):
        page.locator(field).fill("")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#status")).to_contain_text(" · state ")
    expect(page.get_by_role("button", name="Continue")).to_have_attribute("aria-disabled", "false")
    alone = text.post("/api/generate", json={"prompt": "a"}).json()
    assert page.locator("#answer .text").inner_text() == "a" + alone["text"].rstrip("\n")
    assert not page.wrong


@pytest.mark.slow("starts another service for the browser")
def test_a_service_that_ends_is_reported(page):
    with service("text") as client:
        page.goto(client.server.url)
        page.route(
            "**/api/generate/stream",
            lambda route: route.fulfill(
                content_type="text/event-stream",
                body='event: text\ndata: {"text": "b", "tokens": 1, "tokens_per_second": 2, "state_bytes": 3}\n\n',
            ),
        )
        page.locator("#prompt").fill("a")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#status")).to_contain_text("the answer was cut off")
        page.route("**/api/generate/stream", lambda route: route.fulfill(status=502, body="Bad gateway"))
        page.keyboard.press("Control+Enter")
        expect(page.locator("#status")).to_contain_text("the service returned 502")
        page.route("**/api/generate/stream", lambda route: route.abort())
        page.keyboard.press("Control+Enter")
        expect(page.locator("#status")).to_contain_text("the service does not answer")


@pytest.mark.slow("starts another service for the browser")
def test_a_couplet_is_answered(page):
    with service("couplets") as client:
        page.goto(client.server.url)
        page.locator("#first").fill("春山水")
        page.get_by_role("button", name="Answer").click()
        lines = page.locator("#answer li .text")
        expect(lines.first).to_be_visible()
        texts = lines.all_inner_texts()
        assert len(texts) > 1 and all(len(line) == 3 and set(line) <= set(CHARACTERS) for line in texts)
        page.locator("#first").fill("猫")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_contain_text("does not know what begins with '猫'")
        assert fits(page) and page.wrong == [x for x in page.wrong if "422" in x]
        shot(page, "couplets_phone_dark")


@pytest.mark.slow("starts another service for the browser")
def test_masks_are_filled_in_on_a_wide_screen(browser):
    page = browser.new_page(viewport={"width": 1100, "height": 800}, color_scheme="light")
    with service("fill_in") as client:
        page.goto(client.server.url)
        page.locator("#prompt").fill("the [MASK] sees a [MASK]")
        page.get_by_role("button", name="Fill in").click()
        expect(page.locator("#answer li")).to_have_count(2)
        expect(page.locator("#answer li").first).to_contain_text("%")
        expect(page.locator("#status")).to_contain_text("2 masks")
        shot(page, "fill_in_wide_light")
    page.close()


@pytest.mark.slow("starts another service for the browser")
def test_labels_of_a_pair_on_a_phone(browser):
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    with service("label_pairs") as client:
        page.goto(client.server.url)
        page.locator("#text").fill("the cat sees a dog")
        page.get_by_label("Second text").fill("a dog is seen")
        expect(page.locator("#more")).to_be_hidden()
        page.get_by_role("button", name="Classify").click()
        expect(page.locator("#answer li")).to_have_count(len(LABELS))
        expect(page.locator("#status")).to_contain_text("3 labels, most likely first")
        assert fits(page)
        shot(page, "labels_phone_dark")
    page.close()


def test_the_description_of_the_api_needs_no_network(page, text):
    """It is drawn from the service's OpenAPI description, and loads nothing from other hosts."""
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{text.server.url}/docs")
    expect(page.locator("#paths section").first).to_be_visible()
    shot(page, "docs")
    paths = page.locator("#paths").inner_text()
    assert all(
        x in paths
        for x in (
            "POST /api/generate",
            "repetition_penalty",
            "penalty of tokens that are already in the text",
            "503",
        )
    )
    assert asked and all(url.startswith(text.server.url) for url in asked)
    assert fits(page) and not page.wrong


def test_defaults_are_shown_without_empty_elements(page, text):
    page.goto(text.server.url)
    expect(page.locator("#model")).to_contain_text("a_text_run")
    expect(page.locator(".answer")).to_be_hidden()
    page.locator("#more summary").click()
    assert page.locator("#top_p").get_attribute("placeholder") == "default: 1"
    page.locator("#prompt").fill("the cat")
    page.locator("#go").click()
    expect(page.locator(".answer")).to_be_visible()
    shot(page, "answered")
    assert not page.wrong
