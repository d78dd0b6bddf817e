"""Step times of two families, at tiny sizes."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from small import ROOT

from benchmarks.steps import step_time
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.timing.turns import COUNTED

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = [f"--config.model.{key}={value}" for key, value in {"num_layers": 1, "model_dim": 8, "num_heads": 2}.items()]


@pytest.mark.slow("compiles a step of each cell")
def test_step_times_of_two_families(tmp_path, monkeypatch, capsys):
    """One line per cell; a cell that does not fit gets a line, and the others continue."""
    out = tmp_path / "out"
    monkeypatch.setattr(step_time, "PRODUCT", 64)
    words = ["--size=tiny", "--families=transformer_plus_plus flash", "--lengths=16 32", "--tokens_per_step=64"]
    start = step_time.BareStep.start

    def exhausted(step) -> None:
        if (step.config.model.family, step.config.data.length) == ("flash", 32):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        start(step)

    monkeypatch.setattr(step_time.BareStep, "start", exhausted)
    step_time.main([*words, "--rounds=2", f"--out={out}", "--config.data.vocab_size=300", *SMALL])
    lines = read_jsonl(out / "steps.jsonl")
    cells = [(line["length"], line["family"]) for line in lines]
    assert cells == [(n, family) for n in (16, 32) for family in ("transformer_plus_plus", "flash")]
    for line in lines[:3]:
        assert all(not isinstance(value, dict | list) for value in line.values())
        assert line["turns"] == 2 * COUNTED and line["median_ms"] > 0 and line["task"] == "causal_lm"
        assert line["tokens_per_s"] == pytest.approx(64 / line["median_ms"] * 1000)
        assert line["model_flops_per_s"] == pytest.approx(line["model_flops"] / line["median_ms"] * 1000)
        assert line["peak_fraction"] == pytest.approx(line["model_flops_per_s"] / line["peak_flops_per_s"])
    assert lines[0]["speedup"] == 1
    assert "out of memory" in lines[3]["does_not_fit"] and "median_ms" not in lines[3]
    assert len({line["config_hash"] for line in lines}) == 4
    assert (out / "step_time.png").exists()
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.slow("compiles a step of each cell")
def test_a_family_with_and_without_other_keys(tmp_path, monkeypatch, capsys):
    """Nothing is begun after the time limit: the lines of the second length say so."""
    out = tmp_path / "out"
    monkeypatch.setattr(step_time, "PRODUCT", 64)
    measure = step_time.measure

    def measure_and_wait(*arguments) -> None:
        measure(*arguments)
        monkeypatch.setattr(step_time.time, "perf_counter", lambda: float("inf"))

    monkeypatch.setattr(step_time, "measure", measure_and_wait)
    others = ["flash+kernels=pallas+chunks.size=8", "flash+train.loss_chunk=8+num_layers=2"]
    words = ["--size=tiny", f"--families=flash {' '.join(others)}", "--lengths=16 32", "--seconds=600"]
    step_time.main(
        [*words, "--tokens_per_step=32", "--rounds=1", f"--out={out}", "--config.data.vocab_size=300", *SMALL]
    )
    lines = read_jsonl(out / "steps.jsonl")
    assert [(line["length"], line["family"]) for line in lines] == [
        (n, x) for n in (16, 32) for x in ["flash", *others]
    ]
    assert len({line["config_hash"] for line in lines[:3]}) == 3
    assert all("median_ms" in line for line in lines[:3])
    assert all(line["skipped"] == "--seconds=600 were over" for line in lines[3:])
    assert "not measured because of --seconds=600: flash at 32, flash+kernels" in capsys.readouterr().out


@pytest.mark.slow("compiles a step")
def test_a_run_that_is_killed_keeps_the_cells_that_had_a_turn(tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(step_time, "PRODUCT", 64)
    turns = iter(range(10))
    step = step_time.BareStep.step

    def killed(self) -> float:
        if next(turns) == 2 + 4:  # both are warmed up, and the first has had its turns of the first round
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(step_time.BareStep, "step", killed)
    words = ["--size=tiny", "--families=flash flash+num_layers=2", "--lengths=16", "--tokens_per_step=32", "--rounds=3"]
    with pytest.raises(KeyboardInterrupt):
        step_time.main([*words, f"--out={out}", "--config.data.vocab_size=300", *SMALL])
    first, second = read_jsonl(out / "steps.jsonl")
    assert first["turns"] == COUNTED and first["peak_fraction"] > 0
    assert second["compile_s"] > 0 and "turns" not in second


def test_states_stay_while_another_one_takes_its_turn(monkeypatch):
    """So the last of these fits alone, but not with the others."""
    monkeypatch.setattr(step_time, "free_memory", lambda: 100)
    sizes = {"a": (60, 50), "b": (40, 10), "c": (70, 5), "d": (20, 15)}  # peak and temporary bytes
    steps = {
        name: SimpleNamespace(peak_bytes=peak, temp_bytes=temp, start=lambda: None, step=lambda: None)
        for name, (peak, temp) in sizes.items()
    }
    lines: dict[str, dict] = {}
    assert list(step_time.warm_up(steps, lines.__setitem__, lambda: None)) == ["a", "b", "d"]
    assert list(lines) == ["c"] and list(lines["c"]) == ["does_not_fit"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--families=flash flsh", "flsh"),
        ("--lengths=16 x", "positive integers"),
        ("--lengths=", "positive integers"),
        ("--lengths=24", "tokens_per_batch"),
        ("--config.model.dtype=bfloat16", "see --help"),
        ("--families=flash flash+dtype=bfloat16", "see --help"),
        ("--config.model.num_layers=0", "num_layers"),
    ],
)
def test_step_times_of_nonsense_end_before_anything_is_measured(tmp_path, word, message):
    words = ["--size=tiny", "--lengths=16", "--tokens_per_step=64", f"--out={tmp_path / 'out'}"]
    with pytest.raises(InputError, match=message):
        step_time.main([*words, word])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow("starts a process")
def test_the_step_benchmark_needs_no_more_than_some_gpu_machines_have():
    """Without the packages of data, checkpoints and logs."""
    missing = ("orbax", "grain", "datasets", "sentencepiece", "tensorboardX", "tqdm")
    program = f"""
import sys
for name in {missing}:
    sys.modules[name] = None
import flash_lm.ops, flash_lm.layers, flash_lm.models.language_model
import benchmarks.steps.step_time
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
