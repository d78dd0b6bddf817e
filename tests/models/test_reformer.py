"""Reformer: one bucket equals softmax, bugs of other code, margins of the hashes, local layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.reformer import lsh_margin
from flax import nnx

from flash_lm.config.experiment import parse_model
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete, unused_keys
from flash_lm.layers.context import make_context
from models.cases import (
    ALIGNED,
    BATCH,
    LENGTH,
    PACKED,
    SHAPE,
    Case,
    assert_close,
    case,
    model_config,
    real_tokens,
    state_bytes,
    tokens,
)

DIM, HEADS = SHAPE["model_dim"], SHAPE["num_heads"]
LOCAL = {"pattern": ("longformer", "longformer", "longformer", "reformer"), "num_layers": 4}
ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow("the bidirectional form, or one round of hashes"))


@pytest.mark.parametrize("segment_ids", [None, PACKED, ALIGNED], ids=["one-document", "packed", "aligned"])
@ways
def test_hashes_of_the_standard_case_are_clear(causal, segment_ids):
    """Otherwise rounding could change hashes in the comparisons with the oracle, and no tolerance would help."""
    margins = []
    case("reformer", causal).oracle(segment_ids, visit=lambda *arguments: margins.append(lsh_margin(*arguments)))
    assert len(margins) == BATCH * SHAPE["num_layers"] and min(margins) > 1e-5


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


class Attention:
    """The attention sublayer alone."""

    def __init__(self, causal: bool = True, one_bucket: bool = False, **keys):
        config = complete(parse_model(model_config("reformer", causal, max_length=128, **keys)))
        self.sublayer = FAMILIES["reformer"].sublayers[0](config, rngs=nnx.Rngs(0))
        if one_bucket:
            rotations = self.sublayer.core.rotations
            rotations.set_value(jnp.zeros_like(rotations[...]))
        self._run = jax.jit(lambda x, ids: self.sublayer(x, make_context(x.shape[1], ids, causal=causal)))

    def __call__(self, x_BxLxD, segment_ids=None) -> np.ndarray:
        return np.asarray(self._run(x_BxLxD, segment_ids))

    def project(self, name: str, x_LxD: np.ndarray) -> np.ndarray:
        """Applies a linear map in float64."""
        return x_LxD.astype(float) @ np.asarray(getattr(self.sublayer, name).kernel[...], float)


@pytest.mark.parametrize(("causal", "rounds"), [(True, 3), slow(False, 3), slow(True, 1), slow(False, 1)])
def test_one_bucket_is_softmax_over_all_other_tokens(causal, rounds):
    """Each pair counts once in any number of rounds, which needs the correction log N.

    Keys are unit vectors and scores are q k̂: lucidrains/reformer-pytorch multiplies them by 1/√K as well.
    """
    x = numbers(1, LENGTH, DIM)
    attention = Attention(causal, one_bucket=True, **{"lsh.window": LENGTH, "lsh.num_hashes": rounds})
    q, v = (attention.project(name, x[0]).reshape(LENGTH, HEADS, -1) for name in ("query", "value"))
    scores = np.einsum("thk,uhk->htu", q, q / np.linalg.norm(q, axis=-1, keepdims=True))
    visible = np.tri(LENGTH, k=-1, dtype=bool) if causal else ~np.eye(LENGTH, dtype=bool)
    visible[0, 0] = causal  # the first token sees only itself
    weights = np.where(visible, np.exp(scores), 0)
    mixed = np.einsum("htu,uhk->thk", weights / weights.sum(axis=-1, keepdims=True), v)
    assert_close(attention(x)[0], attention.project("output", mixed.reshape(LENGTH, -1)), 1e-5)


@pytest.mark.parametrize("causal", [True, slow(False)], ids=["causal", "bidirectional"])
def test_a_token_sees_itself_if_it_sees_nothing_else(causal):
    """Tokens of one-token documents, and all tokens if the window is one token."""
    x = numbers(1, LENGTH, DIM)
    project_itself = lambda attention: attention.project("output", attention.project("value", x[0]))
    for attention, ids in (
        (Attention(causal), np.arange(1, LENGTH + 1, dtype=np.int32)[None]),
        (Attention(causal, **{"lsh.window": 1}), None),
    ):
        assert_close(attention(x, ids)[0], project_itself(attention), 1e-5)


def test_later_tokens_do_not_change_the_windows():
    """In the published form they do: those with lower hashes shift the chunks of the sorted sequence."""
    attention, x = Attention(), numbers(1, 96, DIM)
    for length in (31, 64):
        expected = attention(x[:, :length])
        for scale in (-3, 1, 3):  # most of the later tokens in one bucket or another
            later = scale * np.broadcast_to(x[:, 5:6], (1, 96 - length, DIM)) + 0.1 * numbers(1, 96 - length, DIM)
            actual = attention(np.concatenate([x[:, :length], later], axis=1))[:, :length]
            assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize("causal", [True, slow(False)], ids=["causal", "bidirectional"])
def test_a_document_may_start_anywhere(causal):
    """Packed or padded, at any position, with any other documents: the same as alone, and padding gets zeros."""
    attention, x = Attention(causal), numbers(1, 60, DIM)
    alone = attention(x[:, 20:43])[0]
    for start in (0, 1, 7, 30):
        others = numbers(start + 1, 60, DIM)[:1]
        others[0, start : start + 23] = x[0, 20:43]
        ids = np.full((1, 60), 4, np.int32)
        ids[0, start : start + 23], ids[0, 55:] = 3, 0
        out = attention(others, ids)[0]
        assert_close(out[start : start + 23], alone, 1e-6)
        assert (out[55:] == 0).all()


@pytest.mark.slow("compiles models of four layers")
@ways
def test_local_layers_between(causal):
    """The paper's pattern of three local layers and one with hashes, on packed sequences."""
    model, keep = case("reformer", causal, **LOCAL), real_tokens(PACKED)
    logits = np.asarray(model.logits(model.params, tokens(), PACKED))
    assert_close(logits[keep], model.oracle(PACKED)[keep], 1e-5)
    assert [one.rotary_width for one in model.model(model.params).layers.sublayers[::2]] == [16, 16, 16, None]


