"""Parameters in bfloat16: a run reports at its start if its updates round away."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import small_config, write_corpus

from flash_lm.training.rounding import unchanged_share
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")
OTHER_KEYS = pytest.mark.slow("trains another run; unchanged_share is tested above")


@pytest.mark.parametrize(("rate", "relative"), [(1e-4, False), (2e-3, False), (1e-4, True), (5e-3, True)])
def test_the_share_equals_that_of_a_loop_over_the_numbers(rate, relative):
    """A bfloat16 is the upper half of a float32, rounded to even."""
    draw = np.random.default_rng(0)
    arrays = [draw.normal(size=40).astype(np.float32) * scale for scale in (0.02, 1.0)]
    params = {"a": jnp.asarray(arrays[0], jnp.bfloat16), "b": jnp.asarray(arrays[1], jnp.bfloat16), "c": jnp.ones(9)}

    def round_to_bfloat16(x: float) -> float:
        bits = int(np.float32(x).view(np.uint32))
        bits += 0x7FFF + (bits >> 16 & 1)
        return float(np.uint32(bits & 0xFFFF0000).view(np.float32))

    still = 0
    for name in ("a", "b"):
        numbers = [float(x) for x in params[name]]
        size = rate * np.sqrt(np.mean(np.square(numbers))) if relative else rate
        still += sum(round_to_bfloat16(x + size) == x for x in numbers)
    assert float(unchanged_share(params, rate, relative)) == pytest.approx(still / 80, abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ({"learning_rate": 1e-5}, ["learning_rate=1e-05 leaves", "b2=0.999 is 1 in bfloat16"]),
        pytest.param({"learning_rate": 3e-2, "b2": 0.996}, [], marks=OTHER_KEYS),
        pytest.param({"learning_rate": 3e-2, "optimizer": "adafactor"}, [], marks=OTHER_KEYS),
    ],
)
def test_a_run_reports_at_its_start_what_rounds_away(tmp_path, capsys, keys, messages):
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache")
    config.model.param_dtype = "bfloat16"
    config.train.update(steps=1, warmup_steps=0, eval_steps=1, **keys)
    train(config, tmp_path / "run")
    said = "".join(capsys.readouterr())
    assert said.count("softmax attention: blocked\n") == 1  # what computes the attention
    assert said.count("warning:") == len(messages) and all(words in said for words in messages)


def test_an_average_in_bfloat16_never_decays_at_the_default():
    """The warning's statement, checked with optax: the next lower bfloat16 is 255/256."""
    nothing = {"a": jnp.zeros(1, jnp.bfloat16)}
    for b2, forgets in ((0.999, False), (0.996, True)):
        adam = optax.scale_by_adam(0.9, b2)
        _, state = adam.update({"a": jnp.ones(1, jnp.bfloat16)}, adam.init(nothing), nothing)
        first = float(state.nu["a"][0])
        for _ in range(5):
            _, state = adam.update(nothing, state, nothing)
        assert (float(state.nu["a"][0]) < first) == forgets
