"""The page that compares runs, in a real browser without a network."""

import base64
import json
import os
import pathlib

import pytest
from playwright.sync_api import expect

from flash_lm import compare
from flash_lm.config.changes import apply_changes
from flash_lm.configs import quickstart
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.data.tokenizers import save_tokenizer
from flash_lm.report.page import write_page
from flash_lm.runs.jsonl import write_jsonl

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAX+XDSwAAAABJRU5ErkJggg=="
TABLES = "books, causal_lm\n\n| run | loss |\n| :-- | --: |\n| a<b | 1.5 |\n| flash | 2 |"


@pytest.fixture
def runs(tmp_path):
    """Two runs that differ in their family and one of its keys, with results and curves."""
    folders = []
    for name, changes in (("a<b", {}), ("flash", {"model.family": "flash_quad", "model.gau.shared_dim": 32})):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(apply_changes(quickstart.get_config(), changes).to_json())
        loss = {"loss": 1.5, "perplexity": 4.5, "bits_per_byte": 1.0, "step": 2, "train_seconds": 3.0}
        about = {
            "family": name,
            "parameters": 7,
            "corpus": "books",
            "corpus_hash": "aa",
            "length": 512,
            "trained_length": 512,
        }
        save_tokenizer(ByteTokenizer(), folder / "tokenizer")
        write_jsonl(folder / "results.jsonl", [loss | about | {"split": "test"}])
        write_jsonl(folder / "metrics.jsonl", [loss | {"split": "validation", "step": i} for i in (1, 2)])
        folders.append(str(folder))
    return folders


@pytest.fixture
def page(browser):
    """Without a network: any request fails the test."""
    context = browser.new_context(offline=True, viewport={"width": 360, "height": 740}, color_scheme="dark")
    page, wrong = context.new_page(), []
    page.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
    page.on("console", lambda line: wrong.append(line.text))
    yield page
    context.close()
    assert not wrong


def test_everything_is_on_the_page(runs, page, tmp_path):
    (tmp_path / "curves.png").write_bytes(base64.b64decode(PIXEL))
    samples = {"a<b": "text <b>\n & more", "flash": "none: it is masked"}
    out = tmp_path / "index.html"
    configs = {pathlib.Path(run).name: json.loads(pathlib.Path(run, "config.json").read_text()) for run in runs}
    write_page(out, "2 runs <tag>", TABLES, [tmp_path / "curves.png"], configs, samples, "The cat")
    (tmp_path / "curves.png").unlink()
    page.goto(out.as_uri())
    expect(page).to_have_title("2 runs <tag>")
    assert page.locator("table").nth(0).locator("tr").all_inner_texts()[1] == "a<b\t1.5"
    assert page.locator("table").nth(0).locator("td.number").all_inner_texts() == ["1.5", "2"]
    assert page.locator("img").evaluate("image => image.complete && image.naturalWidth") == 1
    rows = [row.split("\t") for row in page.locator("table").nth(1).locator("tr").all_inner_texts()]
    assert rows == [
        ["key", "a<b", "flash"],
        ["model.family", "flash", "flash_quad"],
        ["model.gau.shared_dim", "64", "32"],
    ]
    assert page.locator("pre").all_inner_texts() == list(samples.values())
    expect(page.locator("body")).to_contain_text("Each continues: The cat")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if folder := os.environ.get("FLASH_LM_SHOTS"):
        page.screenshot(path=str(pathlib.Path(folder) / "compare.png"), full_page=True)


def test_the_script_writes_the_page(runs, page, tmp_path, capsys):
    compare.main([*runs, f"--out={tmp_path / 'out'}"])
    assert "index.html" in capsys.readouterr().out
    page.goto((tmp_path / "out" / "index.html").as_uri())
    expect(page.locator("h1")).to_have_text("2 runs on the test split")
    assert page.locator("img").evaluate("image => image.naturalWidth") > 500
    assert not page.locator("pre").count()
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == ["a<b", "flash"]
