"""Worker of `benchmarks/peers/llama.py`: runs transformers in the peers' environment.

llama_worker.py FOLDER [SETTINGS] reads FOLDER/ids.npy and writes FOLDER/logits.npy and FOLDER/continued.npy. With
settings, as JSON, it first draws a model of that shape and saves it in FOLDER.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def main(folder: pathlib.Path, settings: str | None) -> None:
    """Reads weights in the dtype in which they are saved, and computes in float32."""
    if settings:
        torch.manual_seed(0)
        about = json.loads(settings)
        model = LlamaForCausalLM(LlamaConfig(**about, initializer_range=0.15))
        for name, x in model.named_parameters():
            if "norm" in name:  # norms start at one
                torch.nn.init.normal_(x, 1.0, 0.3)
        model.to(getattr(torch, about["dtype"])).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(np.load(folder / "ids.npy"))
    with torch.no_grad():
        np.save(folder / "logits.npy", model(ids).logits.numpy())
        continued = model.generate(ids[:1], max_new_tokens=16, do_sample=False, eos_token_id=None, suppress_tokens=[0])
    np.save(folder / "continued.npy", continued[0, ids.shape[1] :].numpy())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
