"""A .pth file of RWKV-4's author, which has no config.json: names and settings as in Hugging Face's format."""

import contextlib
import pathlib
import re
from collections.abc import Iterator

from flash_lm.errors import InputError
from flash_lm.inference.sources.folder import folder_tokenizer
from flash_lm.inference.sources.pickled import open_pickled
from flash_lm.inference.sources.source import Source
from flash_lm.models.formats.format import Arrays

_TOKENIZERS = ("20B_tokenizer.json", "tokenizer.json")
_LENGTH = 1024  # tokens of the first rows of the author's training; the state has no limit
# Parts of names, in the order in which they are replaced.
_NAMES = {
    r"^emb\.": "rwkv.embeddings.",
    r"^head\.": "head.",
    r"^(blocks|ln_out)\.": r"rwkv.\1.",
    r"\.ln0\.": ".pre_ln.",
    r"\.att\.": ".attention.",
    r"\.ffn\.": ".feed_forward.",
    r"\.time_mix_k$": ".time_mix_key",
    r"\.time_mix_v$": ".time_mix_value",
    r"\.time_mix_r$": ".time_mix_receptance",
}


@contextlib.contextmanager
def open_rwkv(path: pathlib.Path) -> Iterator[Source]:
    """Opens a file; its tokenizer is beside it.

    Raises:
        InputError: it is damaged, of another version of RWKV, or there is no tokenizer.
    """
    with open_pickled(path) as (arrays, dtype):
        later = [name for name in arrays if name.endswith(("time_faaaa", "ln_x.weight", "time_maa_x", ".x_r"))]
        if later or "emb.weight" not in arrays:
            has = f"has {later[0]}, of a later version of RWKV" if later else "has no emb.weight"
            raise InputError(f"{path} {has}: only RWKV-4 can be read from .pth")
        settings = _settings(arrays)
        renamed = {_their_name(name): read for name, read in arrays.items()}
        beside = [path.parent / name for name in _TOKENIZERS]
        tokenizer = next((file for file in beside if file.is_file()), beside[0])
        yield Source("PyTorch's pickle", settings, renamed, dtype, lambda rows: folder_tokenizer(tokenizer, rows))


def _settings(arrays: Arrays) -> dict[str, object]:
    """The config.json of the same model, from shapes."""
    vocab, dim = arrays["emb.weight"]().shape
    layers = 1 + max((int(x.split(".")[1]) for x in arrays if x.startswith("blocks.")), default=0)
    up = arrays.get("blocks.0.ffn.key.weight")
    return {
        "model_type": "rwkv",
        "vocab_size": vocab,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "intermediate_size": 4 * dim if up is None else up().shape[0],
        "context_length": _LENGTH,
    }


def _their_name(name: str) -> str:
    for part, theirs in _NAMES.items():
        name = re.sub(part, theirs, name)
    return name
