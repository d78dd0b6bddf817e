"""Worker of `benchmarks/peers/check.py`: runs other implementations in the peers' environment.

check_worker.py FOLDER reads FOLDER/questions.json, a list of {"part", "settings"}; for an authors' repository also
"folder", its checkout, and "version". Weights and input of question n are in FOLDER/n.npz. Its output is written to
FOLDER/n.npy, its version and error to FOLDER/answers.json.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
from typing import Any
from unittest import mock

import check_authors as authors
import numpy as np
import torch
from check_cores import CORES
from torch import nn

Settings = dict[str, Any]
Arrays = dict[str, torch.Tensor]


def set_dense(linear: nn.Linear, kernel: torch.Tensor) -> None:
    """Sets y = x W; our maps have no bias."""
    linear.weight.data = kernel.T.contiguous()
    if linear.bias is not None:
        linear.bias.data.zero_()


def copy_maps(module: nn.Module, arrays: Arrays, **names: str) -> None:
    """Copies our kernels into their maps; keywords are their name = our name."""
    for theirs, ours in names.items():
        set_dense(getattr(module, theirs), arrays[f"{ours}.kernel"])


def longformer(settings: Settings, arrays: Arrays, folder: str | None) -> torch.Tensor:
    """Runs Longformer with our output projection; `global_tokens` in the settings are the first of each sequence."""
    from transformers.models.longformer.modeling_longformer import (  # noqa: PLC0415
        LongformerConfig,
        LongformerSelfAttention,
    )

    settings = dict(settings)
    first = settings.pop("global_tokens", 0)
    x, real = arrays["x"], arrays["real"]
    config = LongformerConfig(hidden_size=x.shape[2], num_hidden_layers=1, **settings)
    module = LongformerSelfAttention(config, 0).eval()
    maps = ("query", "key", "value")
    copy_maps(module, arrays, **{name: name for name in maps})
    if first:
        copy_maps(module, arrays, **{f"{name}_global": f"global_{name}" for name in maps})
    mask = torch.zeros(x.shape[:2])
    # Theirs marks global tokens by positive and padding by negative numbers.
    mask[:, :first] = 10000
    mask[~real] = -10000
    out = module(
        x,
        attention_mask=mask,
        is_index_masked=mask < 0,
        is_index_global_attn=mask > 0,
        is_global_attn=first > 0,
    )[0]
    return out @ arrays["output.kernel"]


def nystromformer(settings: Settings, arrays: Arrays, folder: str | None) -> torch.Tensor:
    """Runs Nyströmformer with our output projection; `init_option` in the settings is set on the module."""
    from transformers.models.nystromformer.modeling_nystromformer import (  # noqa: PLC0415
        NystromformerConfig,
        NystromformerSelfAttention,
    )

    settings = dict(settings)
    option = settings.pop("init_option", None)
    x, real = arrays["x"], arrays["real"]
    module = NystromformerSelfAttention(
        NystromformerConfig(hidden_size=x.shape[2], segment_means_seq_len=x.shape[1], **settings)
    ).eval()
    copy_maps(module, arrays, query="query", key="key", value="value")
    if settings["conv_kernel_size"]:
        module.conv.weight.data = arrays["core.taps"].T[:, None, :, None].contiguous()
    if option:
        module.init_option = option
    mask = torch.zeros(x.shape[0], 1, 1, x.shape[1]).masked_fill(~real[:, None, None], torch.finfo(x.dtype).min)
    return module(x, mask)[0] @ arrays["output.kernel"]


def reformer(settings: Settings, arrays: Arrays, folder: str | None) -> torch.Tensor:
    """Runs Reformer with our output projection, and with our rotations unless `drawn` is in the settings."""
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention, ReformerConfig  # noqa: PLC0415

    settings = dict(settings)
    drawn = settings.pop("drawn", False)
    x, heads = arrays["x"], settings["num_attention_heads"]
    config = ReformerConfig(hidden_size=x.shape[2], attention_head_size=x.shape[2] // heads, **settings)
    module = LSHSelfAttention(config).eval()
    copy_maps(module, arrays, query_key="query", value="value")
    ours = arrays["core.rotations"].permute(1, 0, 2).expand(heads, -1, -1, -1)

    def rotations(shape: tuple[int, ...], **_: Any) -> torch.Tensor:
        assert tuple(shape) == tuple(ours.shape), f"rotations of {tuple(shape)}, not {tuple(ours.shape)}"
        return ours

    with contextlib.nullcontext() if drawn else mock.patch("torch.randn", rotations):
        return module(x).hidden_states @ arrays["output.kernel"]


def linformer(settings: Settings, arrays: Arrays, folder: str | None) -> torch.Tensor:
    """Runs Linformer, which has no mask."""
    from linformer.linformer import LinformerSelfAttention  # noqa: PLC0415

    module = LinformerSelfAttention(arrays["x"].shape[2], **settings).eval()
    copy_maps(module, arrays, to_q="query", to_k="key", to_out="output")
    module.proj_k.data = arrays["core.key_slots"]
    if not settings.get("share_kv"):
        copy_maps(module, arrays, to_v="value")
        module.proj_v.data = arrays.get("core.value_slots", arrays["core.key_slots"])
    return module(arrays["x"])


def rwkv(settings: Settings, arrays: Arrays, folder: str | None) -> torch.Tensor:
    """Runs RWKV's time mixing, in its form for a CPU."""
    from transformers.models.rwkv.modeling_rwkv import RwkvConfig, RwkvSelfAttention  # noqa: PLC0415

    module = RwkvSelfAttention(RwkvConfig(hidden_size=arrays["x"].shape[2], num_hidden_layers=1, **settings)).eval()
    copy_maps(module, arrays, **{name: name for name in ("receptance", "key", "value", "output")})
    module.time_decay.data, module.time_first.data = arrays["core.log_rate"], arrays["core.bonus"]
    for name in ("receptance", "key", "value"):
        getattr(module, f"time_mix_{name}").data = arrays[f"convolutions.{name}"][None, None]
    return module(arrays["x"])[0]


