"""Visibility: causal and bidirectional masks, padding, and packing."""

import numpy as np
import pytest
from oracles import families as oracle_families
from oracles.segments import visibility

from models.cases import (
    ALIGNED,
    BATCH,
    CASE_IDS,
    CASES,
    CAUSAL,
    LENGTH,
    PACKED,
    SHAPE,
    assert_close,
    assert_trees_close,
    case,
    real_tokens,
    standard,
    standard_segment_ids,
    targets,
    tokens,
)

ONE_DOCUMENT = np.ones((BATCH, LENGTH), np.int32)
each_case = pytest.mark.parametrize(("family", "causal"), CASES, ids=CASE_IDS)
each_of_documents = pytest.mark.parametrize(
    ("family", "causal"), [(family, causal) for family, causal in CASES if standard_segment_ids(family) is PACKED]
)


@pytest.mark.parametrize("segment_ids", [ONE_DOCUMENT, PACKED], ids=["one-document", "packed"])
@each_case
def test_influence(family, causal, segment_ids):
    """Through all layers, ∂y_t/∂x_u is exactly zero where u is invisible for t, and not zero where it is visible."""
    model = case(family, causal, **oracle_families.FAMILIES[family].smooth_keys)
    segment_ids = standard_segment_ids(family) if segment_ids is PACKED else segment_ids
    assert_only_where_visible(model.influence(segment_ids), segment_ids, causal, connected_pairs(model, segment_ids))


@pytest.mark.representatives("transformer_plus_plus", "flash", "linear_transformer")
@pytest.mark.parametrize("family", [name for name, row in oracle_families.FAMILIES.items() if row.constant_state])
def test_influence_without_segment_ids(family):
    """Without segment ids the bidirectional chunked families use another function."""
    model = case(family, False)
    assert_only_where_visible(model.influence(None), ONE_DOCUMENT, False, connected_pairs(model, ONE_DOCUMENT))


@pytest.mark.parametrize(
    "causal",
    [True, pytest.param(False, marks=pytest.mark.slow("the bidirectional form"))],
    ids=["causal", "bidirectional"],
)
@pytest.mark.parametrize(
    "segment_ids",
    [pytest.param(ONE_DOCUMENT, marks=pytest.mark.slow("simpler than packed documents")), PACKED],
    ids=["one-document", "packed"],
)
@pytest.mark.slow("compiles the gradients of two models, and runs them for each of 29 tokens")
def test_influence_with_overlapping_chunks(causal, segment_ids):
    influence = case(
        "flash", causal, **{"chunks.overlapping": True, "chunks.global_attention": False}, num_layers=1
    ).influence(segment_ids)
    chunk = np.arange(LENGTH) // SHAPE["chunks.size"]
    # A layer has two units, and each reaches one chunk further.
    assert (influence[:, np.abs(chunk[:, None] - chunk) > 2] == 0).all()
    assert_only_where_visible(
        case("flash", causal, **{"chunks.overlapping": True}).influence(segment_ids), segment_ids, causal
    )


def connected_pairs(model, segment_ids) -> np.ndarray | None:
    """Whether the layers together connect t and u, B×L×L; None if the family has weights for all visible pairs."""
    connects = oracle_families.FAMILIES[model.family].connects
    if connects is None:
        return None
    reach: dict[int, np.ndarray] = {}  # reach of each sequence

    def visit(x_LxD, params, row, settings) -> None:
        before = reach.get(id(row), np.eye(LENGTH, dtype=bool))
        reach[id(row)] = (np.eye(LENGTH, dtype=bool) | connects(x_LxD, params, row, settings)) @ before
        rows.append(row)

    rows: list = []  # kept alive, so that ids are unique
    model.oracle(segment_ids, visit=visit)
    return np.stack(list(reach.values()))


def assert_only_where_visible(influence_BxLxL, segment_ids, causal, connected_BxLxL=None):
    sees = [visibility(row.tolist(), causal) for row in segment_ids]
    visible = np.array([[[see(t, u) for u in range(LENGTH)] for t in range(LENGTH)] for see in sees])
    if connected_BxLxL is not None:
        visible &= connected_BxLxL
    assert (influence_BxLxL[real_tokens(segment_ids)[:, :, None] & ~visible] == 0).all()
    # relu² has derivative zero at negative scores, so two neighbours may not influence each other at all.
    assert (influence_BxLxL[visible] != 0).mean() > 0.98
    t, u = np.indices((LENGTH, LENGTH))
    for side in (t > u,) if causal else (t > u, t < u):
        visible_side = visible & side[None]
        np.testing.assert_array_equal(visible_side.any(axis=2), (influence_BxLxL * visible_side).any(axis=2))


