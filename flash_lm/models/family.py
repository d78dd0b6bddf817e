"""What a row of the table of families is, and how it completes a config; models/families.py has the rows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from flash_lm import schema
from flash_lm.config import Config, ModelConfig
from flash_lm.errors import InputError
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.logistics import VALUES
from flash_lm.tables import FAMILIES, HEADS

# An open key's value, or what gives it from the config.
Default = Any | Callable[[ModelConfig], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Builds a sublayer, and says what it reads.

    Attributes:
        build: called with what all families share, each of the sections, and rngs.
        sections: of keys.
        keys: of config.model itself, which not every part reads.
        unread: keys of the sections that this part leaves alone, such as aft.window.
        defaults: of open keys, by name, such as gau.expanded_dim.
        problems: sentences on a completed config that this part cannot be built from.
    """

    build: Callable[..., Sublayer]
    sections: tuple[type, ...] = ()
    keys: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    defaults: Mapping[str, Default] = dataclasses.field(default_factory=dict)
    problems: Callable[[ModelConfig], list[str]] = lambda config: []

    def __call__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> Sublayer:
        """The sublayer of a completed config."""
        return self.build(config.shared, *(config[kind] for kind in self.sections), rngs=rngs)

    def reads(self) -> set[str]:
        """Names of the keys that this part reads and others may not, such as model.gau.heads."""
        own = set().union(*(schema.names_of(kind) for kind in self.sections))
        return {f"model.{key}" for key in self.keys} | own - {f"model.{key}" for key in self.unread}


@dataclasses.dataclass(frozen=True)
class Family:
    """One row.

    Attributes:
        pattern: the sublayers of a layer.
        defaults: of open keys, where they are not what the parts say.
    """

    pattern: tuple[Part, ...]
    defaults: Mapping[str, Default] = dataclasses.field(default_factory=dict)

    def reads(self) -> set[str]:
        """Names of the keys that its parts read and other families may not."""
        return set().union(*(part.reads() for part in self.pattern))


def register_family(name: str, row: Family) -> None:
    """Adds a row to the table of families, for `model.family`."""
    FAMILIES.register(name, row)


_COMMON: Mapping[str, Default] = {
    "causal": True,
    "rotary": False,
    "norm": "layer",
    "head": "softmax",
    "absolute_positions": "none",
    "normalizer": lambda config: "count" if config.causal else str(config.max_length),
}


def complete(config: ModelConfig) -> ModelConfig:
    """Fills in the open keys with the family's defaults.

    Args:
        config: validated, with open keys.

    Returns:
        The config with nothing left open that its family reads.

    Raises:
        InputError: unknown family, a vocabulary that nobody has given, or widths that do not go together.
    """
    family = FAMILIES[config.family]
    if config.vocab_size is None:
        raise InputError("model.vocab_size is open: set it, or let the tokenizer of a training run give it")
    of_parts = {key: default for part in family.pattern for key, default in part.defaults.items()}
    for key, default in {**_COMMON, **of_parts, **family.defaults}.items():
        if config.get(key) is None:
            config = config.put(key, default(config) if callable(default) else default)
    problems = [problem for part in dict.fromkeys(family.pattern) for problem in part.problems(config)]
    if problems := problems + _problems(config):
        raise InputError.of(problems)
    return config


def unread(family: str) -> set[str]:
    """Keys, such as model.gau.heads, that other families read, and this one does not."""
    return set().union(*(row.reads() for row in FAMILIES.values())) - FAMILIES[family].reads()


def complete_config(config: Config) -> Config:
    """A whole experiment with the model's open keys filled in, for want of a corpus.

    An open vocabulary is that of the tokenizer to train. Raises as `complete` does.
    """
    vocab_size = config.model.vocab_size or config.data.vocab_size
    return dataclasses.replace(config, model=complete(dataclasses.replace(config.model, vocab_size=vocab_size)))


def _problems(config: ModelConfig) -> list[str]:
    """Sentences on what no family can build."""
    found = []
    if "sinusoid" in config.absolute_positions and config.model_dim % 2:
        found.append(f"sinusoids come in pairs: model.model_dim={config.model_dim} must be even")
    if HEADS[config.head].of_values and config.vocab_size < VALUES:
        found.append(f"model.head={config.head} is over {VALUES} values, and model.vocab_size={config.vocab_size}")
    return found
