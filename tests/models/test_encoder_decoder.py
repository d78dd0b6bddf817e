"""Encoder-decoder models: against their oracles, in decoding, and separation of documents."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from oracles.encoder_decoder import encoder_decoder
from oracles.language_model import cross_entropy

from flash_lm import build_model
from flash_lm.config.experiment import parse_model
from flash_lm.errors import InputError
from flash_lm.families.encoder import encoder_config
from flash_lm.families.family import FAMILIES, complete, layer_configs, unused_keys
from flash_lm.models.model_inputs import ModelInputs
from models.cases import (
    BATCH,
    LENGTH,
    PACKED,
    SHAPE,
    assert_close,
    case,
    draw_parameters,
    model_config,
    real_tokens,
    targets,
    to_float64,
    tokens,
)

SOURCE_LENGTH = 13
# Family, family of the encoder, kind of cross attention, other keys.
MODELS = {
    "transformer": ("transformer", "transformer", "softmax", {}),
    "gau": ("flash_quad", "flash_quad", "gau", {}),
    "gau_heads": ("flash_quad", "flash_quad", "gau", {"cross.heads": 4, "cross.attention_function": "laplace"}),
    "mixed": ("linear_transformer", "linear_transformer", "softmax", {}),
    "linear": ("transformer_plus_plus", "flash", "linear", {"encoder.num_layers": 1}),
    "heads": ("transformer_plus_plus", "transformer_plus", "linear", {"head_dim": 6, "num_heads": 3, "biases": "qkv"}),
}
_SLOW = ("gau_heads", "mixed", "linear", "heads")
each_model = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow("compiles another model") if name in _SLOW else ()) for name in MODELS],
)
# Sources of the documents of PACKED: ids 5, 5, 2 and 1, 3. Both documents with a repeated id read the same source.
SOURCE_IDS = np.array([[5] * 7 + [2] * 4 + [0] * 2, [1] * 5 + [0] * 1 + [3] * 7], np.int32)
LENGTHS = np.array([13, 6], np.int32)  # lengths of two sources, one per sequence


def source() -> np.ndarray:
    return np.random.default_rng(4).integers(SHAPE["vocab_size"], size=(BATCH, SOURCE_LENGTH))


def make_config(name: str, **more):
    family, encoder, kind, keys = MODELS[name]
    cross_keys = {"encoder.family": encoder, "cross.kind": kind, "cross.shared_dim": 8}
    return model_config(family, True, **cross_keys, **keys, **more)


class Model:
    """One model with parameters of order 1 and jitted functions."""

    def __init__(self, name: str, **more):
        self.config = make_config(name, **more)
        abstract = nnx.eval_shape(lambda: build_model(self.config, rngs=nnx.Rngs(0)))
        self._graph, self._state, self.constants = nnx.split(abstract, nnx.Param, ...)
        self.params = draw_parameters(nnx.to_pure_dict(self._state))
        self.complete = abstract.config
        self.logits = jax.jit(lambda params, *args, **kwargs: self.bind(params)(*args, **kwargs))
        self.loss_and_grads = jax.jit(jax.value_and_grad(self._loss, has_aux=True))

    def bind(self, params):
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, jax.tree.map(jax.numpy.asarray, params))
        return nnx.merge(self._graph, state, self.constants)

    def oracle(self, params=None, inputs=None, source_=None, segment_ids=PACKED, source_ids=SOURCE_IDS):
        params = to_float64(self.params if params is None else params, self.constants)
        inputs, source_ = (x() if y is None else y for x, y in ((tokens, inputs), (source, source_)))
        return encoder_decoder(params, self.config.to_dict(), inputs, source_, segment_ids, source_ids)

    def _loss(self, params, segment_ids, source_ids):
        logits = self.bind(params)(tokens(), segment_ids, source=source(), source_segment_ids=source_ids)
        keep = (segment_ids > 0).astype(np.float32)
        return (optax.softmax_cross_entropy_with_integer_labels(logits, targets()) * keep).sum(), logits


@functools.cache
def model(name: str, **more) -> Model:
    return Model(name, **more)


@each_model
def test_logits_and_gradients_of_packed_sequences(name):
    one, keep = model(name), real_tokens(PACKED)
    (_, logits), grads = one.loss_and_grads(one.params, PACKED, SOURCE_IDS)
    expected = one.oracle()
    assert_close(np.asarray(logits)[keep], expected[keep], 1e-5)

    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), one.params)
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda g: rng.normal(size=g.shape) / max(np.linalg.norm(g), 1), grads)
    shares = jax.tree.leaves(jax.tree.map(lambda g, d: (np.asarray(g, np.float64) * d).sum(), grads, direction))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.linalg.norm(grad) > 1e-3, f"no gradient at {jax.tree_util.keystr(path)}"

    def loss_at(step: float) -> float:
        at = jax.tree.map(lambda p, d: p + step * d, params, direction)
        return cross_entropy(one.oracle(params=at), targets(), keep)

    slope = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    np.testing.assert_allclose(sum(shares), slope, rtol=0, atol=1e-5 * len(shares))


@each_model
def test_decoding_equals_training_with_one_pair_per_sequence(name):
    """Sources of two lengths: encode once, then one prefill and single steps."""
    one = model(name)
    ids = (np.arange(SOURCE_LENGTH) < LENGTHS[:, None]).astype(np.int32)
    expected = one.oracle(segment_ids=np.ones((BATCH, LENGTH), np.int32), source_ids=ids)

    @jax.jit
    def padded_logits(params):
        bound = one.bind(params)
        rows = ModelInputs(tokens(), source_BxM=source(), source_segment_ids_BxM=ids, packed=False)
        return bound.logits(bound.features(rows))

    logits = padded_logits(one.params)
    assert_close(logits, expected, 1e-5)

    bound = one.bind(one.params)
    state = jax.jit(lambda params, *args: one.bind(params).encode_source(*args))(
        one.params, np.where(ids > 0, source(), 7), bound.init_state(BATCH), LENGTHS
    )
    logits, state = jax.jit(lambda params, *args: one.bind(params).prefill(*args))(one.params, tokens()[:, :5], state)
    assert_close(logits, expected[:, :5], 1e-5)
    step = jax.jit(lambda params, *args: one.bind(params).step(*args))
    for t in range(5, LENGTH):
        logits, state = step(one.params, tokens()[:, t], state)
        assert_close(logits, expected[:, t], 1e-5, f"position {t}")


@each_model
def test_a_changed_source_changes_its_documents_only(name):
    one = model(name)
    before = np.asarray(one.logits(one.params, tokens(), PACKED, source=source(), source_segment_ids=SOURCE_IDS))
    changed = np.where(SOURCE_IDS == 2, (source() + 1) % SHAPE["vocab_size"], source())
    changed[SOURCE_IDS == 0] = 3  # padding may hold anything
    after = np.asarray(one.logits(one.params, tokens(), PACKED, source=changed, source_segment_ids=SOURCE_IDS))
    differs = np.abs(after - before).max(axis=-1) > 1e-6
    np.testing.assert_array_equal(differs[PACKED > 0], (PACKED == 2)[PACKED > 0])


@each_model
def test_every_token_reads_all_of_its_source(name):
    """Derivatives of each token's logits by all tokens of its source are not zero; by other sources they are."""
    one = model(name)

    @jax.jit
    def derivatives(params):
        def logit_sums(table):
            logits = one.bind(params | {"embedding": table})(
                np.zeros((BATCH, LENGTH), np.int32), PACKED, source=source(), source_segment_ids=SOURCE_IDS
            )
            return logits.sum(axis=-1)

        return jax.jacrev(logit_sums)(params["embedding"])

    gradients = np.abs(np.asarray(derivatives(one.params))).sum(axis=-1)
    for b in range(BATCH):
        for t in np.flatnonzero(PACKED[b]):
            visible = SOURCE_IDS[b] == PACKED[b, t]
            visible_ids, hidden_ids = (set(source()[b][mask].tolist()) for mask in (visible, ~visible))
            assert all(gradients[b, t, u] > 0 for u in visible_ids)
            assert all(gradients[b, t, u] == 0 for u in hidden_ids - visible_ids - {0})


