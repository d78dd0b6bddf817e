"""Worker of `benchmarks/peers/speed.py`: a training step of another library, in the peers' environment.

It reads a JSON object per line and writes one: {"build": shape, "seconds": most or null} makes a model, {"turn": 1}
takes a training step. A step is compiled when its model is built; a model that cannot be compiled runs eagerly, and the
answer says why. PyTorch's own model is compiled and timed with each form of its attention that works, and keeps the
fastest.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Shape = dict[str, Any]  # from `benchmarks.lib.peers.peer_shape`
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Names in SDPBackend of the forms of scaled_dot_product_attention that do not hold all pairs.
ATTENTIONS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
TRIED = 3  # steps by which the fastest form is chosen


class LanguageModel(nn.Module):
    """Embedding, learned positions, a body of B×L×D -> B×L×D, norm, logits by the embedding's transpose."""

    def __init__(self, shape: Shape, body: nn.Module):
        """`body`: the module of all layers."""
        super().__init__()
        self.embedding = nn.Embedding(shape["vocab_size"], shape["model_dim"])
        self.positions = nn.Embedding(shape["length"], shape["model_dim"])
        self.body, self.norm = body, nn.LayerNorm(shape["model_dim"])
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits, B×L×V, of tokens, B×L."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.body(x)), self.embedding.weight)


class Block(nn.Module):
    """Attention and feed-forward as nanoGPT arranges them, with PyTorch's fused attention."""

    def __init__(self, dim: int, heads: int):
        """`dim`: a multiple of `heads`."""
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.output = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the block, B×L×D."""
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def sdpa(shape: Shape) -> nn.Module:
    """Builds a Transformer with torch.nn.functional.scaled_dot_product_attention."""
    blocks = (Block(shape["model_dim"], shape["num_heads"]) for _ in range(shape["num_layers"]))
    return LanguageModel(shape, nn.Sequential(*blocks))


def flash_pytorch(shape: Shape) -> nn.Module:
    """Builds FLASH-pytorch's language model; a layer of ours is two of its units."""
    from flash_pytorch import FLASHTransformer  # noqa: PLC0415

    return FLASHTransformer(
        num_tokens=shape["vocab_size"],
        dim=shape["model_dim"],
        depth=2 * shape["num_layers"],
        group_size=shape["size"],
        query_key_dim=shape["shared_dim"],
        expansion_factor=shape["expanded_dim"] / shape["model_dim"],
        causal=True,
        norm_type="layernorm",
        shift_tokens=False,
    )


def fast_transformers(shape: Shape) -> nn.Module:
    """Builds fast-transformers' causal linear attention."""
    from fast_transformers.builders import TransformerEncoderBuilder  # noqa: PLC0415
    from fast_transformers.masking import TriangularCausalMask  # noqa: PLC0415

    width = shape["model_dim"] // shape["num_heads"]
    encoder = TransformerEncoderBuilder.from_kwargs(
        n_layers=shape["num_layers"],
        n_heads=shape["num_heads"],
        query_dimensions=width,
        value_dimensions=width,
        feed_forward_dimensions=4 * shape["model_dim"],
        attention_type="causal-linear",
        activation="gelu",
        dropout=0.0,
        final_normalization=False,
    ).get()

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, attn_mask=TriangularCausalMask(x.shape[1], device=x.device))

    return LanguageModel(shape, Body())


def flash_linear_attention(shape: Shape) -> nn.Module:
    """Builds flash-linear-attention's linear attention, for a GPU."""
    from fla.models import LinearAttentionConfig, LinearAttentionForCausalLM  # noqa: PLC0415

    config = LinearAttentionConfig(
        hidden_size=shape["model_dim"],
        intermediate_size=round(8 * shape["model_dim"] / 3),  # three matrices with the parameters of an MLP's two
        num_hidden_layers=shape["num_layers"],
        num_heads=shape["num_heads"],
        feature_map="elu",
        vocab_size=shape["vocab_size"],
        tie_word_embeddings=True,
        fuse_cross_entropy=False,
    )

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = LinearAttentionForCausalLM(config)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens).logits

    return Logits()


# name -> (Python distribution, builder of its model)
PEERS: dict[str, tuple[str, Callable[[Shape], nn.Module]]] = {
    "sdpa": ("torch", sdpa),
    "flash_pytorch": ("FLASH-pytorch", flash_pytorch),
    "fast_transformers": ("pytorch-fast-transformers", fast_transformers),
    "flash_linear_attention": ("flash-linear-attention", flash_linear_attention),
}


