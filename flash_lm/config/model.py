"""The schema of `config.model`: the keys that every family shares."""

import dataclasses
import importlib
from typing import Any

from flash_lm.config.keys import SECTIONS, Group, above, at_least, fraction, key, one_of
from flash_lm.config.registry import FAMILIES, HEADS

DTYPES = ("float32", "bfloat16")
KERNELS = ("auto", "xla", "pallas")
KERNEL_GROUP = "flash_lm.kernels"  # entry points of packages that bring more
_MOST_TAPS = 64  # of a short convolution, each of which is a copy of the input


def _families(names: tuple) -> str | None:
    good = all(isinstance(name, str) and name in FAMILIES for name in names)
    return None if good else f"a tuple of names of families: {', '.join(FAMILIES)}"


def _taps(x: int) -> str | None:
    return None if x == 0 or 2 <= x <= _MOST_TAPS else f"0 (none), or 2 to {_MOST_TAPS} taps"


def _normalizer(x: str) -> str | None:
    good = x in ("count", "length", "length_everywhere") or (x.isdecimal() and int(x) > 0)
    return None if good else "count, length, length_everywhere or a positive integer"


def _kernels(x: str) -> str | None:
    if x in KERNELS:
        return None
    metadata: Any = importlib.import_module("importlib.metadata")  # only now: it is slow to import
    installed = sorted(metadata.entry_points(group=KERNEL_GROUP).names)
    return None if x in installed else f"one of {', '.join((*KERNELS, *installed))}, or install its package"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Group, name="model"):
    """The keys that every family shares. families/family.py fills in the open ones."""

    family: str = key("flash", "name of a family", FAMILIES.rule)
    pattern: tuple = key(
        (),
        "families of the layers, repeated in turn, such as flash,flash,transformer_plus_plus; everything else is as "
        "in model.family; empty: model.family alone",
        _families,
    )
    num_layers: int = key(
        4, "one layer = attention + feed-forward, or two GAUs; a multiple of the pattern's", at_least(1)
    )
    model_dim: int = key(128, "D", at_least(1))
    num_heads: int = key(4, "H; for GAUs see model.gau.heads", at_least(1))
    num_kv_heads: int = key(
        None,
        "heads of keys and values, each shared by H / num_kv_heads query heads (softmax over all pairs); open: H",
        at_least(1),
    )
    head_dim: int = key(
        None,
        "K, width of a head in multi-head attention, whose maps are from D to H K and back (in based, that of the "
        "values); open: D / H",
        at_least(1),
    )
    feed_forward: str = key(
        None,
        "feed-forward that closes a layer: mlp (gelu) or glu (SwiGLU); open: the family's own",
        one_of("mlp", "glu"),
    )
    output_gate: str = key(
        None,
        "factor of the heads' outputs: silu (of a linear map of x) or none, without its map; open: silu",
        one_of("silu", "none"),
    )
    head_norm: bool = key(None, "RMS norm of each head's output, with a gain; open: True")
    mlp_dim: int = key(None, "open: 4 D for an MLP, 8 D / 3 rounded up to a multiple of 8 for a GLU", at_least(1))
    max_length: int = key(512, "tokens; bounds learned positions and the decode cache", at_least(1))
    vocab_size: int = key(None, "open: from the tokenizer", at_least(2))
    causal: bool = key(None, "open: from the task")
    tie_embeddings: bool = key(True, "one table for input and output embeddings")
    head: str = key(
        None,
        "name of a head: softmax, logistics (a mixture over the values of a byte, for images), or classes (a label per "
        "sequence); open: from the task",
        HEADS.rule,
    )
    init: str = key(
        "normal", "normal (standard deviation 0.02), or lecun (1 / sqrt(fan in))", one_of("normal", "lecun")
    )
    scale_init: str = key(
        "normal",
        "initialisation of γ of a gated unit's queries and keys: normal (standard deviation 0.02), or as_init (1 with "
        "init=lecun, where queries and keys start equal)",
        one_of("normal", "as_init"),
    )
    residual_init: str = key(
        None,
        "initialisation of the output projection of each sublayer: as_init, or depth (by 1 / sqrt(2 num_layers), as in "
        "GPT-2); Mega's sublayers gate their residual and ignore it; open: as_init for a gated unit whose output "
        "is small at initialisation, else depth",
        one_of("as_init", "depth"),
    )
    biases: str = key(
        "none",
        "linear maps of the layers that have a bias, zero at the start: none, qkv (those to queries, keys and values "
        "of multi-head attention, as in Qwen2) or all (as in GPT-2 and BERT)",
        one_of("none", "qkv", "all"),
    )
    norm: str = key(None, "open: from the family", one_of("layer", "rms", "scale"))
    norm_epsilon: float = key(1e-6, "added under the square root of a norm", above(0))
    absolute_positions: str = key(
        None, "open: from the family", one_of("none", "learned", "sinusoid", "scaled_sinusoid")
    )
    query_key_norm: bool = key(
        False,
        "RMS norm of each head's queries and keys, with a gain, before rotary positions and feature maps",
    )
    rotary: bool = key(None, "rotary position embedding of queries and keys; open: from the family")
    rotary_base: float = key(10_000.0, "base of the rotary angles, position · base^(-2i / width)", above(1))
    short_convolution: int = key(
        None,
        "taps of a filter for each channel of the queries, keys and values (of a GAU: V and Z; of an AFT: keys and "
        "values), causal or centred as the model is; 0: none; open: 0, but 3 in log_sparse",
        _taps,
    )
    normalizer: str = key(
        None,
        "N of attention without softmax: count, length, length_everywhere (of sums over chunks, too) or an integer; "
        "open: data.length, but count where N divides the weights of a causal model",
        _normalizer,
    )
    divides: str = key(
        None,
        "what N divides: scores (relu²(q kᵀ / N + b), as in FLASH's appendix) or weights (relu²(q kᵀ / √K + b) / N); "
        "open: scores, but weights in flash_quad",
        one_of("scores", "weights"),
    )
    kernels: str = key(
        "auto",
        "auto (Pallas kernels on GPU and TPU, where the shapes suit them), xla, pallas, or the name of an installed "
        "package of kernels (docs/kernels.md)",
        _kernels,
    )
    dropout: float = key(0.0, "dropout rate of the embedding and of each sublayer's output", fraction)
    dtype: str = key(
        "float32",
        "dtype of activations; docs/numerics.md says what stays float32, and what accelerators round",
        one_of(*DTYPES),
    )
    state_dtype: str = key(
        None,
        "dtype of the keys and values that decoding keeps: caches, and chunks of FLASH, MC-TFM and Mega; and of the "
        "last inputs of convolutions; sums and AFT's state stay float32; open: model.dtype",
        one_of(*DTYPES),
    )
    param_dtype: str = key("float32", "dtype of parameters", one_of(*DTYPES))
    grad_dtype: str = key(
        None,
        "dtype in which devices add up their gradients of projections; those of the embedding, of gains, of offsets "
        "and of biases are float32; open: model.dtype",
        one_of(*DTYPES),
    )
    scan_layers: bool = key(
        None,
        "one compiled layer, scanned; false unrolls: slower to compile, but nothing is copied for the derivative; "
        "open: unrolled on a GPU up to 32 layers, else scanned",
        same=(True,),
    )
    remat: str = key(
        "none",
        "none, products (keep matrix products) or full (keep only each layer's input)",
        one_of("none", "products", "full"),
    )

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the layers, in turn."""
        return self.pattern or (self.family,)

    @property
    def head_width(self) -> int:
        """Width of a head in multi-head attention: model.head_dim, or else D / H."""
        return self.head_dim or self.model_dim // self.num_heads

    @property
    def label(self) -> str:
        """The model's name in tables and plots: the family, or the families of the pattern, and of an encoder."""
        layers = "/".join(self.families)
        return f"{self.encoder}-{layers}" if self.encoder else layers

    @property
    def encoder(self) -> str | None:
        """The family of the encoder; None: no encoder."""
        return next((x.family for x in self.sections if type(x) is SECTIONS.registered.get("model.encoder")), None)

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        count = len(self.families)
        if self.num_layers % count == 0:
            return []
        return [f"model.num_layers={self.num_layers} must be a multiple of the {count} layers of model.pattern"]
