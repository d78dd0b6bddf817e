"""What a row of the table of families is, and how it completes a config; models/families.py has the rows."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
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


EVERYTHING = frozenset({"causal", "bidirectional", "packed"})


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
        serves: what it can do: "causal", "bidirectional", "packed" (rows of several documents that do not see each
            other).
    """

    build: Callable[..., Sublayer]
    sections: tuple[type, ...] = ()
    keys: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    defaults: Mapping[str, Default] = dataclasses.field(default_factory=dict)
    problems: Callable[[ModelConfig], list[str]] = lambda config: []
    serves: frozenset[str] = EVERYTHING

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
        sublayers: of a layer.
        defaults: of open keys, where they are not what the parts say.
        about: what one layer is, in a line, for tables of families.
        paper: authors, year, and arXiv:NUMBER.
    """

    sublayers: tuple[Part, ...]
    defaults: Mapping[str, Default] = dataclasses.field(default_factory=dict)
    about: str = ""
    paper: str = ""

    @property
    def serves(self) -> frozenset[str]:
        """What all its parts can do."""
        return EVERYTHING.intersection(*(part.serves for part in self.sublayers))

    def reads(self) -> set[str]:
        """Names of the keys that its parts read and other families may not."""
        return set().union(*(part.reads() for part in self.sublayers))


def register_family(name: str, row: Family) -> None:
    """Adds a row to the table of families, for `model.family`."""
    FAMILIES.register(name, row)


# What all layers share, of model.family.
_OF_THE_MODEL: Mapping[str, Default] = {
    "causal": True,
    "norm": "layer",
    "head": "softmax",
    "absolute_positions": "none",
}
_OF_A_LAYER: Mapping[str, Default] = {
    "rotary": False,
    "state_dtype": lambda config: config.dtype,
    "normalizer": lambda config: "count" if config.causal else str(config.max_length),
}


def complete(config: ModelConfig) -> ModelConfig:
    """Fills in the open keys with the family's defaults.

    Args:
        config: validated, with open keys.

    Returns:
        The config with nothing left open that its family reads; with a pattern, that the whole model reads, since the
        rest may be another in each layer: see `of_layers`.

    Raises:
        InputError: unknown family, a vocabulary that nobody has given, or widths that do not go together.
    """
    family = FAMILIES[config.family]
    if config.vocab_size is None:
        raise InputError("model.vocab_size is open: set it, or let the tokenizer of a training run give it")
    of_model = {key: family.defaults.get(key, default) for key, default in _OF_THE_MODEL.items()}
    config = _closed(config, of_model)
    layers = of_layers(config)
    problems = [
        problem
        for layer in dict.fromkeys(layers)
        for part in dict.fromkeys(FAMILIES[layer.family].sublayers)
        for problem in part.problems(layer)
    ]
    if problems := [*dict.fromkeys(problems), *_problems(config)]:
        raise InputError.of(problems)
    return config if config.pattern else layers[0]


def of_layers(config: ModelConfig) -> list[ModelConfig]:
    """Of each layer of a pattern in turn, its config: what is open there is filled in by the layer's own family."""
    return [_of_layer(config, name) for name in config.families]


def _of_layer(config: ModelConfig, name: str) -> ModelConfig:
    row = FAMILIES[name]
    of_parts = {key: default for part in row.sublayers for key, default in part.defaults.items()}
    own = dataclasses.replace(config, family=name, pattern=())
    return _closed(own, {**_OF_A_LAYER, **of_parts, **row.defaults})


def _closed(config: ModelConfig, defaults: Mapping[str, Default]) -> ModelConfig:
    for key, default in defaults.items():
        if config.get(key) is None:
            config = config.put(key, default(config) if callable(default) else default)
    return config


def unread(families: Collection[str]) -> set[str]:
    """Keys, such as model.gau.heads, that other families read, and none of these does; none if one is unknown."""
    if not FAMILIES.keys() >= set(families):
        return set()
    reads = lambda names: set().union(*(FAMILIES[name].reads() for name in names))
    return reads(FAMILIES) - reads(families)


def complete_config(config: Config) -> Config:
    """A whole experiment with the model's open keys filled in, where there is no corpus.

    An open vocabulary is that of the tokenizer to train. Raises as `complete` does.
    """
    vocab_size = config.model.vocab_size or config.data.vocab_size
    return dataclasses.replace(config, model=complete(dataclasses.replace(config.model, vocab_size=vocab_size)))


def _problems(config: ModelConfig) -> list[str]:
    """Sentences on what no family can build."""
    needed = "causal" if config.causal else "bidirectional"
    task = "causal_lm" if needed == "bidirectional" else "masked_lm"
    found = [
        f"model.family={name} has no {needed} form: take --config.task={task}, or another family"
        for name in dict.fromkeys(config.families)
        if needed not in FAMILIES[name].serves
    ]
    if "sinusoid" in config.absolute_positions and config.model_dim % 2:
        found.append(f"sinusoids come in pairs: model.model_dim={config.model_dim} must be even")
    if HEADS[config.head].of_values and config.vocab_size < VALUES:
        found.append(f"model.head={config.head} is over {VALUES} values, and model.vocab_size={config.vocab_size}")
    return found
