"""SublayerSpec: how a sublayer is built from a config and which keys it reads; helpers for the specs of families."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from flash_lm.config import keys
from flash_lm.config.model import ModelConfig
from flash_lm.layers.sublayer import Sublayer

# The value of an open key, or a function of the config that returns it.
Default = Any | Callable[[ModelConfig], Any]


USUAL = frozenset({"causal", "bidirectional", "packed"})
EVERYTHING = USUAL | {"prefix"}
WHOLE_ROWS = frozenset({"bidirectional"})

# Keys of config.model itself that sublayers of several families read.
HEAD_KEYS = frozenset({"num_heads", "rotary", "rotary_base"})
MULTI_HEAD_KEYS = HEAD_KEYS | {"head_dim", "query_key_norm"}
# Of sums without a denominator, in whose place the heads are normalised, and gated; with the usual values.
NORMED_HEAD_KEYS = frozenset({"output_gate", "head_norm"})
NORMED_HEADS: Mapping[str, Default] = {"output_gate": "silu", "head_norm": True}
GATED_UNIT_KEYS = frozenset({"rotary", "rotary_base", "normalizer", "divides", "scale_init", "kernels"})


@dataclasses.dataclass(frozen=True, eq=False)
class SublayerSpec:
    """Builds a sublayer, and declares which keys it reads.

    Attributes:
        build: called with the config that all families share, each section, and rngs.
        sections: sections of keys that it reads.
        keys: keys of config.model itself that only some sublayers read.
        unread: keys of these sections that this sublayer does not read, such as aft.window.
        defaults: defaults of open keys, by name, such as gau.expanded_dim.
        problems: sentences on why this sublayer cannot be built from a complete config.
        serves: what it supports: "causal", "bidirectional", "packed" (rows of several documents that do not see each
            other), "prefix" (a causal model whose tokens see the start of their document both ways).
    """

    build: Callable[..., Sublayer]
    sections: tuple[type, ...] = ()
    keys: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    defaults: Mapping[str, Default] = dataclasses.field(default_factory=dict)
    problems: Callable[[ModelConfig], list[str]] = lambda config: []
    serves: frozenset[str] = USUAL

    def __call__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
        """The sublayer of a complete config."""
        return self.build(config.shared, *(config[kind] for kind in self.sections), rngs=rngs)

    def reads(self) -> set[str]:
        """Names of keys that this sublayer reads and others may not, such as model.gau.heads."""
        section_keys = set().union(*(keys.key_names(kind) for kind in self.sections))
        return {f"model.{key}" for key in self.keys} | section_keys - {f"model.{key}" for key in self.unread}


def times(numerator: int, denominator: int = 1) -> Callable[[ModelConfig], int]:
    """A multiple of D; a fraction is rounded up to a multiple of 8."""
    if denominator == 1:
        return lambda config: numerator * config.model_dim
    return lambda config: -(-numerator * config.model_dim // denominator // 8) * 8


def fraction_per_head(numerator: int, denominator: int) -> Callable[[ModelConfig], int]:
    """A fraction of D for all heads together, the width of a head rounded up."""
    return lambda config: config.num_heads * -(-numerator * config.model_dim // (denominator * config.num_heads))


def width_problems(config: ModelConfig) -> list[str]:
    """Why heads cannot share the width of the model."""
    dim, heads = config.model_dim, config.num_heads
    return [f"model.model_dim={dim} must be a multiple of model.num_heads={heads}"] if dim % heads else []


def head_width_problems(config: ModelConfig) -> list[str]:
    """Why heads have no width: model.head_dim is open, and they cannot share the width of the model."""
    return width_problems(config) if config.head_dim is None else []


def head_problems(config: ModelConfig) -> list[str]:
    """Why the heads of multi-head attention have no width, or no rotary positions."""
    if problems := head_width_problems(config):
        return problems
    if config.rotary and config.head_width % 2:
        width = f"{config.model_dim} / {config.num_heads}" if config.head_dim is None else f"{config.head_dim}"
        return [f"model.rotary pairs dimensions: the head width {width} must be even"]
    return []


def grouped_head_problems(config: ModelConfig) -> list[str]:
    """`head_problems`, and why heads of queries cannot share those of keys evenly."""
    problems, heads, key_heads = head_problems(config), config.num_heads, config.num_kv_heads
    if heads % key_heads:
        problems.append(f"model.num_heads={heads} must be a multiple of model.num_kv_heads={key_heads}")
    return problems


def uneven_head_problems(widths: Mapping[str, int], config: ModelConfig) -> list[str]:
    """Which widths of all heads together, by their keys, are no multiple of the number of heads."""
    heads = config.num_heads
    return [
        f"{name}={width} must be a multiple of model.num_heads={heads}"
        for name, width in widths.items()
        if width % heads
    ]


def one_way_problems(config: ModelConfig) -> list[str]:
    """Why heads cannot go in pairs, of which one reads backward (see `layers.decayed_core.from_either_end`)."""
    if config.num_heads % 2 == 0 or config.causal:
        return []
    return [
        f"model.num_heads={config.num_heads} must be even: in a bidirectional model every second head reads backward"
    ]


def divisor_problems(config: ModelConfig, function: str) -> list[str]:
    """Why N cannot divide scores: a count differs from query to query, and scores are divided by one number."""
    if function == "softmax" or (config.normalizer, config.divides) != ("count", "scores"):
        return []
    return ["model.normalizer=count cannot divide scores: set model.divides=weights, or give N as an integer"]
