"""`make smol`: a pretrained model from the package registry, against what transformers says of the same weights."""

import json
import math
import os
import signal
import subprocess
import threading

import httpx
import openai
import pytest
from small import ROOT

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
    # The tests' flags of XLA simulate devices, over which the service would spread a user's one.
    environment = {name: value for name, value in user_environment().items() if name != "XLA_FLAGS"}
    kept = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with subprocess.Popen(words, cwd=ROOT, env=environment, **kept) as process:
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
    """Within 0.1 % of what it computed from the same file, on the same tokens."""
    address, ids = served[2], GOLDEN["joined"]
    asked = {"prompt": GOLDEN["text"], "add_special_tokens": False}
    assert httpx.post(f"{address}/tokenize", json=asked).json()["tokens"] == ids[1:-1]
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    scored = client.completions.create(model="smollm2", prompt=ids, echo=True, logprobs=0, max_tokens=0)
    first, *log_probs = scored.choices[0].logprobs.token_logprobs
    assert first is None and len(log_probs) == GOLDEN["tokens"]
    expected = math.exp(GOLDEN["nats"] / GOLDEN["tokens"])
    assert math.exp(-sum(log_probs) / len(log_probs)) == pytest.approx(expected, rel=1e-3)
