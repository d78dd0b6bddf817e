"""A family: its sublayers, its defaults, and how they complete a config; each family's module has its rows."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from flash_lm.config.experiment import Config
from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import FAMILIES, HEADS
from flash_lm.errors import InputError
from flash_lm.families.encoder import CROSS, encoder_config, sublayer_specs
from flash_lm.families.sublayer_spec import EVERYTHING, Default, SublayerSpec
from flash_lm.layers.cross_attention import CrossOptions
from flash_lm.ops.logistics import VALUES


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: the sublayers of a layer, and defaults of open keys.

    Attributes:
        sublayers: those of a layer, in order.
        defaults: defaults of open keys, if they differ from those of the sublayers.
        about: one line on what a layer is, for tables of families.
        paper: authors, year and arXiv:NUMBER.
        mixer: which of the sublayers, from 0, mixes the tokens in a user's model (`build_mixer`).
    """

    sublayers: tuple[SublayerSpec, ...]
    defaults: Mapping[str, Default] = dataclasses.field(default_factory=dict)
    about: str = ""
    paper: str = ""
    mixer: int = 0

    @property
    def serves(self) -> frozenset[str]:
        """Forms that all of its sublayers support."""
        return EVERYTHING.intersection(*(spec.serves for spec in self.sublayers))

    def reads(self) -> set[str]:
        """Names of keys that its sublayers read and other families may not."""
        return set().union(*(spec.reads() for spec in self.sublayers))


def register_family(name: str, row: Family) -> None:
    """Registers a family, for `model.family`.

    >>> from flash_lm.extend import MLP_SPEC, Family, MultiHeadAttention, SublayerSpec, LinearCore, LinearOptions
    >>> squares = lambda x: x**2
    >>> core = lambda config, options: LinearCore(config, options, squares)
    >>> build = lambda config, options, *, rngs: MultiHeadAttention(config, core(config, options), rngs=rngs)
    >>> register_family("squared", Family((SublayerSpec(build, (LinearOptions,)), MLP_SPEC)))
    >>> "squared" in FAMILIES
    True
    """
    FAMILIES.register(name, row)


def common_forms(families: Iterable[str]) -> frozenset[str]:
    """Forms that all of these families support, see `SublayerSpec`; a model with a pattern has several."""
    return EVERYTHING.intersection(*(FAMILIES[name].serves for name in families))


def families_with_form(causal: bool) -> list[str]:
    """Families that have a causal form, or a bidirectional one."""
    return [name for name, row in FAMILIES.items() if _form(causal) in row.serves]


def _form(causal: bool | None) -> str:
    return "causal" if causal else "bidirectional"


# Defaults that all layers share, from model.family.
_MODEL_DEFAULTS: Mapping[str, Default] = {
    "causal": lambda config: "causal" in common_forms(config.families),
    "norm": "layer",
    "head": "softmax",
    "absolute_positions": "none",
}
_LAYER_DEFAULTS: Mapping[str, Default] = {
    "rotary": False,
    "short_convolution": 0,
    "state_dtype": lambda config: config.dtype,
    "divides": "scores",
    "residual_init": "depth",
    "normalizer": lambda config: "count" if config.causal and config.divides == "weights" else str(config.max_length),
}


def complete(config: ModelConfig) -> ModelConfig:
    """Fills in the open keys with the family's defaults.

    Args:
        config: a validated config that may have open keys.

    Returns:
        The config without open keys that its family reads. With a pattern or an encoder: without open keys that all
        layers read; the others may differ by layer, see `layer_configs`.

    Raises:
        InputError: unknown family, no vocabulary size, or widths that do not go together.
    """
    family = FAMILIES[config.family]
    if config.vocab_size is None:
        raise InputError("model.vocab_size is open: set it, or train with a tokenizer, which defines it")
    if config.encoder is not None:
        config = _fill_encoder_defaults(config)
    # Keys that all layers share come first: the defaults of a layer may depend on them.
    model_defaults = {key: family.defaults.get(key, default) for key, default in _MODEL_DEFAULTS.items()}
    config = _fill_defaults(config, model_defaults)
    # Then each layer by the defaults of its family; with an encoder also the layers of the encoder.
    layers = layer_configs(config)
    if config.encoder is not None:
        layers += layer_configs(encoder_config(config))
    problems = _unread_problems(config) + [
        problem
        for layer in dict.fromkeys(layers)
        for spec in dict.fromkeys(sublayer_specs(layer))
        for problem in spec.problems(layer)
    ]
    # All problems are reported at once, each of them once.
    if problems := [*dict.fromkeys(problems), *_problems(config)]:
        raise InputError.of(problems)
    return config if config.pattern or config.encoder else layers[0]