@pytest.mark.parametrize("family", CAUSAL)
def test_later_tokens_change_nothing(family):
    """Tokens are replaced, as a leak through argmax or sort has no derivative."""
    model, (logits, _, _) = case(family, True), standard(family, True)
    for position in (6, 20):
        inputs = tokens()
        inputs[:, position:] = np.random.default_rng(8).integers(SHAPE["vocab_size"], size=(BATCH, LENGTH - position))
        assert_close(model.run(PACKED, inputs)[0][:, :position], logits[:, :position], 1e-6)


@each_case
def test_padding_is_invisible(family, causal):
    """Other tokens in the padding, at the end and between documents, do not change the output of real tokens."""
    model, (logits, loss, grads) = case(family, causal), standard(family, causal)
    garbage = np.random.default_rng(5).integers(SHAPE["vocab_size"], size=(BATCH, LENGTH))
    segment_ids = standard_segment_ids(family)
    keep = real_tokens(segment_ids)
    inputs = np.where(keep, tokens(), garbage)
    assert (inputs != tokens()).any()
    other_logits, other_loss, other_grads = model.run(segment_ids, inputs)
    assert_close(other_logits[keep], logits[keep], 1e-6)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert_trees_close(other_grads, grads, 1e-6)


@each_of_documents
def test_a_documents_neighbours_do_not_matter(family, causal):
    """Each sequence keeps one document; all others get new tokens, targets, and no weight in the loss."""
    model = case(family, causal)
    keep = np.zeros((BATCH, LENGTH), bool)
    keep[0, 13:22] = True  # its segment id also belongs to the document before
    keep[1, :17] = True
    one = model.run(PACKED, weights=keep)
    rng = np.random.default_rng(6)
    inputs, targets_ = (
        np.where(keep, x, rng.integers(SHAPE["vocab_size"], size=x.shape)) for x in (tokens(), targets())
    )
    other = model.run(PACKED, inputs, keep, targets_)
    assert_close(other[0][keep], one[0][keep], 1e-6)
    assert other[1] == pytest.approx(one[1], rel=1e-6)
    assert_trees_close(other[2], one[2], 1e-6)


@each_of_documents
def test_a_document_equals_itself_alone(family, causal):
    """Alone in a sequence, padded on the right. Documents start on chunk borders, as chunks start with the sequence."""
    model = case(family, causal)
    for start, end in ((8, 21), (24, 29)):
        keep = np.zeros((BATCH, LENGTH), bool)
        keep[:, start:end] = ALIGNED[:, start:end] == ALIGNED[:, start : start + 1]
        lengths = keep.sum(axis=1)
        alone = np.arange(LENGTH)[None] < lengths[:, None]

        def move_to_start(x, keep=keep, alone=alone):
            out = np.zeros_like(x)
            out[alone] = x[keep]
            return out

        packed = model.run(ALIGNED, weights=keep)
        single = model.run(alone.astype(np.int32), move_to_start(tokens()), alone, move_to_start(targets()))
        if start == 8:  # the document of sequence 1 began at 0
            packed_row, single_row = packed[0][0][keep[0]], single[0][0][alone[0]]
            assert_close(single_row, packed_row, 1e-5)
            continue
        assert_close(single[0][alone], packed[0][keep], 1e-5)
        assert single[1] == pytest.approx(packed[1], rel=1e-5)
        assert_trees_close(single[2], packed[2], 1e-5)


@pytest.mark.parametrize("family", ["transformer", "flash"])
def test_other_sequences_do_not_matter(family):
    """Heads are folded into the batch; a bug in that would mix sequences."""
    model = case(family, True)
    inputs = tokens()
    inputs[1] = inputs[1, ::-1]
    assert_close(model.run(PACKED, inputs)[0][0], standard(family, True)[0][0], 1e-6)


def test_a_token_outside_the_vocabulary_gives_nan():
    """Instead of a silent wrong answer."""
    model = case("flash", True)
    inputs = tokens()
    inputs[0, 20] = SHAPE["vocab_size"]
    logits = np.asarray(model.logits(model.params, inputs))
    assert np.isnan(logits[0, 20]).all()
    assert np.isfinite(logits[1]).all()
