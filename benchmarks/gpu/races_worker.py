"""Worker of `benchmarks/gpu/races.py`: flash-linear-attention's kernels, in the peers' environment.

It reads a JSON object per line and writes one: {"about": core} names the kernel, {"compute": core} writes its outputs
and gradients for the arrays of a file, {"build": core} draws the inputs of a shape, and {"turn": 1} times calls of it,
forward and backward. Without a GPU it takes the references next to the kernels, which need no Triton.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

Tensors = dict[str, torch.Tensor]  # q, k, v, B×L×H×K, and perhaps g and beta
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


class Kernel(NamedTuple):
    """A kernel, and the reference next to it.

    Attributes:
        module: folder of fla/ops.
        name: name of the kernel.
        call: calls it with the arrays.
        reference: name of the function in naive.py.
        call_reference: calls that.
        gates: how the gates are made from normal values, and whether g has a value per channel.
    """

    module: str
    name: str
    call: Callable[[Callable, Tensors], torch.Tensor]
    reference: str
    call_reference: Callable[[Callable, Tensors], torch.Tensor]
    gates: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = MappingProxyType({})


def of_length_1(x: torch.Tensor) -> torch.Tensor:
    """Divides by the length of the last dimension, as the kernel of the delta rule does itself."""
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def in_heads(x: Tensors) -> list[torch.Tensor]:
    """Returns q, k and v as B×H×L×K."""
    return [x[name].transpose(1, 2) for name in ("q", "k", "v")]


_qkv = lambda x: (x["q"], x["k"], x["v"])
_per_token = (functional.logsigmoid, False)
KERNELS = {
    "gla": Kernel(
        "gla",
        "chunk_gla",
        lambda f, x: f(*_qkv(x), x["g"])[0],
        "naive_recurrent_gla",
        lambda f, x: f(x["q"], x["k"], x["v"], x["g"])[0],
        {"g": (lambda x: functional.logsigmoid(x).clamp_min(-5), True)},
    ),
    "gated_delta": Kernel(
        "gated_delta_rule",
        "chunk_gated_delta_rule",
        lambda f, x: f(*_qkv(x), g=x["g"], beta=x["beta"], use_qk_l2norm_in_kernel=True)[0],
        "naive_recurrent_gated_delta_rule",
        lambda f, x: f(of_length_1(x["q"]), of_length_1(x["k"]), x["v"], beta=x["beta"], g=x["g"])[0],
        {"g": _per_token, "beta": (torch.sigmoid, False)},
    ),
    "retention": Kernel(
        "retention",
        "chunk_retention",
        lambda f, x: f(*_qkv(x))[0],
        "naive_retention",
        lambda f, x: f(*in_heads(x)).transpose(1, 2),
    ),
    "linear": Kernel(
        "linear_attn",
        "chunk_linear_attn",
        lambda f, x: f(*_qkv(x))[0],
        "naive_recurrent_linear_attn",
        lambda f, x: f(*_qkv(x), normalize=True)[0],
    ),
    "ssd": Kernel(
        "simple_gla",
        "chunk_simple_gla",
        lambda f, x: f(*_qkv(x), g=x["g"])[0],
        "naive_parallel_simple_gla",
        lambda f, x: f(*_qkv(x), g=x["g"])[0],
        {"g": _per_token},
    ),
}


def function_of(core: str) -> Callable[[Tensors], torch.Tensor]:
    """Returns the kernel of a core, or on a CPU its reference."""
    kernel = KERNELS[core]
    if ON_GPU:
        function = getattr(importlib.import_module(f"fla.ops.{kernel.module}"), kernel.name)
        return lambda x: kernel.call(function, x)
    # Loaded alone: the folder's other files import Triton.
    (package,) = importlib.util.find_spec("fla").submodule_search_locations  # type: ignore[union-attr]
    path = pathlib.Path(package) / "ops" / kernel.module / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{kernel.module}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    function = getattr(module, kernel.reference)
    return lambda x: kernel.call_reference(function, x)


def about(core: str) -> dict[str, Any]:
    """Returns the name and the version of what is raced, and of the libraries below it."""
    versions = ", ".join(f"{x} {importlib.metadata.version(x)}" for x in ("flash-linear-attention", "torch"))
    name = KERNELS[core].name if ON_GPU else KERNELS[core].reference
    return {"theirs": name, "is_reference": not ON_GPU, "peer_version": versions}


def both(function: Callable[[Tensors], torch.Tensor], x: Tensors, gradient: torch.Tensor) -> Tensors:
    """Returns the output and the gradients of all inputs."""
    out = function(x)
    gradients = torch.autograd.grad(out, list(x.values()), gradient.to(out.dtype))
    return {"out": out.detach(), **dict(zip(x, gradients, strict=True))}


def on_device(array: Any, gate: bool) -> torch.Tensor:
    """Returns a tensor that needs a gradient; gates stay float32, all else is bfloat16."""
    dtype = torch.float32 if gate else torch.bfloat16
    return torch.as_tensor(array, device=DEVICE).to(dtype).detach().requires_grad_()


def compute(core: str, inputs: str, outputs: str) -> dict[str, Any]:
    """Writes outputs and gradients for the arrays of a file."""
    arrays, gates = np.load(inputs), KERNELS[core].gates
    x = {name: on_device(arrays[name], name in gates) for name in arrays.files if name != "do"}
    results = both(function_of(core), x, on_device(arrays["do"], False).detach())
    np.savez(outputs, **{name: y.float().cpu().numpy() for name, y in results.items()})
    return {"written": outputs}


class Turns:
    """Calls of a kernel at a shape."""

    def __init__(self, core: str, shape: list[int], calls: int):
        """Draws the inputs; `shape`: sequences, length, heads and width."""
        torch.manual_seed(0)
        self.function, self.calls, gates = function_of(core), calls, KERNELS[core].gates
        draw = lambda size: torch.randn(size, device=DEVICE)
        self.x = {name: on_device(draw(shape), False) for name in ("q", "k", "v")}
        if core == "linear":
            self.x |= {name: on_device(functional.elu(self.x[name]) + 1, False) for name in ("q", "k")}
        for name, (transform, per_channel) in gates.items():
            self.x[name] = on_device(transform(draw(shape if per_channel else shape[:3])), True)
        self.gradient = draw(shape)

    def turn(self) -> float:
        """Calls it forward and backward; returns the milliseconds of all calls."""
        start = time.perf_counter()
        for _ in range(self.calls):
            both(self.function, self.x, self.gradient)
        if ON_GPU:
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Answers questions until its input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps what a library prints out of the answers
    turns = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "about" in question:
                answer = about(question["about"])
            elif "compute" in question:
                answer = compute(question["compute"], question["inputs"], question["outputs"])
            elif "build" in question:
                turns = None  # frees the last one's memory first
                turns = Turns(question["build"], question["shape"], question["calls"])
                turns.turn()  # Triton compiles and chooses its tiles
                answer = {"built": question["build"]}
            else:
                assert turns is not None, "build comes first"
                answer = {"ms": turns.turn()}
        except Exception as error:  # any error of a library; the calling script reports it and continues
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
