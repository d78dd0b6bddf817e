"""Memory and traffic per device of a tiny step on eight devices."""

import pytest

from benchmarks.mesh import scale

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.slow("compiles steps for several meshes")
def test_what_a_step_asks_of_each_device(monkeypatch):
    """A state sharded over eight devices takes an eighth of the bytes; a replicated one sums gradients."""
    monkeypatch.setitem(scale.SIZES, "tiny", (2, 64, 4))
    config = scale.load_config("configs/tiny.py", ["--config.data.vocab_size=512", "--config.model.chunks.size=16"])
    lines = [scale.measure(scale.make_setup(config, "flash", "tiny", shape, 32, 1)) for shape in ((8, 1, 1), (1, 8, 1))]
    replicated, sharded = lines
    assert (
        replicated["tokens_a_step"] == sharded["tokens_a_step"] == 8 * 32
        and replicated["devices"] == sharded["devices"] == 8
    )
    # Parameters and two moments in float32, and some counts.
    assert 12 * replicated["parameters"] <= replicated["state_bytes_a_device"] < 12 * replicated["parameters"] + 64
    assert 12 * sharded["parameters"] / 8 <= sharded["state_bytes_a_device"] < 0.2 * replicated["state_bytes_a_device"]
    assert replicated["all-reduce_bytes"] >= 4 * replicated["parameters"] and "all-gather_bytes" not in replicated
    assert sharded["all-gather_bytes"] > 0 and sharded["collectives_a_step"] > replicated["collectives_a_step"]
    config.train.loss_chunk = 4  # eight slices: the gradient by the table still crosses the devices once
    sliced = scale.measure(scale.make_setup(config, "flash", "tiny", (8, 1, 1), 32, 1))
    assert sliced["collectives_a_step"] == replicated["collectives_a_step"]
    assert sliced["collective_bytes_a_step"] == replicated["collective_bytes_a_step"]
