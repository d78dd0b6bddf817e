"""Worker of `benchmarks/peers/smollm2.py`: transformers reads the same GGUF file, in the peers' environment.

    smollm2_worker.py GGUF FOLDER

reads FOLDER/asked.json, with texts, the question of a chat, rows and length, and writes FOLDER/answer.json: the token
ids of each text, the sum of the negative log-likelihoods of the rows that are cut from them, the chat as a prompt, and
its greedy answer; and FOLDER/logits.npy of the first row.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Dequantises to float32, and computes in it."""
    where = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    asked = json.loads((folder / "asked.json").read_text())
    # Rows as ours: begin-of-text before each document, and its end after it; joined and cut.
    ids = [tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in asked["texts"]]
    joined = [i for document in ids for i in (tokenizer.bos_token_id, *document, tokenizer.eos_token_id)]
    length, sums, count, logits = asked["length"], 0.0, 0, None
    with torch.no_grad():
        for start in range(0, min(asked["rows"] * length, len(joined) - 1), length):
            row = torch.tensor(joined[start : start + length + 1])[None]
            out = model(row[:, :-1]).logits[0]
            logits = out.numpy() if logits is None else logits
            sums += torch.nn.functional.cross_entropy(out, row[0, 1:], reduction="sum").item()
            count += row.shape[1] - 1
        np.save(folder / "logits.npy", logits)
        chat = [{"role": "user", "content": asked["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        after = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt.input_ids.shape[1] :]
    answer = {
        "ids": ids,
        "joined": joined,
        "nats": sums,
        "tokens": count,
        "prompt": prompt.input_ids[0].tolist(),
        "answer": [i for i in after.tolist() if i != tokenizer.eos_token_id],
        "text_of_answer": tokenizer.decode(after, skip_special_tokens=True),
    }
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
