"""Who may look at whom: causality, both directions, padding, packing."""

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
    real,
    rows_of,
    standard,
    targets,
    tokens,
)

ONE_DOCUMENT = np.ones((BATCH, LENGTH), np.int32)
each_case = pytest.mark.parametrize(("family", "causal"), CASES, ids=CASE_IDS)
each_of_documents = pytest.mark.parametrize(
    ("family", "causal"), [(family, causal) for family, causal in CASES if rows_of(family) is PACKED]
)


@pytest.mark.parametrize("segment_ids", [ONE_DOCUMENT, PACKED], ids=["one-document", "packed"])
@each_case
def test_influence(family, causal, segment_ids):
    """∂y_t/∂x_u is exactly zero where t must not see u, and not zero where it may, through all layers."""
    model = case(family, causal, **oracle_families.FAMILIES[family].everywhere)
    segment_ids = rows_of(family) if segment_ids is PACKED else segment_ids
    assert_only_where_visible(model.influence(segment_ids), segment_ids, causal, connected(model, segment_ids))


@pytest.mark.representatives("transformer_plus_plus", "flash", "linear_transformer")
@pytest.mark.parametrize("family", [name for name, row in oracle_families.FAMILIES.items() if row.constant_state])
def test_influence_without_segment_ids(family):
    """The bidirectional families of chunks have a function of their own for this."""
    model = case(family, False)
    assert_only_where_visible(model.influence(None), ONE_DOCUMENT, False, connected(model, ONE_DOCUMENT))


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    "segment_ids", [pytest.param(ONE_DOCUMENT, marks=pytest.mark.slow), PACKED], ids=["one-document", "packed"]
)
@pytest.mark.slow
def test_influence_with_overlapping_chunks(causal, segment_ids):
    influence = case(
        "flash", causal, **{"chunks.overlapping": True, "chunks.global_attention": False}, num_layers=1
    ).influence(segment_ids)
    chunk = np.arange(LENGTH) // SHAPE["chunks.size"]
    # A layer has two units, each of which reaches one chunk further.
    assert (influence[:, np.abs(chunk[:, None] - chunk) > 2] == 0).all()
    assert_only_where_visible(
        case("flash", causal, **{"chunks.overlapping": True}).influence(segment_ids), segment_ids, causal
    )


def connected(model, segment_ids) -> np.ndarray | None:
    """B×L×L: whether the layers together connect t and u, if the family has pairs without weights."""
    connects = oracle_families.FAMILIES[model.family].connects
    if connects is None:
        return None
    reach: dict[int, np.ndarray] = {}  # by row

    def visit(x_LxD, params, row, settings) -> None:
        before = reach.get(id(row), np.eye(LENGTH, dtype=bool))
        reach[id(row)] = (np.eye(LENGTH, dtype=bool) | connects(x_LxD, params, row, settings)) @ before
        rows.append(row)

    rows: list = []  # kept, so that no two have the same id
    model.oracle(segment_ids, visit=visit)
    return np.stack(list(reach.values()))


def assert_only_where_visible(influence_BxLxL, segment_ids, causal, connected_BxLxL=None):
    sees = [visibility(row.tolist(), causal) for row in segment_ids]
    visible = np.array([[[see(t, u) for u in range(LENGTH)] for t in range(LENGTH)] for see in sees])
    if connected_BxLxL is not None:
        visible &= connected_BxLxL
    assert (influence_BxLxL[real(segment_ids)[:, :, None] & ~visible] == 0).all()
    # relu² of a negative score has no derivative, so neighbours that no third token joins may miss each other.
    assert (influence_BxLxL[visible] != 0).mean() > 0.98
    t, u = np.indices((LENGTH, LENGTH))
    for side in (t > u,) if causal else (t > u, t < u):
        seen = visible & side[None]
        np.testing.assert_array_equal(seen.any(axis=2), (influence_BxLxL * seen).any(axis=2))


