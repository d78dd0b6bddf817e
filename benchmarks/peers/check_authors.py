"""Layers of the authors' repositories, on the CPU, for `check_worker.py`.

Their files import modules that a layer on a CPU does not need. These are replaced by stubs here. Only two stubs compute
anything: activations by name, and for Mamba-2 the authors' PyTorch references instead of two kernels.
"""

import contextlib
import importlib
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

Settings = dict[str, Any]
Arrays = dict[str, torch.Tensor]


@contextlib.contextmanager
def importable(folder: str, packages: dict[str, str], stubs: dict[str, Any]) -> Iterator[None]:
    """Lets files of a repository be imported.

    Args:
        folder: the checkout.
        packages: names of packages and their folders in it; their __init__.py is not run.
        stubs: replacements of modules, by name.
    """
    modules = dict(stubs)
    for name, path in packages.items():
        modules[name] = types.ModuleType(name)
        modules[name].__path__ = [str(pathlib.Path(folder, path))]
    for name, module in stubs.items():
        parent, _, child = name.rpartition(".")
        if parent in packages:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:  # another repository may have packages of the same names
        roots = {name.partition(".")[0] for name in modules}
        for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
            del sys.modules[name]


def set_linear(module: nn.Linear, *read_kernels: torch.Tensor) -> None:
    """Sets y = x W, for several concatenated W; a bias is 0."""
    module.weight.data = torch.cat([kernel.T for kernel in read_kernels]).contiguous()
    if module.bias is not None:
        module.bias.data.zero_()


def read_kernels(arrays: Arrays, *names: str) -> list[torch.Tensor]:
    """Returns our kernels by the names of the maps."""
    return [arrays[f"{name}.kernel"] for name in names]


