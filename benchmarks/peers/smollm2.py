"""Compares trained weights, SmolLM2-135M-Instruct from a GGUF file, with transformers' own reading of the same file.

    make peers
    make smol
    python -m benchmarks.peers.smollm2 --model=runs/smol/download --text=test.parquet --out=benchmarks/peers/results

Both dequantise the file by themselves. It reports whether the token ids of all texts are equal, the largest difference
of the logits of a row, relative to the largest logit, perplexities on the text, and whether the prompt of a chat and
its greedy answer of at most 64 tokens are the same. --golden also writes tests/golden/smollm2.json, with what
transformers says of a paragraph, for the test of `make smol`.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pyarrow.parquet as pq

from benchmarks.lib.peers import add_python, check_python
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.run import run
from flash_lm.errors import RunError
from flash_lm.inference.api import LoadedModel, load
from flash_lm.inference.generation import Generator
from flash_lm.inference.import_hf import import_hf
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.sources.open import find_file
from flash_lm.runs.jsonl import write_jsonl
from flash_lm.runs.provenance import provenance

WORKER = pathlib.Path(__file__).with_name("smollm2_worker.py")
GOLDEN = pathlib.Path("tests/golden/smollm2.json")
ROWS, LENGTH = 16, 512
MOST_DIFFERENT, MOST_DIFFERENT_PERPLEXITY = 1e-4, 1e-3
QUESTION = "What is the capital of France?"
PARAGRAPH = (
    "The ferry to the island leaves at seven in the morning, and it does not wait. On most days a dozen people stand "
    "on the quay before the sun is up: fishermen with their boxes, a teacher who has 24 pupils in one room, and the "
    "woman who carries the post. In winter the crossing takes two hours instead of one, because the captain keeps "
    "close to the shore where the waves are lower. Nobody complains. They know that the sea decides when they arrive, "
    "and that the coffee on board is hot."
)


def ask(python: pathlib.Path, file: pathlib.Path, texts: Sequence[str], rows: int) -> tuple[dict[str, Any], np.ndarray]:
    """What transformers says of texts: see the worker; and the logits of the first row."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"texts": list(texts), "question": QUESTION, "rows": rows, "length": LENGTH}
        (path := pathlib.Path(folder, "asked.json")).write_text(json.dumps(asked))
        done = subprocess.run([python, WORKER, file, folder], env=user_environment(), capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"transformers cannot read {file}: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(path.with_name("answer.json").read_text()), np.load(path.with_name("logits.npy"))


def nats(model: LoadedModel, joined: Sequence[int], rows: int) -> tuple[float, int, np.ndarray]:
    """The sum of negative log-likelihoods of rows, their number of tokens, and the logits of the first."""
    total, count, first = 0.0, 0, None
    for start in range(0, min(rows * LENGTH, len(joined) - 1), LENGTH):
        row = np.asarray(joined[start : start + LENGTH + 1])
        logits_LxV = model.logits(row[None, :-1])[0]
        first = logits_LxV if first is None else first
        log_probs = np.asarray(jax.nn.log_softmax(logits_LxV))
        total -= float(log_probs[np.arange(len(row) - 1), row[1:]].sum(dtype=np.float64))
        count += len(row) - 1
    assert first is not None
    return total, count, first


def main(argv: list[str]) -> None:
    """Writes smollm2.jsonl to OUT; fails when a difference is above its bound."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add_python(parser)
    parser.add_argument("--model", required=True, type=pathlib.Path, help="the GGUF file, or its folder")
    parser.add_argument("--text", required=True, type=pathlib.Path, help="a parquet file with a column text")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--golden", action="store_true", help=f"also write {GOLDEN}")
    arguments = parser.parse_args(argv)
    check_python(arguments.python)
    # Whole documents, at least as many as fill the rows.
    texts, characters = [], 0
    for text in pq.read_table(arguments.text, columns=["text"])["text"].to_pylist():
        texts.append(text)
        characters += len(text)
        if characters > 8 * ROWS * LENGTH:
            break
    file = find_file(arguments.model)
    theirs, their_logits = ask(arguments.python, file, texts, ROWS)

    # Ours: the same texts, the same rows, the same chat.
    with tempfile.TemporaryDirectory() as folder:
        model = load(import_hf(file, pathlib.Path(folder, "ours")))
        same_ids = [ids.tolist() for ids in model.tokenizer.encode(texts)] == theirs["ids"]
        total, count, logits = nats(model, theirs["joined"], ROWS)
        chat = [{"role": "user", "content": QUESTION}]
        prompt = model.chat_encoder.prompt(chat)
        (answer,) = Generator(model).generate([prompt], 64, Sampling(temperature=0))
        same_prompt = prompt.tolist() == theirs["prompt"]
    perplexities = [float(np.exp(x / count)) for x in (total, theirs["nats"])]
    line = {
        "model": file.name,
        "text": arguments.text.name,
        "documents": len(texts),
        "rows": ROWS,
        "length": LENGTH,
        "tokens": count,
        "parameters": model.model.parameter_count(),
        "same_ids": same_ids,
        "logit_difference": float(np.abs(logits - their_logits).max() / np.abs(their_logits).max()),
        "perplexity": perplexities[0],
        "perplexity_of_transformers": perplexities[1],
        "same_prompt": same_prompt,
        "same_answer": answer.tokens == theirs["answer"],
        "answer": answer.text,
    }
    print(json.dumps(line, indent=1))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.out / "smollm2.jsonl", [line | provenance(jax.devices()[0].device_kind)])
    if arguments.golden:
        golden, _ = ask(arguments.python, file, [PARAGRAPH], 1)
        kept = {"text": PARAGRAPH, "question": QUESTION}
        kept |= {key: golden[key] for key in ("nats", "tokens", "joined", "text_of_answer")}
        GOLDEN.write_text(f"{json.dumps(kept, indent=1)}\n")
    off = abs(perplexities[0] / perplexities[1] - 1) > MOST_DIFFERENT_PERPLEXITY
    same = line["same_ids"] and line["same_prompt"] and line["same_answer"]
    if off or not same or line["logit_difference"] > MOST_DIFFERENT:
        raise RunError("not the same model; see smollm2.jsonl")


if __name__ == "__main__":
    run(main)