def load_source(folder: str | None, file: str) -> Any:
    """Loads a file of the authors' repository as a module."""
    assert folder
    spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, pathlib.Path(folder, file))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cosformer(settings: Settings, arrays: Arrays, folder: str | None) -> torch.Tensor:
    """Runs cosFormer without a mask, which it ignores."""
    x = arrays["x"]
    module = load_source(folder, "cosformer.py").CosformerAttention(x.shape[2], **settings).eval()
    copy_maps(module, arrays, q_proj="query", k_proj="key", v_proj="value", out_proj="output")
    return module(x.transpose(0, 1)).transpose(0, 1)


def flowformer(settings: Settings, arrays: Arrays, folder: str | None) -> torch.Tensor:
    """Runs Flowformer: class `name` of file `file`."""
    dim, settings = arrays["x"].shape[2], dict(settings)
    build = getattr(load_source(folder, settings.pop("file")), settings.pop("name"))
    module = build(*[dim] * settings.pop("widths"), **settings).eval()
    projections = {f"{name}_projection": name for name in ("query", "key", "value")}
    copy_maps(module, arrays, **projections, out_projection="output")
    return module(*[arrays["x"]] * 3)


def reference_core(settings: Settings, arrays: Arrays, folder: str | None) -> torch.Tensor:
    """Runs core `core` of flash-linear-attention's reference files; the other settings are its arguments."""
    settings = dict(settings)
    return CORES[settings.pop("core")](arrays, lambda file: load_source(folder, file), **settings)


# part -> (Python distribution, None for a repository; function that runs it)
PARTS = {
    "LongformerSelfAttention": ("transformers", longformer),
    "NystromformerSelfAttention": ("transformers", nystromformer),
    "LSHSelfAttention": ("transformers", reformer),
    "RwkvSelfAttention": ("transformers", rwkv),
    "LinformerSelfAttention": ("linformer", linformer),
    "CosformerAttention": (None, cosformer),
    "Flow_Attention": (None, flowformer),
    "reference": (None, reference_core),
    "RelPartialLearnableMultiHeadAttn": (None, authors.transformer_xl),
    "MultiHeadSeqAttention": (None, authors.adaptive_span),
    "MultiBranch": (None, authors.lite_transformer),
    "MovingAverageGatedAttention": (None, authors.mega),
    "Mamba2Simple": (None, authors.mamba2),
}


def answer(question: Settings, path: pathlib.Path) -> Settings:
    """Answers a question with the version and, if it failed, the error; `path` has no suffix."""
    distribution, part = PARTS[question["part"]]
    about: Settings = {"version": question.get("version")}
    if distribution:
        try:
            about["version"] = f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            return {"missing": distribution}
    with np.load(path.with_suffix(".npz")) as file:
        arrays = {name: torch.tensor(file[name]) for name in file.files}
    try:
        with torch.no_grad():
            np.save(path.with_suffix(".npy"), part(question["settings"], arrays, question.get("folder")).numpy())
    except Exception as error:
        message = (str(error).strip() or "no message").splitlines()[0]
        about["error"] = f"{type(error).__name__}: {message}"
    return about


def main(folder: pathlib.Path) -> None:
    """Answers all questions in a folder, on the CPU."""
    torch.manual_seed(0)
    questions = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    answers = [answer(question, folder / str(n)) for n, question in enumerate(questions)]
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