def working_attentions(shape: Shape) -> list[str]:
    """Returns the forms of scaled_dot_product_attention that compute this shape here, forward and backward."""
    heads, working = shape["num_heads"], []
    size = (shape["rows"], shape["length"], heads, shape["model_dim"] // heads)
    dtype = getattr(torch, shape["dtype"])
    for name in ATTENTIONS:
        q, k, v = (torch.zeros(size, dtype=dtype, device=DEVICE, requires_grad=True).transpose(1, 2) for _ in range(3))
        try:
            with warnings.catch_warnings(), sdpa_kernel([getattr(SDPBackend, name)]):
                warnings.simplefilter("ignore")  # why a form does not work
                functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        except (AttributeError, RuntimeError):  # not in this version, or not for this shape and device
            continue
        working.append(name)
    return working


def only(name: str) -> contextlib.AbstractContextManager:
    """Restricts scaled_dot_product_attention to a form, and all pairs where that does not work."""
    return sdpa_kernel([getattr(SDPBackend, name), SDPBackend.MATH])


class Step:
    """Forward, backward, clipping and AdamW on random tokens that are on the device.

    Attributes:
        about: facts for the line of results: parameters, versions, threads, `compiled` or `why_eager`, and of
            PyTorch's attention the fastest form, and the milliseconds of a step with each.
    """

    def __init__(self, peer: str, shape: Shape, seconds: float | None = None):
        """Builds the model and compiles its step; `peer`: one of PEERS; `seconds`: after which no form is tried."""
        end = time.perf_counter() + (math.inf if seconds is None else seconds)
        torch.manual_seed(0)
        distribution, build = PEERS[peer]
        self.model = build(shape).to(DEVICE)
        versions = (f"{x} {importlib.metadata.version(x)}" for x in dict.fromkeys([distribution, "torch"]))
        self.about: dict[str, Any] = {
            "params": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "version": ", ".join(versions),
            "threads": torch.get_num_threads(),
        }
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
        self.tokens = torch.randint(shape["vocab_size"], (shape["rows"], shape["length"]), device=DEVICE)
        self.targets = self.tokens.roll(-1, dims=1)
        half = shape["dtype"] == "bfloat16"
        self.precision = lambda: torch.autocast(DEVICE, torch.bfloat16) if half else contextlib.nullcontext()
        self.loss, self.attention = self._loss, contextlib.nullcontext
        forms = working_attentions(shape) if peer == "sdpa" else []
        self.about |= self._compile_fastest(forms, end) if forms else self._compile()

    def turn(self) -> float:
        """Does one step; returns its milliseconds."""
        start = time.perf_counter()
        with self.attention():
            loss = self.loss()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    def _loss(self) -> torch.Tensor:
        with self.precision():
            logits = self.model(self.tokens)
        return functional.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())

    def _compile_fastest(self, forms: list[str], end: float) -> dict[str, Any]:
        """Compiles the step with each form of attention until `end`, and keeps the one with the fastest step.

        Returns:
            What `_compile` returns, the form as `attention`, and the milliseconds of each as `attention_ms`.
        """
        times, facts = {}, {}
        for name in forms:
            if times and time.perf_counter() > end:
                break
            self.attention = functools.partial(only, name)
            facts = self._compile()
            times[name] = min(self.turn() for _ in range(TRIED))
        fastest = min(times, key=times.__getitem__)
        if fastest != next(reversed(times)):
            self.attention = functools.partial(only, fastest)
            facts = self._compile()
        return facts | {"attention": fastest.lower(), "attention_ms": {name.lower(): ms for name, ms in times.items()}}

    def _compile(self) -> dict[str, Any]:
        """Compiles the model with its loss, by two steps; where that fails, the step stays eager.

        Returns:
            `compiled`, and `compile_s` and the number of `graph_breaks`, or `why_eager`.
        """
        if DEVICE == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
            return {"compiled": False, "why_eager": "torch.compile needs a C++ compiler on a CPU: install g++"}
        torch._dynamo.reset()
        counters.clear()
        self.loss, start = torch.compile(self._loss), time.perf_counter()
        try:
            for _ in range(2):
                self.turn()
            if not counters["stats"]["unique_graphs"]:
                raise RuntimeError("torch.compile found no graph in it")
        except Exception as error:  # whatever a library does that cannot be compiled
            self.loss = self._loss
            return {"compiled": False, "why_eager": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        breaks = sum(counters["graph_break"].values())
        return {"compiled": True, "compile_s": time.perf_counter() - start, "graph_breaks": breaks}


def main() -> None:
    """Answers questions until its input ends."""
    peer, step = sys.argv[1], None
    # Its key does not have the form of attention: the first that is compiled would serve the others, too.
    torch._functorch.config.enable_autograd_cache = False
    torch.set_float32_matmul_precision("high")  # as JAX's float32 products on a GPU
    if hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA; by default it may take half of them
    # Keeps what a library prints out of the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "build" in question:
                step = None  # frees the last one's memory first
                step = Step(peer, question["build"], question.get("seconds"))
                answer = step.about
            else:
                assert step is not None, "build comes first"
                answer = {"ms": step.turn()}
        except Exception as error:  # any error of a library; the calling script reports it and continues
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
