"""Our cores as the races call them, against recurrences in float64 with the conventions of the other side."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import races
from benchmarks.gpu.races import RACES, Shape, forward_and_backward, make_inputs
from flash_lm.errors import InputError

pytestmark = pytest.mark.usefixtures("usual_promotion")
SHAPE = Shape(1, 24, 2, 4)


def recurrence(name: str, x: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the outputs of flash-linear-attention's kernel of this name, token by token, B×H×L×K."""
    q, k, v = x["q"], x["k"], x["v"]
    length_1 = lambda y: y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
    if name == "gated_delta":
        q, k = length_1(q), length_1(k)
    heads = np.arange(q.shape[1])
    fixed = {"retention": (1 - 2.0 ** (-5.0 - heads))[None, :, None, None], "linear": np.ones(1)}
    decay = np.broadcast_to(fixed[name], k.shape) if name in fixed else None
    if decay is None:
        decay = np.broadcast_to(np.exp(x["g"] if x["g"].ndim == 4 else x["g"][..., None]), k.shape)
    state, total, out = np.zeros((*k.shape[:2], k.shape[3], v.shape[3])), 0.0, np.zeros_like(v)
    for t in range(q.shape[2]):
        state = decay[:, :, t, :, None] * state
        written = v[:, :, t]
        if name == "gated_delta":
            read = np.einsum("bhk,bhke->bhe", k[:, :, t], state)
            written = x["beta"][:, :, t, None] * (written - read)
        state = state + k[:, :, t, :, None] * written[:, :, None]
        out[:, :, t] = np.einsum("bhk,bhke->bhe", q[:, :, t], state) / np.sqrt(q.shape[3])
        if name == "linear":
            total = total + k[:, :, t]
            out[:, :, t] *= np.sqrt(q.shape[3]) / (q[:, :, t] * total).sum(-1, keepdims=True)
    return out


@pytest.mark.parametrize("name", RACES)
def test_a_core_computes_what_the_kernel_that_it_races_does(name):
    arrays = make_inputs(RACES[name], SHAPE, jnp.float32)
    out, gradients = forward_and_backward(RACES[name], SHAPE)(arrays)
    expected = recurrence(name, {key: np.asarray(x, np.float64) for key, x in arrays.items()})
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-5)
    assert gradients.keys() == arrays.keys() - {"do"}
    assert all(np.abs(x).max() > 0 for x in gradients.values())


def test_a_core_that_differs_from_its_kernel_is_not_timed_against_it(monkeypatch):
    """Theirs is a fake that takes 1 ms; without an interpreter ours is timed alone, too."""
    monkeypatch.setattr(races, "distance_from_theirs", lambda name, shape, peer: 0.5)
    answer = {"theirs": "chunk_retention", "is_reference": False, "ms": 1}
    monkeypatch.setattr(races, "ask", lambda peer, question: answer)
    line = races.race_line("retention", SHAPE, object(), 1, 1)  # type: ignore[arg-type]
    assert line["not_compared"] == "they differ by 0.5, where 0.04 is allowed" and line["ours_ms"] > 0
    assert "make peers" in races.race_line("retention", SHAPE, None, 1, 1)["not_compared"]
    monkeypatch.setattr(races, "distance_from_theirs", lambda name, shape, peer: 0.01)
    line = races.race_line("retention", SHAPE, object(), 1, 1)  # type: ignore[arg-type]
    assert line["speedup"] == line["theirs_ms"] / line["ours_ms"] == 1 / line["ours_ms"]


def test_all_cores_at_the_first_shape_come_first_and_the_rest_is_named(tmp_path, monkeypatch, capsys):
    """Each race takes 100 s of a clock."""
    clock, raced, ahead = [0.0], [], []

    def race_line(name, shape, peer, rounds, calls):
        clock[0] += 100
        raced.append((name, str(shape)))
        return {"core": name, "shape": str(shape), "not_compared": "a test"}

    monkeypatch.setattr(races, "race_line", race_line)
    monkeypatch.setattr(races, "compiled", lambda name, shape: ahead.append((name, shape.length)))
    monkeypatch.setattr(races, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    words = ["--shapes=1x1024x2x4 1x256x2x4 1x128x2x4", "--seconds=550", "--python=/nowhere", f"--out={tmp_path}"]
    races.main(words)
    first, second, third = ([(name, f"1x{length}x2x4") for name in RACES] for length in (1024, 256, 128))
    assert raced == [*first, second[0]]
    named = ", ".join(f"{name} at {shape}" for name, shape in [*second[1:], *third])
    assert f"not measured because of --seconds=550: {named}" in capsys.readouterr().out
    # What checks and times a race is compiled before, and nothing when the time is over.
    checked = [(name, length) for name in RACES for length in (races.CHECKED, 1024)]
    assert sorted(ahead) == sorted([*checked, *((name, 256) for name in RACES)])


def test_shapes_of_nonsense_are_refused():
    assert str(Shape.parse("4x2048x16x128")) == "4x2048x16x128"
    for word in ("4x2048x16", "4x2048x16x0", "axbxcxd"):
        with pytest.raises(InputError, match="such as 4x2048x16x128"):
            Shape.parse(word)