def test_parameters_of_cross_attention():
    """4 D² for attention; 3 D E + 2 D S, and two scales and offsets per head for a gated unit."""
    dim, shared = SHAPE["model_dim"], 8

    def count_parameters(name: str) -> int:
        one_layer = jax.tree.map(lambda x: x[0], model(name).params["layers"]["cross_0"])
        return sum(x.size for x in jax.tree.leaves(one_layer))

    assert count_parameters("transformer") == count_parameters("linear") == count_parameters("mixed") == 4 * dim**2
    assert count_parameters("heads") == 4 * dim * 3 * 6 + 3 * 3 * 6  # and the biases of queries, keys and values
    assert count_parameters("gau") == 3 * dim * 2 * dim + 2 * dim * shared + 4 * shared
    assert count_parameters("gau_heads") == 3 * dim * 2 * dim + 2 * dim * shared + 4 * 4 * shared


def test_the_state_holds_the_source_once():
    """Softmax: keys and values of every source token. Linear attention: one sum per head at any source length."""

    def size(name: str, longest: int) -> int:
        bound = nnx.eval_shape(lambda: build_model(make_config(name, max_length=longest), rngs=nnx.Rngs(0)))
        _, cross_state, _ = jax.eval_shape(lambda: bound.init_state(1, 32)).layers
        return sum(x.size for x in jax.tree.leaves(cross_state))

    dim = SHAPE["model_dim"]
    assert size("transformer", 64) - size("transformer", 32) == SHAPE["num_layers"] * 2 * 32 * dim
    assert size("linear", 64) == size("linear", 32)


