"""Worker of `benchmarks/peers/formats.py`: public classes of other libraries, in the peers' environment.

    formats_worker.py FORMAT FOLDER CONTINUED [SETTINGS]

reads FOLDER/ids.npy, B×L, and writes logits.npy of them, continued.npy with the greedy continuation of the first row by
CONTINUED tokens, and gradients.safetensors with the gradient of the mean loss of the first row, by parameter. With
settings, as JSON, it first draws a model of that shape and saves it in FOLDER as its library does.

    formats_worker.py pickle SAFETENSORS FILE NAMES

writes the same arrays with `torch.save`, with parts of their names replaced as NAMES, a JSON object, says.
"""

import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import conv1d, embedding, linear, logsigmoid, rms_norm, silu

Arrays = dict[str, torch.Tensor]
Forward = Callable[[Arrays, torch.Tensor], torch.Tensor]
CLASSES = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
    "mamba2": (transformers.Mamba2ForCausalLM, transformers.Mamba2Config),
    "rwkv4": (transformers.RwkvForCausalLM, transformers.RwkvConfig),
}


def draw(name: str, x: torch.Tensor) -> torch.Tensor:
    """Values under which every parameter matters."""
    if ("norm" in name and name.endswith("weight")) or ("ln" in name and name.endswith("weight")):
        return torch.empty_like(x).normal_(1.0, 0.3)
    if "time_mix" in name:
        return torch.empty_like(x).uniform_(0, 1)
    if name.endswith("time_decay"):
        return torch.empty_like(x).uniform_(-5, 1)
    if name.endswith("A_log"):
        return torch.empty_like(x).uniform_(-4, 0)  # faster decays leave sums of almost nothing, and then only rounding
    return torch.empty_like(x).normal_(0, 0.15 if x.dim() == 2 else 0.3)


def of_transformers(name: str, folder: pathlib.Path, settings: dict[str, Any] | None) -> tuple[Arrays, Forward]:
    """A class of transformers."""
    cls, config = CLASSES[name]
    if settings:
        model = cls(config(**settings))
        with torch.no_grad():
            for key, x in model.named_parameters():
                x.copy_(draw(key, x))
        model.to(getattr(torch, settings.get("dtype", "float32"))).save_pretrained(folder)
    model = cls.from_pretrained(folder, dtype=torch.float32).eval()
    call = lambda arrays, ids: torch.func.functional_call(model, arrays, (ids,), {"use_cache": False}).logits
    return dict(model.named_parameters()), call


def of_fla(name: str, folder: pathlib.Path, settings: dict[str, Any] | None) -> tuple[Arrays, Forward]:
    """A model of fla, whose classes need a GPU: its names, and equations that run on a CPU."""
    shapes, forward = {"gla": (gla_shapes, gla), "gated_deltanet": (delta_shapes, gated_delta)}[name]
    if settings:
        arrays = {key: draw(key, torch.empty(shape)) for key, shape in shapes(settings).items()}
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(settings))
    settings = json.loads((folder / "config.json").read_text())
    arrays = {key: x.requires_grad_() for key, x in load_file(folder / "model.safetensors").items()}
    return arrays, forward(settings)


