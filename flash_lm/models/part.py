"""A part of a layer: how it is built, and which keys it reads; models/parts.py has the parts of the families."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Builds a sublayer, and declares which keys it reads.

    Attributes:
        build: called with the config that all families share, each section, and rngs.
        sections: its sections of keys.
        keys: keys of config.model itself that only some parts read.
        unread: keys of its sections that this part does not read, such as aft.window.
        defaults: defaults of open keys, by name, such as gau.expanded_dim.
        problems: sentences on why this part cannot be built from a complete config.
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
        """Names of keys that this part reads and others may not, such as model.gau.heads."""
        own = set().union(*(keys.names_of(kind) for kind in self.sections))
        return {f"model.{key}" for key in self.keys} | own - {f"model.{key}" for key in self.unread}