def _fill_encoder_defaults(config: ModelConfig) -> ModelConfig:
    """The config with the encoder's keys closed, before those of the model take the defaults of the model's family."""
    # The encoder as a bidirectional model of its family, for that family's defaults.
    alone = dataclasses.replace(config, family=config.encoder, pattern=(), causal=False)
    defaults = FAMILIES[alone.family].defaults
    for name in ("norm", "absolute_positions"):
        value = alone.get(name) or _fill_defaults(alone, {name: defaults.get(name, _MODEL_DEFAULTS[name])}).get(name)
        config = _fill_defaults(config, {f"encoder.{name}": value})
    return config


def layer_configs(config: ModelConfig) -> list[ModelConfig]:
    """The config of each layer of a pattern; its open keys are filled in by the layer's family."""
    return [_layer_config(config, name) for name in config.families]


def _layer_config(config: ModelConfig, name: str) -> ModelConfig:
    row = FAMILIES[name]
    layer_config = dataclasses.replace(config, family=name, pattern=())
    sublayer_defaults = {
        key: default for spec in sublayer_specs(layer_config) for key, default in spec.defaults.items()
    }
    return _fill_defaults(layer_config, {**_LAYER_DEFAULTS, **sublayer_defaults, **row.defaults})


def _fill_defaults(config: ModelConfig, defaults: Mapping[str, Default]) -> ModelConfig:
    for key, default in defaults.items():
        if config.get(key) is None:
            config = config.put(key, default(config) if callable(default) else default)
    return config


def unused_keys(families: Collection[str], cross: str | None = None) -> set[str]:
    """Keys, such as model.gau.heads, that other models read but these families do not; empty if one is unknown.

    Args:
        families: of the layers, and of an encoder.
        cross: the kind of cross attention; None: no cross attention.
    """
    # Unknown families are reported elsewhere.
    kinds = () if cross is None else (cross,)
    if not (FAMILIES.keys() >= set(families) and CROSS.keys() >= set(kinds)):
        return set()
    # Everything that any model reads, without what these families read.
    reads = lambda names, kinds: set().union(
        *(FAMILIES[name].reads() for name in names), *(CROSS[kind].reads() for kind in kinds)
    )
    return reads(FAMILIES, CROSS) - reads(families, kinds)


# Keys of a model's shape. Where no layer reads one, a model would silently be another than the one that was asked for.
_SHAPE_KEYS = ("head_dim", "feed_forward", "output_gate", "head_norm")


def _unread_problems(config: ModelConfig) -> list[str]:
    """Sentences on keys of the model's shape that are set, and that none of its layers reads."""
    encoder = [config.encoder] if config.encoder else []
    unread = unused_keys([*config.families, *encoder], config[CrossOptions].kind if encoder else None)
    problems = [
        f"model.{key}={config.get(key)} has no meaning in {config.label}, whose layers do not read it: leave it open"
        for key in _SHAPE_KEYS
        if config.get(key) is not None and f"model.{key}" in unread
    ]
    # Whatever has maps to queries, keys and values of heads can normalise them.
    if config.biases == "qkv" and "model.query_key_norm" in unread:
        problems.append(f"model.biases=qkv has no meaning in {config.label}, without multi-head attention: set all")
    return problems


def complete_config(config: Config) -> Config:
    """An experiment's config with the model's open keys filled in, without loading the corpus.

    An open vocabulary gets the size of the tokenizer to be trained. Raises as `complete` does.
    """
    vocab_size = config.model.vocab_size or config.data.vocab_size
    return dataclasses.replace(config, model=complete(dataclasses.replace(config.model, vocab_size=vocab_size)))


def _problems(config: ModelConfig) -> list[str]:
    """Sentences on combinations that no family supports."""
    needed = _form(config.causal)
    if config.encoder is not None:
        if "bidirectional" not in FAMILIES[config.encoder].serves:
            return [f"model.encoder.family={config.encoder} has no bidirectional form: use another family"]
        if not config.causal:
            return ["a model with an encoder is causal: leave model.causal open, with --config.task=seq2seq"]
    # The advice names the key that selects a supported form.
    task = "causal_lm" if needed == "bidirectional" else "masked_lm"
    either = HEADS[config.head].pool is not None  # labels are predicted by causal models, too
    advice = "--config.model.causal=true" if either else f"--config.task={task}"
    problems = [
        f"model.family={name} has no {needed} form: use {advice}, or another family"
        for name in dict.fromkeys(config.families)
        if needed not in FAMILIES[name].serves
    ]
    if "sinusoid" in config.absolute_positions and config.model_dim % 2:
        problems.append(f"sinusoids need an even width: model.model_dim={config.model_dim} must be even")
    if HEADS[config.head].of_values and config.vocab_size < VALUES:
        problems.append(f"model.head={config.head} needs {VALUES} words, but model.vocab_size={config.vocab_size}")
    return problems