def common_shapes(settings: dict[str, Any], keys: int, values: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that models of fla have in common."""
    dim, mlp, vocab = (settings[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embeddings.weight": (vocab, dim), "model.norm.weight": (dim,), "lm_head.weight": (vocab, dim)}
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        widths = {"q": keys, "k": keys, "v": values}
        shapes |= {f"{layer}.attn.{x}_proj.weight": (width, dim) for x, width in (widths | {"g": values}).items()}
        shapes |= {f"{layer}.attn.{x}_conv1d.weight": (width, 1, 4) for x, width in widths.items()}
        shapes |= {f"{layer}.attn.o_proj.weight": (dim, values), f"{layer}.mlp.down_proj.weight": (dim, mlp)}
        shapes |= {f"{layer}.mlp.{x}_proj.weight": (mlp, dim) for x in ("gate", "up")}
        shapes |= {f"{layer}.{x}_norm.weight": (dim,) for x in ("attn", "mlp")}
    return shapes


def gla_shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of fla's GLA with short convolutions."""
    dim = settings["hidden_size"]
    keys = int(dim * settings["expand_k"])
    shapes = common_shapes(settings, keys, dim)
    for i in range(settings["num_hidden_layers"]):
        attention = f"model.layers.{i}.attn"
        shapes |= {f"{attention}.gk_proj.0.weight": (16, dim), f"{attention}.gk_proj.1.weight": (keys, 16)}
        shapes |= {
            f"{attention}.gk_proj.1.bias": (keys,),
            f"{attention}.g_norm_swish_gate.weight": (dim // settings["num_heads"],),
        }
    return shapes


def gla(settings: dict[str, Any]) -> Forward:
    """GLA with fla's plain recurrence."""
    path = pathlib.Path(importlib.util.find_spec("fla").submodule_search_locations[0], "ops/gla/naive.py")
    spec = importlib.util.spec_from_file_location("naive", path)
    naive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(naive)
    heads, epsilon = settings["num_heads"], settings["norm_eps"]

    def attention(arrays: Arrays, at: str, x: torch.Tensor) -> torch.Tensor:
        by_head = lambda y: y.unflatten(-1, (heads, -1))
        q, k, v = (
            by_head(convolve(linear(x, arrays[f"{at}.{z}_proj.weight"]), arrays[f"{at}.{z}_conv1d.weight"]))
            for z in "qkv"
        )
        low = linear(x, arrays[f"{at}.gk_proj.0.weight"])
        decay = logsigmoid(linear(low, arrays[f"{at}.gk_proj.1.weight"], arrays[f"{at}.gk_proj.1.bias"])) / 16
        mixed, _ = naive.naive_recurrent_gla(q, k, v, by_head(decay))
        normal = rms_norm(mixed, mixed.shape[-1:], arrays[f"{at}.g_norm_swish_gate.weight"], epsilon)
        gate = by_head(linear(x, arrays[f"{at}.g_proj.weight"]))
        return linear((normal * silu(gate)).flatten(-2), arrays[f"{at}.o_proj.weight"])

    def forward(arrays: Arrays, ids: torch.Tensor) -> torch.Tensor:
        x = embedding(ids, arrays["model.embeddings.weight"])
        norm = lambda x, name: rms_norm(x, x.shape[-1:], arrays[f"{name}.weight"], epsilon)
        for i in range(settings["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            x = x + attention(arrays, f"{layer}.attn", norm(x, f"{layer}.attn_norm"))
            y = norm(x, f"{layer}.mlp_norm")
            gate, up = (linear(y, arrays[f"{layer}.mlp.{z}_proj.weight"]) for z in ("gate", "up"))
            x = x + linear(silu(gate) * up, arrays[f"{layer}.mlp.down_proj.weight"])
        return linear(norm(x, "model.norm"), arrays["lm_head.weight"])

    return forward


def convolve(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution of B×L×C, then silu."""
    padded = torch.nn.functional.pad(x.transpose(1, 2), (taps.shape[-1] - 1, 0))
    return silu(conv1d(padded, taps, groups=x.shape[-1]).transpose(1, 2))


def delta_shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of fla's Gated DeltaNet."""
    dim, heads, width = (settings[key] for key in ("hidden_size", "num_heads", "head_dim"))
    values = int(width * settings["expand_v"])
    shapes = common_shapes(settings, heads * width, heads * values)
    for i in range(settings["num_hidden_layers"]):
        attention = f"model.layers.{i}.attn"
        shapes |= {f"{attention}.{x}_proj.weight": (heads, dim) for x in "ab"}
        shapes |= {f"{attention}.{x}": (heads,) for x in ("A_log", "dt_bias")}
        shapes |= {f"{attention}.o_norm.weight": (values,)}
    return shapes


def gated_delta(settings: dict[str, Any]) -> Forward:
    """Gated DeltaNet by the class of Qwen3-Next, whose layers it is, with names and order of rows changed."""
    sys.modules["fla"] = None  # where fla is installed, the class would use its kernels, which need a GPU
    heads, width = settings["num_heads"], settings["head_dim"]
    config = transformers.Qwen3NextConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=int(width * settings["expand_v"]),
        layer_types=["linear_attention"] * settings["num_hidden_layers"],
        mlp_only_layers=list(range(settings["num_hidden_layers"])),
        num_experts=0,
        rms_norm_eps=settings["norm_eps"],
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3NextForCausalLM(config).eval()

    def rename(arrays: Arrays) -> Arrays:
        # Its plain norms multiply by 1 + w, that of the heads by w.
        out = {"model.embed_tokens.weight": arrays["model.embeddings.weight"]}
        out |= {"lm_head.weight": arrays["lm_head.weight"], "model.norm.weight": arrays["model.norm.weight"] - 1}
        for i in range(settings["num_hidden_layers"]):
            layer, attention = f"model.layers.{i}", f"model.layers.{i}.attn"
            theirs = f"{layer}.linear_attn"
            get = lambda name, at=attention: arrays[f"{at}.{name}"]
            by_head = {x: get(f"{x}_proj.weight").unflatten(0, (heads, -1)) for x in "qkvgba"}
            out[f"{theirs}.in_proj_qkvz.weight"] = torch.cat([by_head[x] for x in "qkvg"], 1).flatten(0, 1)
            out[f"{theirs}.in_proj_ba.weight"] = torch.cat([by_head[x] for x in "ba"], 1).flatten(0, 1)
            out[f"{theirs}.conv1d.weight"] = torch.cat([get(f"{x}_conv1d.weight") for x in "qkv"])
            names = {"A_log": "A_log", "dt_bias": "dt_bias", "o_norm.weight": "norm.weight"}
            out |= {f"{theirs}.{x}": get(name) for name, x in (names | {"o_proj.weight": "out_proj.weight"}).items()}
            out[f"{layer}.input_layernorm.weight"] = arrays[f"{layer}.attn_norm.weight"] - 1
            out[f"{layer}.post_attention_layernorm.weight"] = arrays[f"{layer}.mlp_norm.weight"] - 1
            out |= {key: x for key, x in arrays.items() if key.startswith(f"{layer}.mlp.")}
        return out

    return lambda arrays, ids: torch.func.functional_call(model, rename(arrays), (ids,), {"use_cache": False}).logits


def continue_greedily(forward: Forward, arrays: Arrays, ids: torch.Tensor, tokens: int) -> np.ndarray:
    """The likeliest tokens after a row, one by one; never token 0, which ends texts."""
    with torch.no_grad():
        for _ in range(tokens):
            logits = forward(arrays, ids)[0, -1]
            logits[0] = -torch.inf
            ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    return ids[0, -tokens:].numpy()


def main(name: str, folder: pathlib.Path, continued: int, settings: dict[str, Any] | None) -> None:
    """Reads weights in the dtype in which they are saved, and computes in float32."""
    torch.manual_seed(0)
    arrays, forward = (of_transformers if name in CLASSES else of_fla)(name, folder, settings)
    ids = torch.tensor(np.load(folder / "ids.npy"))
    with torch.no_grad():
        np.save(folder / "logits.npy", forward(arrays, ids).numpy())
    # Gradients, for parameters that are trained: in rwkv4 a buffer may not be.
    loss = torch.nn.functional.cross_entropy(forward(arrays, ids[:1])[0, :-1], ids[0, 1:])
    gradients = torch.autograd.grad(loss, list(arrays.values()))
    save_file({key: x.contiguous() for key, x in zip(arrays, gradients, strict=True)}, folder / "gradients.safetensors")
    np.save(folder / "continued.npy", continue_greedily(forward, arrays, ids[:1], continued))


def write_pickle(arrays: Arrays, file: pathlib.Path, parts: dict[str, str]) -> None:
    """Writes arrays as PyTorch does, with parts of their names replaced."""
    renamed = {}
    for name, x in arrays.items():
        for part, other in parts.items():
            name = name.replace(part, other)
        renamed[name] = x
    torch.save(renamed, file)


if __name__ == "__main__" and sys.argv[1] == "pickle":
    write_pickle(load_file(sys.argv[2]), pathlib.Path(sys.argv[3]), json.loads(sys.argv[4]))
elif __name__ == "__main__":
    shape = json.loads(sys.argv[4]) if len(sys.argv) > 4 else None
    main(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), shape)