@pytest.mark.slow("compiles the decoding of a model of four layers")
def test_local_layers_decode():
    model = case("reformer", True, **LOCAL)
    expected = model.oracle(None)
    logits, state = model.prefill(model.params, tokens()[:, :13], model.init_state())
    assert_close(logits, expected[:, :13], 1e-5)
    for now in range(13, LENGTH):
        logits, state = model.step(model.params, tokens()[:, now], state)
        assert_close(logits, expected[:, now], 1e-5)


def test_the_cache_is_that_of_softmax_plus_one_hash_per_round():
    sizes = [
        state_bytes(case(family, True).init_state(capacity=32).layers) / (SHAPE["num_layers"] * BATCH * 32 * HEADS)
        for family in ("transformer", "reformer")
    ]
    assert sizes == [4 * 2 * DIM / HEADS, 4 * (2 * DIM / HEADS + 2)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lsh.num_buckets": 7}, "model.lsh.num_buckets=7 must be an even number"),
        ({"lsh.num_buckets": 0}, "an even number of 2 or more"),
        ({"lsh.window": 0}, "model.lsh.window=0"),
        ({"lsh.num_hashes": 0}, "model.lsh.num_hashes=0"),
        ({"num_heads": 5}, "must be a multiple of model.num_heads=5"),
    ],
)
def test_invalid_keys(keys, message):
    with pytest.raises(InputError, match=message):
        Case("reformer", True, keys)


def test_positions_are_not_rotated():
    """A rotated vector would have another hash at another position."""
    assert {"model.rotary", "model.rotary_base"} <= unused_keys(["reformer"])
