"""Worker of `studies/quality/train_peers.py`: trains other implementations in the peers' environment.

train_peers_worker.py FOLDER trains and scores the model that FOLDER/question.json names, on the batches of
FOLDER/train.npz. The question also has the learning rate of each step and the settings of AdamW. FOLDER/SPLIT.npz has
batches to score. FOLDER/answer.json gets version, device and parameters, and the nats and targets of each batch of a
split; or the error. It uses a GPU if PyTorch finds one.
"""

import importlib.metadata
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

# The peers' environment does not have this package: the module is imported by its folder, and imports nothing of ours.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))
from speed_worker import flash_pytorch

Shape = dict[str, Any]  # from `benchmarks.lib.peers.peer_shape`
Batch = tuple[torch.Tensor, torch.Tensor]
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_EVERY = 100  # steps between two lines of progress
# FLASH-pytorch keeps some vectors as matrices: scales, offsets, and a bias per distance. They get no weight decay.
_VECTORS = re.compile(r"\b(gamma|beta|relative_attention_bias)\b")
# Suffixes of names in a model of transformers: positions, the last map of a sublayer, and all maps.
_POSITIONS, _LAST_MAPS = "wpe", ("c_proj", "o_proj", "down_proj")
_MAPS = (*_LAST_MAPS, "c_attn", "c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}  # theirs are beyond our vocabulary


class Logits(nn.Module):
    """Wraps a model of transformers: tokens B×L -> logits B×L×V."""

    def __init__(self, model: nn.Module):
        """`model`: a causal language model."""
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits, B×L×V, of tokens, B×L."""
        return self.model(tokens, use_cache=False).logits


def _scale(shape: Shape) -> float:
    """Returns the standard deviation of initial values, D^-0.5.

    The library's 0.02 is for wider models, and would slow these for a thousand steps.
    """
    return shape["model_dim"] ** -0.5


def gpt2(shape: Shape) -> nn.Module:
    """Builds the GPT-2 of transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(
        vocab_size=shape["vocab_size"],
        n_positions=shape["length"],
        n_embd=shape["model_dim"],
        n_layer=shape["num_layers"],
        n_head=shape["num_heads"],
        n_inner=shape["mlp_dim"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=_scale(shape),
        **_NO_SPECIAL_TOKENS,
    )
    return Logits(GPT2LMHeadModel(config))


def llama(shape: Shape) -> nn.Module:
    """Builds the Llama of transformers, with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["length"],
        hidden_size=shape["model_dim"],
        intermediate_size=shape["mlp_dim"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        tie_word_embeddings=True,
        initializer_range=_scale(shape),
        **_NO_SPECIAL_TOKENS,
    )
    return Logits(LlamaForCausalLM(config))


def flash_pytorch_from_our_values(shape: Shape) -> nn.Module:
    """Builds FLASH-pytorch, with initial values drawn like those of our FLASH with `model.init=lecun`.

    By default it has 1 for embeddings, 1/√3 of ours for matrices, small biases, and √S instead of 0.02 for the bias of
    a distance: the attention of a new model is far from zero.
    """
    model = flash_pytorch(shape)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
    nn.init.normal_(model.token_emb.weight, std=_scale(shape))
    nn.init.constant_(model.abs_pos_emb.scale, _scale(shape))
    for layer in model.layers:
        nn.init.normal_(layer.rel_pos_bias.relative_attention_bias.weight, std=0.02 / layer.rel_pos_bias.scale)
    return model


def from_our_values(build: Callable[[Shape], nn.Module]) -> Callable[[Shape], nn.Module]:
    """Returns a builder whose initial values are drawn like ours with `init=lecun`, `residual_init=depth`.

    The library's values have one standard deviation for all matrices, and those of a Llama ignore the depth.
    """

    def build_from_our_values(shape: Shape) -> nn.Module:
        model = build(shape)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02 if name.endswith(_POSITIONS) else _scale(shape))
            elif name.endswith(_MAPS):
                inputs = layer.weight.shape[1 if isinstance(layer, nn.Linear) else 0]  # GPT-2's are (inputs, outputs)
                of_depth = (2 * shape["num_layers"]) ** -0.5 if name.endswith(_LAST_MAPS) else 1.0
                nn.init.normal_(layer.weight, std=of_depth * inputs**-0.5)
        return model

    return build_from_our_values


# name -> (Python distribution, builder of its model)
PEERS: dict[str, tuple[str, Callable[[Shape], nn.Module]]] = {
    "gpt2": ("transformers", gpt2),
    "gpt2/our_values": ("transformers", from_our_values(gpt2)),
    "llama": ("transformers", llama),
    "llama/our_values": ("transformers", from_our_values(llama)),
    "flash_pytorch": ("FLASH-pytorch", flash_pytorch),
    "flash_pytorch/our_values": ("FLASH-pytorch", flash_pytorch_from_our_values),
}


def batches(file: pathlib.Path) -> Iterator[Batch]:
    """Yields inputs and targets of each batch, B×L; cross_entropy ignores targets of -100."""
    with np.load(file) as arrays:
        pairs = zip(arrays["inputs_NxBxL"], arrays["targets_NxBxL"], strict=True)
    yield from ((torch.from_numpy(inputs).long(), torch.from_numpy(targets).long()) for inputs, targets in pairs)


def batch_loss(model: nn.Module, batch: Batch, reduction: str) -> torch.Tensor:
    """Returns the loss of a batch in nats: per target ("mean"), or of all targets ("sum")."""
    inputs, targets = (x.to(_DEVICE) for x in batch)
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def train(model: nn.Module, file: pathlib.Path, question: dict[str, Any]) -> None:
    """Trains with AdamW after clipping by the global norm; only matrices have weight decay.

    Raises:
        FloatingPointError: the loss became non-finite.
    """
    named = {name: x for name, x in model.named_parameters() if x.requires_grad}
    matrices = {name for name, x in named.items() if x.ndim >= 2 and not _VECTORS.search(name)}
    decayed = [
        {"params": [named[name] for name in named if name in matrices], "weight_decay": question["weight_decay"]},
        {"params": [named[name] for name in named if name not in matrices], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(decayed, betas=(question["b1"], question["b2"]), eps=question["eps"])
    for step, (rate, batch) in enumerate(zip(question["rates"], batches(file), strict=True)):
        loss = batch_loss(model, batch, "mean")
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss of step {step} is {loss.item()}")
        if step % _EVERY == 0:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(named.values(), question["clip"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def answer(folder: pathlib.Path) -> dict[str, Any]:
    """Trains and scores the model of the question in a folder; returns the answer."""
    question = json.loads((folder / "question.json").read_text())
    torch.manual_seed(question["seed"])
    distribution, build = PEERS[question["peer"]]
    model = build(question["shape"]).to(_DEVICE)
    names = (distribution, "torch")
    about = {
        "parameters": sum(x.numel() for x in model.parameters() if x.requires_grad),
        "device": torch.cuda.get_device_name() if _DEVICE == "cuda" else _DEVICE,
        "peer_versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
    }
    # Check the size, train, then score each split.
    theirs, ours = about["parameters"], question["parameters"]
    if abs(theirs / ours - 1) > question["most_unequal"]:
        raise ValueError(f"it has {theirs:,} parameters, and ours {ours:,}: change its widths")
    train(model.train(), folder / "train.npz", question)
    model.eval()
    for split in question["splits"]:
        with torch.inference_mode():
            sums = [
                (batch_loss(model, batch, "sum").item(), int((batch[1] >= 0).sum()))
                for batch in batches(folder / f"{split}.npz")
            ]
        if not np.isfinite([nll for nll, _ in sums]).all():
            raise FloatingPointError(f"the loss on the {split} split is not finite")
        about[split] = dict(zip(("nll", "tokens"), map(list, zip(*sums, strict=True)), strict=True))
    return about


def main(folder: pathlib.Path) -> None:
    """Writes the answer, or the error of any library, which the calling script reports."""
    try:
        result = answer(folder)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        if isinstance(error, FloatingPointError):
            result = {"failed": str(error)}
    (folder / "answer.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
