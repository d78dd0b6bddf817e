"""What a tiny step asks of each of eight devices."""

import pytest

from benchmarks.mesh import scale

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.slow
def test_what_a_step_asks_of_each_device(monkeypatch):
    """A state cut into eight takes an eighth of the bytes, and is gathered; of a whole one gradients are summed."""
    monkeypatch.setitem(scale.SIZES, "tiny", (2, 64, 4))
    config = scale.load_config("configs/tiny.py", ["--config.data.vocab_size=512", "--config.model.chunks.size=16"])
    lines = [scale.measure(scale.setup_of(config, "flash", "tiny", shape, 32, 1)) for shape in ((8, 1, 1), (1, 8, 1))]
    whole, cut = lines
    assert whole["tokens_a_step"] == cut["tokens_a_step"] == 8 * 32 and whole["devices"] == cut["devices"] == 8
    # Parameters and two moments in float32, and some counts.
    assert 12 * whole["parameters"] <= whole["state_bytes_a_device"] < 12 * whole["parameters"] + 64
    assert 12 * cut["parameters"] / 8 <= cut["state_bytes_a_device"] < 0.2 * whole["state_bytes_a_device"]
    assert whole["all-reduce_bytes"] >= 4 * whole["parameters"] and "all-gather_bytes" not in whole
    assert cut["all-gather_bytes"] > 0 and cut["collectives_a_step"] > whole["collectives_a_step"]
    config.train.loss_chunk = 4  # eight slices: the gradient by the table still crosses the devices once
    sliced = scale.measure(scale.setup_of(config, "flash", "tiny", (8, 1, 1), 32, 1))
    assert sliced["collectives_a_step"] == whole["collectives_a_step"]
    assert sliced["collective_bytes_a_step"] == whole["collective_bytes_a_step"]
