"""Rows that a user's module adds: one per table, each with its key."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flash_lm.extend import (
    MLP_SPEC,
    Conditioning,
    CorpusKind,
    Family,
    HeadKind,
    LinearCore,
    LinearOptions,
    MultiHeadAttention,
    Optimizer,
    Piece,
    SublayerSpec,
    Task,
    above,
    key,
    register_corpus,
    register_family,
    register_head,
    register_optimizer,
    register_task,
    section,
    weighted_sum,
)


@section("model.powers")
class PowerOptions:
    power: int = key(2, "of the features", above(0))


@section("train.signs")
class SignOptions:
    share: float = key(0.5, "of the step that is the gradient's sign", above(0))


def power_attention(config, powers, linear, *, rngs):
    features = lambda x: jnp.maximum(x, 0) ** powers.power + 1e-3
    return MultiHeadAttention(config, LinearCore(config, linear, features), rngs=rngs)


def mixed_signs(config, traits, options):
    mix = lambda g: options.share * jnp.sign(g) + (1 - options.share) * g
    return [
        optax.stateless(lambda updates, params: jax.tree.map(mix, updates)),
        optax.add_decayed_weights(config.weight_decay, mask=traits.matrix),
    ]


POWERS = SublayerSpec(power_attention, (PowerOptions, LinearOptions), frozenset({"num_heads", "rotary"}))
register_family("powers", Family((POWERS, MLP_SPEC), {"absolute_positions": "learned"}))
register_optimizer("signs", Optimizer(mixed_signs, (SignOptions,)))


@section("data.counting")
class CountingOptions:
    lines: int = key(40, "a document", above(0))


class Counting:
    """Documents that count from one to `lines`."""

    name, stream = "counting", None

    def __init__(self, lines):
        self.fingerprint, self._text = f"counting {lines}", "".join(f"{i} after {i - 1}\n" for i in range(1, lines + 1))

    def size(self, split):
        return len(self._text)

    def pieces(self, split):
        return (Piece(self._text, begins_document=True) for _ in range(8 if split == "train" else 2))


@section("data.last")
class LastOptions:
    tokens: int = key(4, "at a row's end, that are to be predicted", above(0))


def last_tokens(tokenizer, config, options):
    """Next-token prediction where only the last targets of a row count."""

    def transform(row, *numbers):
        count = int(row["loss_mask_BxL"].sum())
        chosen = row["loss_mask_BxL"] * (np.arange(len(row["loss_mask_BxL"])) >= count - options.tokens)
        return row | {"loss_mask_BxL": chosen.astype(np.float32)}

    return transform


class Backwards(Conditioning):
    """The prompt is read backwards, before the begin-of-text token of its continuation."""

    scores_full_text = False
    scored = " after a text read backwards"

    def row_start(self, prompt, begin):
        return np.concatenate([prompt[-2::-1], prompt[-1:]])


def backward_rows(tokenizer, config):
    """Rows of `Backwards`."""

    def transform(row, *numbers):
        last, ids = int(row["loss_mask_BxL"].argmax()), row["inputs_BxL"]
        return row | {"inputs_BxL": np.concatenate([ids[:last][::-1], ids[last:]])}

    return transform


@section("model.biased")
class BiasedOptions:
    pull: float = key(0.01, "times the squared bias, added to the loss", above(0))


class BiasedHead(NamedTuple):
    """A softmax over words with a bias per word, which a penalty pulls to zero."""

    table_VxD: jax.Array
    bias_V: jax.Array
    pull: float

    def logits(self, features_xD):
        found_xV = jnp.einsum("...d,vd->...v", features_xD, self.table_VxD)
        return found_xV + jnp.broadcast_to(self.bias_V, found_xV.shape)

    def loss(self, inputs, z_loss=0.0):
        penalty = self.pull * jnp.square(self.bias_V).sum() * inputs.weights_BxL.sum()
        return weighted_sum(self.scores(inputs)["nll"], inputs.weights_BxL) + penalty, {"bias": penalty}

    def scores(self, inputs):
        logits_BxLxV = self.logits(inputs.features_BxLxD)
        return {"nll": optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, inputs.targets_BxL)}


register_head(
    "biased",
    HeadKind(
        bind=lambda model: BiasedHead(model.embedding[...], model.bias[...], model.config[BiasedOptions].pull),
        parameters=lambda config, rngs: {"bias": nnx.Param(jnp.ones(config.vocab_size))},
        sections=(BiasedOptions,),
    ),
)
register_corpus("counting", CorpusKind(lambda c, o: Counting(o.lines), reads_path=False, sections=(CountingOptions,)))
register_task("last_tokens", Task(True, "continue", "biased", rows=last_tokens, sections=(LastOptions,)))
register_task("backwards", Task(True, "continue", rows=backward_rows, conditioning=Backwards()))