@pytest.mark.parametrize("family", CAUSAL)
def test_later_tokens_change_nothing(family):
    """They are changed outright: a leak through argmax or sort has no derivative."""
    model, (logits, _, _) = case(family, True), standard(family, True)
    for place in (6, 20):
        inputs = tokens()
        inputs[:, place:] = np.random.default_rng(8).integers(SHAPE["vocab_size"], size=(BATCH, LENGTH - place))
        assert_close(model.run(PACKED, inputs)[0][:, :place], logits[:, :place], 1e-6)


@each_case
def test_padding_is_invisible(family, causal):
    """Other tokens in the padding, at the row's end and between documents, change nothing for the real tokens."""
    model, (logits, loss, grads) = case(family, causal), standard(family, causal)
    garbage = np.random.default_rng(5).integers(SHAPE["vocab_size"], size=(BATCH, LENGTH))
    segment_ids = rows_of(family)
    keep = real(segment_ids)
    inputs = np.where(keep, tokens(), garbage)
    assert (inputs != tokens()).any()
    other_logits, other_loss, other_grads = model.run(segment_ids, inputs)
    assert_close(other_logits[keep], logits[keep], 1e-6)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert_trees_close(other_grads, grads, 1e-6)


@each_of_documents
def test_a_documents_neighbours_do_not_matter(family, causal):
    """Rows 0 and 1 each keep one document; all others get new tokens, targets, and no weight in the loss."""
    model = case(family, causal)
    kept = np.zeros((BATCH, LENGTH), bool)
    kept[0, 13:22] = True  # its segment id also belongs to the document before
    kept[1, :17] = True
    one = model.run(PACKED, weights=kept)
    rng = np.random.default_rng(6)
    inputs, targets_ = (
        np.where(kept, x, rng.integers(SHAPE["vocab_size"], size=x.shape)) for x in (tokens(), targets())
    )
    other = model.run(PACKED, inputs, kept, targets_)
    assert_close(other[0][kept], one[0][kept], 1e-6)
    assert other[1] == pytest.approx(one[1], rel=1e-6)
    assert_trees_close(other[2], one[2], 1e-6)


@each_of_documents
def test_a_document_equals_itself_alone(family, causal):
    """In a row of its own, padded on the right. Chunk grids start with the row, so these start on chunk borders."""
    model = case(family, causal)
    for start, end in ((8, 21), (24, 29)):
        here = np.zeros((BATCH, LENGTH), bool)
        here[:, start:end] = ALIGNED[:, start:end] == ALIGNED[:, start : start + 1]
        lengths = here.sum(axis=1)
        alone = np.arange(LENGTH)[None] < lengths[:, None]

        def moved(x, here=here, alone=alone):
            out = np.zeros_like(x)
            out[alone] = x[here]
            return out

        packed = model.run(ALIGNED, weights=here)
        single = model.run(alone.astype(np.int32), moved(tokens()), alone, moved(targets()))
        if start == 8:  # row 1's document began at 0
            packed_row, single_row = packed[0][0][here[0]], single[0][0][alone[0]]
            assert_close(single_row, packed_row, 1e-5)
            continue
        assert_close(single[0][alone], packed[0][here], 1e-5)
        assert single[1] == pytest.approx(packed[1], rel=1e-5)
        assert_trees_close(single[2], packed[2], 1e-5)


@pytest.mark.parametrize("family", ["transformer", "flash"])
def test_the_row_beside_does_not_matter(family):
    """Heads are folded into the batch; a mistake there mixes rows."""
    model = case(family, True)
    inputs = tokens()
    inputs[1] = inputs[1, ::-1]
    assert_close(model.run(PACKED, inputs)[0][0], standard(family, True)[0][0], 1e-6)


def test_a_token_outside_the_vocabulary_is_not_a_number():
    """Rather than a wrong and silent answer."""
    model = case("flash", True)
    inputs = tokens()
    inputs[0, 20] = SHAPE["vocab_size"]
    logits = np.asarray(model.logits(model.params, inputs))
    assert np.isnan(logits[0, 20]).all()
    assert np.isfinite(logits[1]).all()