def test_flops_are_those_of_both_towers():
    one = nnx.eval_shape(lambda: build_model(make_config("transformer"), rngs=nnx.Rngs(0)))
    alone = nnx.eval_shape(lambda: build_model(model_config("transformer", True), rngs=nnx.Rngs(0)))
    reader = nnx.eval_shape(lambda: build_model(model_config("transformer", False), rngs=nnx.Rngs(0)))
    length, dim, vocab = 16, SHAPE["model_dim"], SHAPE["vocab_size"]
    cross = SHAPE["num_layers"] * (2 * 4 * dim**2 + 2 * length * 2 * dim)
    encoder = reader.flops_per_token(length) - 2 * dim * vocab
    assert one.flops_per_token(length) == alone.flops_per_token(length) + encoder + cross


def test_a_source_and_an_encoder_belong_together():
    one, alone = model("transformer"), case("transformer", True)
    with pytest.raises(InputError, match="this model has an encoder, which reads a source besides the tokens"):
        one.bind(one.params)(tokens())
    with pytest.raises(InputError, match="this model has no encoder to read a source"):
        alone.model(alone.params)(tokens(), source=source())
    with pytest.raises(InputError, match="no encoder"):
        alone.model(alone.params).encode_source(source(), alone.init_state())
    with pytest.raises(InputError, match="a source of 40 tokens is longer than model.max_length=32"):
        one.bind(one.params).encode_source(np.zeros((BATCH, 40), np.int32), one.bind(one.params).init_state(BATCH))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"cross.heads": 3}, "model.model_dim=32 must be a multiple of model.cross.heads=3"),
        (
            {"cross.kind": "gau", "cross.heads": 5},
            "model.cross.expanded_dim=64 must be a multiple of model.cross.heads=5",
        ),
        ({"causal": False}, "a model with an encoder is causal"),
        ({"encoder.family": "flash", "num_heads": 3}, "must be a multiple of model.num_heads=3"),
    ],
)
def test_incompatible_keys(keys, match):
    config = make_config("transformer")
    config.update_from_flattened_dict(keys)
    with pytest.raises(InputError, match=match):
        build_model(config, rngs=nnx.Rngs(0))


