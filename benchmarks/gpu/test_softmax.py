"""The check of an accelerator's softmax attention: its masks are right, and it notices what is wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import softmax
from benchmarks.gpu.softmax import MASKS
from flash_lm.errors import InputError, RunError
from flash_lm.ops.fused_attention import LIBRARIES
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = softmax.REHEARSAL._replace(length=20, chunk=5, chunks=16, width=4)


def test_the_masks_of_layers_are_those_of_the_ids():
    """Both ways to say a mask agree; there are sequences without a token, and many short rows."""
    for name, make in MASKS.items():
        mask = make(SMALL)
        visible = mask.key_span.visible(jnp.arange(mask.keys))
        assert np.array_equal(visible & mask.real_BxL[:, :, None], mask.seen()), name
    assert not MASKS["both ways, padded"](SMALL).real_BxL[-1].any()
    assert not MASKS["cross attention"](SMALL).seen()[0].any()
    assert MASKS["chunks, causal"](SMALL).real_BxL.shape == (16, 5)
    assert MASKS["prefill"](SMALL).structure is None


@pytest.mark.parametrize("wrong", [lambda out: out.at[-2, :, :2].set(0), lambda out: out / 0, lambda out: 1 / out.nope])
def test_what_differs_or_fails_ends_with_an_error(tmp_path, monkeypatch, wrong):
    """Two tokens of one sequence, NaN, or an error of the library; the other masks have their lines."""
    monkeypatch.setattr(softmax, "REHEARSAL", SMALL._replace(lengths=()))
    monkeypatch.setattr(softmax, "MASKS", {name: MASKS[name] for name in ("causal", "grouped queries")})
    right = LIBRARIES["cudnn"].attend

    def attend(arrays, mask, scale):
        out = right(arrays, mask, scale)
        return wrong(out) if arrays[0].shape == arrays[1].shape else out

    monkeypatch.setitem(LIBRARIES, "cudnn", LIBRARIES["cudnn"]._replace(attend=attend))
    monkeypatch.setattr(softmax, "problem", lambda name, *_: "not tried" if name == "splash" else None)
    with pytest.raises(RunError, match=r"^do not use these: cudnn, causal, 20 tokens: [^;]*; set --config"):
        softmax.main(["--rehearse", f"--out={tmp_path}"])
    lines = {line["case"]: line for line in read_jsonl(tmp_path / "softmax.jsonl") if line["implementation"] == "cudnn"}
    assert lines["grouped queries"]["agrees"] and not lines["causal"].get("agrees")
    assert "not tried" in (tmp_path / "table.md").read_text()
    assert LIBRARIES["cudnn"].platform == "gpu"


def test_without_a_library_nothing_is_checked(tmp_path):
    with pytest.raises(InputError, match="a cpu has no such library: set --rehearse"):
        softmax.main([f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_what_has_no_time_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(softmax.time, "perf_counter", iter(range(0, 10**6, 100)).__next__)
    softmax.main(["--rehearse", "--seconds=50", f"--out={tmp_path}"])
    assert {line["not_measured"] for line in read_jsonl(tmp_path / "softmax.jsonl")} == {"--seconds=50 were over"}
