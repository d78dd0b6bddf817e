"""Validation during training: the same text however a batch is split, and the share of the split that is scored."""

import jax
import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.training.resume import new_state
from flash_lm.training.setup import build_experiment
from flash_lm.training.validation import make_validation

pytestmark = pytest.mark.usefixtures("usual_promotion")

ROWS, LIMIT = 16, 2  # of a batch; batches of an evaluation


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """About 60 rows of validation text in four batches; the mesh has eight devices."""
    folder = tmp_path_factory.mktemp("corpus")
    config = small_config(write_corpus(folder / "text", documents=60, lines=60), folder / "cache", "flash")
    config.model.absolute_positions = "none"
    config.data.tokens_per_batch = ROWS * 32
    config.train.eval_steps = LIMIT
    return config


def scores(config, accumulate: int, shape: tuple[int, ...], carry: bool = False) -> tuple[dict, list]:
    """The scores of the model at its start, and the rows of the validation split."""
    config = config.copy_and_resolve_references()
    config.train.update(accumulate=accumulate, carry_state=carry)
    config.mesh.shape = shape
    experiment = build_experiment(parse(config))
    rows = experiment.evaluation_rows("validation")
    with jax.set_mesh(experiment.mesh):
        totals = make_validation(experiment, rows)(new_state(experiment).params)
    return totals, [rows[i] for i in range(len(rows))]


@pytest.fixture(scope="module")
def unsplit(config):
    """Scores without accumulation, over eight devices."""
    return scores(config, 1, (8, 1, 1))


def test_a_limited_evaluation_scores_full_batches(unsplit):
    """Batches 0 and n/2 of n, with their targets counted by hand."""
    actual, rows = unsplit
    half = -(-len(rows) // ROWS) // LIMIT * ROWS
    assert half >= ROWS and len(rows) > half + ROWS
    chosen = rows[:ROWS] + rows[half : half + ROWS]
    assert actual["tokens"] == sum(row["loss_mask_BxL"].sum() for row in chosen)
    assert actual["split_share"] == pytest.approx(2 * ROWS / len(rows))


@pytest.mark.parametrize(
    ("accumulate", "shape"),
    [(2, (8, 1, 1)), (4, (1, 4, 2)), pytest.param(8, (2, 1, 4), marks=pytest.mark.slow("another mesh"))],
)
def test_the_text_is_the_same_however_a_batch_is_split(config, unsplit, accumulate, shape):
    actual, _ = scores(config, accumulate, shape)
    assert [actual[name] for name in ("tokens", "bytes", "split_share")] == [
        unsplit[0][name] for name in ("tokens", "bytes", "split_share")
    ]
    np.testing.assert_allclose(actual["nll"], unsplit[0]["nll"], rtol=1e-5)


def test_carried_documents_are_the_same_however_a_batch_is_split(config):
    (one, _), (two, _) = (scores(config, count, (8, 1, 1), carry=True) for count in (1, 2))
    assert one["tokens"] == two["tokens"] and one["split_share"] == two["split_share"] < 1
    np.testing.assert_allclose(two["nll"], one["nll"], rtol=1e-5)