def test_scanned_layers_are_unrolled_layers_and_dropout_differs_by_tower():
    one, unrolled = model("transformer"), model("transformer", scan_layers=False)
    inputs = {"source": source(), "source_segment_ids": SOURCE_IDS}
    assert_close(
        unrolled.logits(one.params, tokens(), PACKED, **inputs),
        one.logits(one.params, tokens(), PACKED, **inputs),
        1e-5,
    )
    dropping = model("transformer", dropout=0.5)
    # Traced for each call, which may depend on its key alone.
    encode = lambda key: jax.jit(lambda params: dropping.bind(params).encode(source(), SOURCE_IDS, key))(one.params)
    first, again, other = (np.asarray(encode(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_a_pattern_has_cross_attention_in_each_layer():
    config = make_config("transformer", pattern=("transformer", "flash"))
    built = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    names = [type(sublayer).__name__ for sublayer in built.layers.sublayers]
    expected = ["CrossAttention", "MLP", "GatedAttentionUnit", "CrossAttention", "GatedAttentionUnit"]
    assert names == ["MultiHeadAttention", *expected]


READERS = [family for family, row in FAMILIES.items() if "bidirectional" in row.serves]


@pytest.mark.parametrize(
    ("decoder", "encoder"),
    [
        ("transformer", "flash"),
        ("transformer_plus_plus", "transformer"),  # without absolute positions, which the encoder needs
        *(
            pytest.param("flash_quad", family, marks=pytest.mark.slow("compiles an encoder of each family"))
            for family in READERS
        ),
    ],
)
def test_an_encoder_has_positions_with_any_decoder(decoder, encoder):
    """Its defaults are those of its family: the order of a source matters."""
    config = model_config(decoder, True, **{"encoder.family": encoder})
    build = lambda: build_model(config, rngs=nnx.Rngs(0))
    both_orders = np.stack([source()[0], source()[0, ::-1]])
    memory, backwards = np.asarray(jax.jit(lambda: build().encode(both_orders))())
    bound = nnx.eval_shape(build)
    alone = complete(nnx.eval_shape(lambda: build_model(model_config(encoder, False), rngs=nnx.Rngs(0))).config)
    assert (bound.encoder.config.norm, bound.encoder.config.absolute_positions) == (
        alone.norm,
        alone.absolute_positions,
    )
    assert np.abs(memory - backwards[::-1]).max() > 1e-3


def test_explicit_keys_hold_for_both_towers_and_encoder_keys_override_them():
    config = model_config("transformer", True, **{"encoder.family": "flash", "norm": "rms", "encoder.num_layers": 1})
    config.encoder.absolute_positions = "sinusoid"
    built = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    assert (built.config.norm, built.config.absolute_positions) == ("rms", "learned")
    assert (built.encoder.config.norm, built.encoder.config.absolute_positions) == ("rms", "sinusoid")
    assert built.encoder.num_blocks == 1
    again = complete(built.config)
    assert again == built.config


def test_a_unit_with_cross_attention_starts_smaller_by_default():
    """A gated unit adds little at first, but the cross attention of its layer does not."""
    config = complete(parse_model(model_config("flash_quad", True, **{"encoder.family": "flash_quad"})))
    reading, read = layer_configs(config), layer_configs(encoder_config(config))
    assert {x.residual_init for x in reading} == {"depth"} and {x.residual_init for x in read} == {"as_init"}


@pytest.mark.parametrize("name", ["transformer", "linear"])
def test_a_sequence_without_a_source_is_nan(name):
    @jax.jit
    def prefilled_logits(params, lengths):
        bound = model(name).bind(params)
        state = bound.encode_source(source(), bound.init_state(BATCH), lengths)
        return bound.prefill(tokens()[:, :3], state)[0]

    logits = np.asarray(prefilled_logits(model(name).params, np.array([5, 0])))
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()


def test_its_state_is_not_carried_between_batches():
    config = model_config("gated_deltanet", True, **{"encoder.family": "transformer"})
    bound = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match="reads a source for each row"):
        bound.check_carried()


def test_without_ids_all_documents_see_the_full_source():
    one = model("transformer")
    shared = one.logits(one.params, tokens(), PACKED, source=source())
    for ids in (1, 7):
        source_ids = np.full((BATCH, SOURCE_LENGTH), ids, np.int32)
        alone = one.logits(
            one.params, tokens(), np.full_like(PACKED, ids), source=source(), source_segment_ids=source_ids
        )
        assert_close(one.logits(one.params, tokens(), np.full_like(PACKED, ids), source=source()), alone, 1e-5)
    first = PACKED[1] == 1
    assert_close(np.asarray(shared)[1, first], np.asarray(alone)[1, first], 1e-5)


def test_unused_keys():
    """The cross attention and the encoder's family also read keys."""
    towers = ["flash_quad", "flash_quad"]
    assert "model.num_heads" in unused_keys(towers) and "model.num_heads" in unused_keys(towers, "gau")
    assert "model.num_heads" not in unused_keys(towers, "softmax")
    assert "model.cross.shared_dim" in unused_keys(towers, "softmax") and "model.cross.shared_dim" not in unused_keys(
        towers, "gau"
    )
    assert "model.chunks.size" in unused_keys(["transformer"]) and "model.chunks.size" not in unused_keys(
        ["transformer", "flash"]
    )


def test_the_layers_are_named_as_without_an_encoder():
    """So a run may start from a model without an encoder."""
    alone = set(case("flash_quad", True).params["layers"])
    assert set(model("gau").params["layers"]) - alone == {"cross_0", "norm_cross_0"}
    assert alone <= set(model("gau").params["layers"])
