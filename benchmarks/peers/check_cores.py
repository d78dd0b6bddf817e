"""flash-linear-attention's reference cores between our projections, for `check_worker.py`.

Their sublayers need a GPU. The files `naive.py` next to their kernels do not, and compute the same. Queries, keys,
values, decays, norms and gates are made here, from our weights, as in their layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Arrays = dict[str, torch.Tensor]
Load = Callable[[str], Any]  # from a path in their repository to the module
EPSILON = 1e-6


def retention(arrays: Arrays, load: Load, count: int) -> torch.Tensor:
    """Runs multi-scale retention without rotary positions."""
    q, k, v = (split_heads(project(arrays, name), count).transpose(1, 2) for name in ("query", "key", "value"))
    out = load("fla/ops/retention/naive.py").naive_retention(q, k, v)
    return gate_heads(out.transpose(1, 2), arrays)


def gla(arrays: Arrays, load: Load, count: int) -> torch.Tensor:
    """Runs gated linear attention."""
    q, k, v = (split_heads(project(arrays, name), count) for name in ("query", "key", "value"))
    logits = arrays["x"] @ arrays["decay_down.kernel"] @ arrays["decay_up.kernel"] + arrays["decay_bias"]
    gates = split_heads(functional.logsigmoid(logits) / 16, count)
    out, _ = load("fla/ops/gla/naive.py").naive_recurrent_gla(q, k, v, gates)
    return gate_heads(out, arrays)


def based(arrays: Arrays, load: Load, count: int) -> torch.Tensor:
    """Runs Based: attention with the Taylor polynomial of exp."""
    q, k, v = (split_heads(project(arrays, name), count).transpose(1, 2) for name in ("query", "key", "value"))
    out = load("fla/ops/based/naive.py").naive_parallel_based(q, k, v)
    return out.transpose(1, 2).flatten(2) @ arrays["output.kernel"]


def gated_delta(arrays: Arrays, load: Load, count: int, form: str = "recurrent") -> torch.Tensor:
    """Runs the gated delta rule, token by token or in chunks; without decays the delta rule."""
    q, k, v = (split_heads(functional.silu(project(arrays, name)), count) for name in ("query", "key", "value"))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    beta = torch.sigmoid(arrays["x"] @ arrays["beta.kernel"])
    if "log_rate" not in arrays:
        rows = (x.transpose(1, 2) for x in (q, k, v, beta))
        out = load("fla/ops/delta_rule/naive.py").delta_rule_recurrence(*rows)[0].transpose(1, 2)
    else:
        decays = log_decays(arrays)
        module = load("fla/ops/gated_delta_rule/naive.py")
        run = getattr(module, f"naive_{form}_gated_delta_rule")
        out = run(q, k, v, beta=beta, g=decays)[0]
    return gate_heads(out, arrays)


def mamba2(arrays: Arrays, load: Load, count: int, form: str = "recurrent") -> torch.Tensor:
    """Runs state space duality (Mamba-2), whose heads share B and C."""
    x, shared = (functional.silu(project(arrays, name) + arrays[f"{name}_bias"]) for name in ("value", "shared"))
    values = split_heads(x, count)
    b, c = (y[:, :, None].expand(-1, -1, count, -1) for y in shared.chunk(2, dim=-1))
    steps = functional.softplus(arrays["x"] @ arrays["step_size.kernel"] + arrays["step_bias"])
    run = getattr(load("fla/ops/simple_gla/naive.py"), f"naive_{form}_simple_gla")
    out, _ = run(c, b, values * steps[..., None], log_decays(arrays), scale=1.0)
    out = out + values * arrays["skip"][:, None]
    out = out.flatten(2) * functional.silu(arrays["x"] @ arrays["gate.kernel"])
    return (rms_normalize(out) * arrays["norm.scale"]) @ arrays["output.kernel"]


def project(arrays: Arrays, name: str) -> torch.Tensor:
    """Returns a linear map of the input, followed by its short convolution, if any."""
    y = arrays["x"] @ arrays[f"{name}.kernel"]
    taps = arrays.get(f"convolutions.{name}")
    if taps is None:
        return y
    padded = functional.pad(y.transpose(1, 2), (len(taps) - 1, 0))
    return functional.conv1d(padded, taps.T[:, None], groups=y.shape[2]).transpose(1, 2)


def log_decays(arrays: Arrays) -> torch.Tensor:
    """Returns the logarithm of each head's decay."""
    steps = functional.softplus(arrays["x"] @ arrays["step_size.kernel"] + arrays["step_bias"])
    return -arrays["log_rate"].exp() * steps


def split_heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """Splits heads: B×L×(H·K) -> B×L×H×K."""
    return x.unflatten(-1, (count, -1))


def rms_normalize(x: torch.Tensor) -> torch.Tensor:
    """Divides by the root mean square of the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def gate_heads(out_BxLxHxE: torch.Tensor, arrays: Arrays) -> torch.Tensor:
    """Normalizes heads, applies their gain, if any, the output gate and the output map."""
    heads = rms_normalize(out_BxLxHxE) * arrays.get("gain", torch.ones(()))
    return (heads.flatten(2) * functional.silu(arrays["x"] @ arrays["gate.kernel"])) @ arrays["output.kernel"]


CORES = {"retention": retention, "gla": gla, "based": based, "gated_delta": gated_delta, "mamba2": mamba2}
