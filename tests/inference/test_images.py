"""Images of a model that was trained on them."""

import numpy as np
import pytest
from data.test_images import idx
from test_scripts import load

from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.inference.images import ImageGenerator
from flash_lm.inference.scoring import evaluate
from flash_lm.inference.trained_model import load_model
from flash_lm.training.loop import train

# The decode loop is that of text.
pytestmark = [pytest.mark.usefixtures("usual_promotion"), pytest.mark.slow]
LINES, WIDTH = 4, 3


def stripes(count: int) -> np.ndarray:
    """Images whose lines are all the first one, of black and white."""
    first = 255 * np.random.default_rng(count).integers(2, size=(count, 1, WIDTH))
    return np.repeat(first, LINES, axis=1).astype(np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for name, count in (("train", 240), ("t10k", 8)):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(stripes(count)))
    config = get_config()
    config.model.update(
        family="transformer", num_layers=2, model_dim=32, num_heads=2, max_length=12, init="lecun", head="logistics"
    )
    config.model.logistics.mixtures = 3
    config.data.update(corpus="images", pack="examples", path=str(folder), tokens_per_batch=32 * 12)
    config.train.update(steps=200, learning_rate=1e-2, warmup_steps=10, eval_every=0, checkpoint_every=0)
    train(config, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def generator(run):
    return ImageGenerator(load_model(run), (LINES, WIDTH))


def test_bits_a_pixel_and_no_accuracy(run):
    (scores,) = evaluate(run, "test", [])
    assert "accuracy" not in scores and scores["bytes"] == scores["tokens"] == 8 * LINES * WIDTH
    # A bit for each of the first line's three pixels of twelve, and nothing else is new.
    assert 0.24 < scores["bits_per_byte"] < 0.5


def test_completions_keep_what_is_given_and_go_on_with_it(generator):
    images = stripes(5)
    given = images[:, :2].reshape(5, -1)
    found = generator.complete(given, temperature=0)
    assert found.shape == images.shape and found.dtype == np.uint8
    assert (found[:, :2] == images[:, :2]).all()
    assert ((found > 127) == (images > 127)).all()


def test_draws_are_repeatable_and_differ(generator):
    first, again, other = (generator.draw(6, seed=seed) for seed in (0, 0, 1))
    assert first.shape == (6, LINES, WIDTH)
    assert (first == again).all() and (first != other).any()


def test_the_grid():
    images = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 3), np.uint8)
    found = load("generate_images").grid(images, 2)
    assert found.shape == (2 + 2 * 4, 2 + 2 * 5)
    assert found[2:4, 2:5].max() == 0 and (found[6:8, 7:10] == 3).all() and (found[:2] == 255).all()


def test_the_script_writes_both_pictures(run, tmp_path, capsys):
    from matplotlib.image import imread  # noqa: PLC0415

    script = load("generate_images")
    script.main([f"--workdir={run}", "--samples=4", "--completed=3", f"--out={tmp_path}"])
    assert imread(tmp_path / "samples.png").shape[:2] == (2 + 2 * (LINES + 2), 2 + 2 * (WIDTH + 2))
    assert imread(tmp_path / "completions.png").shape[:2] == (2 + 3 * (LINES + 2), 2 + 4 * (WIDTH + 2))
    assert str(tmp_path) in capsys.readouterr().out
    with pytest.raises(InputError, match="--samples=5 must be a square number, such as 4"):
        script.main([f"--workdir={run}", "--samples=5", f"--out={tmp_path}"])
