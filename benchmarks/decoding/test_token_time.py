"""Time per token by context, at tiny sizes."""

from types import SimpleNamespace

import jax
import pytest

from benchmarks.decoding import token_time
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.timing.turns import COUNTED

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = [f"--config.model.{key}={value}" for key, value in {"num_layers": 1, "model_dim": 8, "num_heads": 2}.items()]


@pytest.mark.slow("times several models")
def test_decoding_by_context(tmp_path, monkeypatch, capsys):
    """The Transformer++ is also measured with recomputation; states that do not fit have no time."""
    out = tmp_path / "out"
    monkeypatch.setattr(token_time, "PREFILLED", 32)
    monkeypatch.setattr(token_time, "STEPPED", 16)
    monkeypatch.setattr(token_time, "COPIED", 1 << 12)
    monkeypatch.setattr(token_time, "RECOMPUTED_UP_TO", 32)
    words = ["--config=configs/tiny.py", "--families=transformer_plus_plus flash", "--contexts=32 64", "--batches=2"]
    sizes = ["--config.model.vocab_size=300", "--config.model.chunks.size=8", *SMALL]
    token_time.main([*words, *sizes, "--rounds=2", "--tokens=4", f"--out={out}"])
    lines = {(line["family"], line["context"]): line for line in read_jsonl(out / "decode.jsonl")}
    assert set(lines) == {
        (token_time.RECOMPUTED, 32),
        *((family, context) for family in ("transformer_plus_plus", "flash") for context in (32, 64)),
    }
    assert all(line["ms_a_token"] > 0 and line["turns"] == 2 * COUNTED for line in lines.values())
    state_bytes = {cell: line["state_bytes"] for cell, line in lines.items()}
    assert state_bytes["transformer_plus_plus", 64] > 1.9 * state_bytes["transformer_plus_plus", 32]
    assert state_bytes["flash", 64] == state_bytes["flash", 32]
    for (family, _), line in lines.items():
        if family == token_time.RECOMPUTED:
            continue
        assert line["bytes_a_token"] == 4 * line["parameters"] + line["state_bytes"]  # neither has tables of positions
        assert line["gb_per_s"] == pytest.approx(line["bytes_a_token"] / line["ms_a_token"] / 1e6)
        assert line["copy_gb_per_s"] > 0
        assert line["weight_flops_per_s"] == pytest.approx(2 * 2 * line["parameters"] / line["ms_a_token"] * 1000)
    prefills = read_jsonl(out / "prefill.jsonl")
    assert [line["ratio"] == line["stepping_ms"] / line["prefill_ms"] for line in prefills] == [True, True]
    assert (out / "decode.png").exists()
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out


def test_cells_that_have_no_time_left_say_so(capsys, monkeypatch):
    """Nothing of them is compiled: the engine only tells the size of its state."""
    monkeypatch.setattr(token_time, "COPIED", 1 << 10)  # the array whose copy is timed
    engine = SimpleNamespace(state_bytes=lambda rows, context: rows * context)
    turn = {"tokens_per_turn": lambda tokens: tokens, "make_decode_turn": lambda *_: None}
    models = [SimpleNamespace(family="flash", engine=engine, **turn)]
    kept: dict = {}
    keep = lambda lines: kept.update({(line["batch"], line["context"]): line for line in lines})
    token_time.measure(models, [64], [1, 2], 4, 1, 100, keep, lambda: True)  # type: ignore[arg-type]
    assert kept[1, 64]["does_not_fit"] and kept[2, 64]["does_not_fit"]
    token_time.measure(models, [64], [1, 2], 4, 1, None, keep, lambda: True)  # type: ignore[arg-type]
    assert [line["skipped"] for line in kept.values()] == ["the time was over"] * 2


def test_a_cell_that_runs_out_of_memory_says_so():
    """The state fits by its size, but not the arrays of a turn; the cells after it go on."""

    def exhausted() -> float:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    assert token_time._compile("flash", exhausted, lambda: False) == (
        None,
        {"does_not_fit": "RESOURCE_EXHAUSTED: out of memory"},
    )
    cell, why = token_time._compile("flash", lambda: 5.0, lambda: False)
    assert cell is not None and cell.warm_ms == 5 and why == {}