def transformer_xl(settings: Settings, arrays: Arrays, folder: str) -> torch.Tensor:
    """Runs `RelPartialLearnableMultiHeadAttn`, segment by segment, without its norm and its residual."""
    # Their module, with our weights; its norm and residual are not compared.
    stubs = {name: mock.MagicMock() for name in ("proj_adaptive_softmax", "log_uniform_sampler")}
    with importable(folder, {"transformer_xl": "pytorch"}, stubs):
        theirs = importlib.import_module("transformer_xl.mem_transformer")
    x_LxBxD, heads, size = arrays["x"].transpose(0, 1), settings["heads"], settings["segment"]
    width = x_LxBxD.shape[2]
    module = theirs.RelPartialLearnableMultiHeadAttn(heads, width, width // heads, 0.0, pre_lnorm=True).eval()
    module.layer_norm = nn.Identity()
    set_linear(module.qkv_net, *read_kernels(arrays, "query", "key", "value"))
    set_linear(module.r_net, *read_kernels(arrays, "distance"))
    set_linear(module.o_net, *read_kernels(arrays, "output"))
    # Segment by segment, with the previous one as memory.
    embedding, outputs, memory = theirs.PositionalEmbedding(width), [], None
    for segment in x_LxBxD.split(size):
        before = 0 if memory is None else len(memory)
        length = len(segment) + before
        mask = torch.ones(len(segment), length, dtype=torch.bool).triu(1 + before)[:, :, None]
        positions = embedding(torch.arange(length - 1, -1, -1.0))
        biases = arrays["content_bias"], arrays["position_bias"]
        outputs.append(module(segment, positions, *biases, attn_mask=mask, mems=memory) - segment)
        memory = segment
    return torch.cat(outputs).transpose(0, 1)


def adaptive_span(settings: Settings, arrays: Arrays, folder: str) -> torch.Tensor:
    """Runs `MultiHeadSeqAttention` without positions.

    Theirs sees only earlier tokens, from a cache of fixed size: keys and values are shifted by one token here. The
    first tokens have fewer predecessors, and go one by one through modules whose limit is their number.
    """
    # Their package imports itself by its name.
    packages = {"adaptive_span_code": "."}
    stubs = {name: mock.MagicMock() for name in ("persistent_memory", "adaptive_io")}
    with importable(folder, packages, stubs):
        sys.modules["adaptive_span"] = importlib.import_module("adaptive_span_code.adaptive_span")
        theirs = importlib.import_module("adaptive_span_code.models")
        del sys.modules["adaptive_span"]
    x, limit, heads = arrays["x"], settings["limit"], settings["heads"]
    width, spans = x.shape[2], arrays["core.share"] * limit

    def attend(first: int, last: int, size: int) -> torch.Tensor:
        span = {"adapt_span_enabled": True, "adapt_span_loss": 0, "adapt_span_ramp": settings["ramp"]}
        span |= {"adapt_span_init": 0, "adapt_span_cache": False}
        module = theirs.MultiHeadSeqAttention(
            width,
            heads,
            attn_span=size,
            dropout=0.0,
            adapt_span_params=span,
            pers_mem_params={"pers_mem_size": 0},
        ).eval()
        module.attn.adaptive_span._mask.current_val.data = (spans / size)[:, None, None]
        for name, ours in (("query", "query"), ("key", "key"), ("val", "value"), ("out", "output")):
            set_linear(getattr(module, f"proj_{name}"), *read_kernels(arrays, ours))
        seen = functional.pad(x[:, first - size + 1 : last], (0, 0, 0, 1))
        return module(x[:, first:last], seen, seen, torch.zeros(1, width // heads, size))

    # The first tokens have shorter contexts; all others see the limit.
    parts = [attend(position, position + 1, position + 1) for position in range(limit - 1)]
    return torch.cat([*parts, attend(limit - 1, x.shape[1], limit)], dim=1)


def lite_transformer(settings: Settings, arrays: Arrays, folder: str) -> torch.Tensor:
    """Runs `MultiBranch` of their attention and their convolution, causal, as in their config of WikiText-103."""
    packages = {"fairseq": "fairseq", "fairseq.modules": "fairseq/modules"}
    utils = types.SimpleNamespace(softmax=lambda x, dim, **_: x.softmax(dim))
    with importable(folder, packages, {"fairseq.utils": utils}):
        load = lambda name: importlib.import_module(f"fairseq.modules.{name}")
        attention = load("multihead_attention").MultiheadAttention
        sys.modules["fairseq.modules"].MultiheadAttention = attention  # type: ignore[attr-defined]
        branches = load("multibranch").MultiBranch
        convolution = load(settings["file"]).__dict__[settings["name"]]
        x = arrays["x"].transpose(0, 1)
        width, heads, taps = x.shape[2] // 2, settings["heads"], settings["taps"]
        # Build both branches, and copy our weights into them.
        long = attention(width, heads, self_attention=True)
        more = {"glu": True} if settings["glu"] else {}
        short = convolution(width, taps, taps - 1, heads, weight_softmax=True, with_linear=True, **more)
        for name, ours in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "output")):
            set_linear(getattr(long, name), *read_kernels(arrays, ours))
        if settings.get("gated"):  # ours, before theirs that has none
            short.linear1 = nn.Sequential(nn.Linear(width, 2 * width), nn.GLU())
        gate = ("short_gate",) if settings["glu"] or settings.get("gated") else ()
        set_linear(
            short.linear1[0] if settings.get("gated") else short.linear1, *read_kernels(arrays, "short_value", *gate)
        )
        set_linear(short.linear2, *read_kernels(arrays, "short_output"))
        if "taps.kernel" in arrays:
            set_linear(short.weight_linear, *read_kernels(arrays, "taps"))
        else:
            short.weight.data = arrays["taps"][:, None]
        later = torch.full((len(x), len(x)), -torch.inf).triu(1)
        return branches([long, short], [width, width]).eval()(x, x, x, attn_mask=later)[0].transpose(0, 1)


def mega(settings: Settings, arrays: Arrays, folder: str) -> torch.Tensor:
    """Runs `MovingAverageGatedAttention`, causal, in chunks, with the rotary bias."""
    utils = types.SimpleNamespace(
        get_activation_fn=lambda activation: getattr(functional, activation),
        softmax=lambda x, dim, onnx_trace: x.softmax(dim),
        relu2=lambda x: functional.relu(x).square(),
    )
    packages = {"fairseq": "fairseq", "fairseq.modules": "fairseq/modules"}
    with importable(folder, packages, {"fairseq.utils": utils}):
        theirs = importlib.import_module("fairseq.modules.moving_average_gated_attention")
    x, size = arrays["x"].transpose(0, 1), settings["chunk_size"]
    sums, shared = arrays["convolutions.out"].shape[2], arrays["shared.kernel"].shape[1]
    # Build their module, and copy our weights into it.
    module = theirs.MovingAverageGatedAttention(
        x.shape[2], shared, arrays["value.kernel"].shape[1], sums, rel_pos_bias="rotary", **settings
    ).eval()
    set_linear(module.v_proj, *read_kernels(arrays, "value"))
    set_linear(module.mx_proj, *read_kernels(arrays, "update", "shared", "gate", "candidate"))
    set_linear(module.h_proj, *read_kernels(arrays, "output"))
    module.norm.norm.weight.data, module.norm.norm.bias.data = arrays["norm.scale"], arrays["norm.bias"]
    module.gamma.data, module.beta.data = arrays["variants.scale"], arrays["variants.offset"]
    module.rel_pos_bias.alpha.data = arrays["core.bias.query"][None]
    module.rel_pos_bias.beta.data = arrays["core.bias.key"][None]
    for name, ours in (("delta", "damping"), ("alpha", "decay"), ("beta", "into")):
        getattr(module.move, name).data = arrays[f"convolutions.{ours}"][0][:, :, None]
    module.move.gamma.data, module.move.omega.data = arrays["convolutions.out"][0], arrays["convolutions.own"]
    later = torch.full((size, size), -torch.inf).triu(1)
    return module(x, attn_mask=later)[0].transpose(0, 1)


def mamba2(settings: Settings, arrays: Arrays, folder: str) -> torch.Tensor:
    """Runs `Mamba2Simple` with the authors' `ssd_minimal_discrete` for the scan and `rms_norm_ref` for the norm."""
    combined = types.SimpleNamespace(mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=None)
    stubs = {name: mock.MagicMock() for name in ("triton", "triton.language")}
    stubs |= {"mamba_ssm.ops.triton.ssd_combined": combined, "causal_conv1d": mock.MagicMock(causal_conv1d_fn=None)}
    names = ("mamba_ssm", "mamba_ssm.modules", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils")
    with importable(folder, {name: name.replace(".", "/") for name in names}, stubs):
        # Replace the fused scan by their reference.
        minimal = importlib.import_module("mamba_ssm.modules.ssd_minimal").ssd_minimal_discrete
        gated = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated")

        def scan(x, dt, a, b, c, chunk_size, D, **_):
            b, c = (y.expand(-1, -1, x.shape[2], -1) for y in (b, c))
            return minimal(x * dt[..., None], a * dt, b, c, chunk_size)[0] + x * D[:, None]

        combined.mamba_chunk_scan_combined = scan
        theirs = importlib.import_module("mamba_ssm.modules.mamba2_simple")
    x, states = arrays["x"], arrays["shared.kernel"].shape[1] // 2
    inner, heads = arrays["value.kernel"].shape[1], len(arrays["skip"])
    # Build their module, and copy our weights into it.
    module = theirs.Mamba2Simple(
        x.shape[2],
        d_state=states,
        headdim=inner // heads,
        expand=inner // x.shape[2],
        use_mem_eff_path=False,
        **settings,
    ).eval()
    set_linear(module.in_proj, *read_kernels(arrays, "gate", "value", "shared", "step_size"))
    set_linear(module.out_proj, *read_kernels(arrays, "output"))
    taps = torch.cat([arrays["convolutions.value"], arrays["convolutions.shared"]], dim=1)
    module.conv1d.weight.data = taps.T[:, None].contiguous()
    module.conv1d.bias.data = torch.cat([arrays["value_bias"], arrays["shared_bias"]])
    module.A_log.data, module.dt_bias.data, module.D.data = (arrays[x] for x in ("log_rate", "step_bias", "skip"))
    norm = lambda y, z: gated.rms_norm_ref(
        y, arrays["norm.scale"], None, z, eps=module.norm.eps, norm_before_gate=False
    )
    with mock.patch.object(module.norm, "forward", norm):
        return module(x)
