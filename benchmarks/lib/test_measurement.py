"""Turns, peaks, and what a measured line says of its origin."""

import statistics
import subprocess

import pytest

from benchmarks.lib.peaks import peak_flops
from benchmarks.steps.report import plot_step_times, step_time_tables
from benchmarks.lib.timing import SLOW_MS, Cell, take_turns
from flash_lm.report.markdown import pivot
from flash_lm.runs import provenance as origin
from flash_lm.runs.provenance import config_hash, joined, provenance


def recorded(order: list[str], name: str, times: list[float]) -> Cell:
    """A cell whose turns take the times given, one after another."""
    left = iter(times)

    def turn() -> float:
        order.append(name)
        return next(left)

    return Cell.warmed(name, turn)


def test_cells_take_turns_and_the_first_ones_after_a_wait_count_for_nothing():
    order, said = [], []
    a, b = [900, 99, 99, 1, 5, 99, 99, 2, 4], [700, 99, 99, 30, 10, 99, 99, 20, 60]
    cells = [recorded(order, "a", a), recorded(order, "b", b)]
    take_turns(cells, 2, said.append)
    assert order == ["a", "b"] + (["a"] * 4 + ["b"] * 4) * 2
    assert [cell.median_ms for cell in cells] == [3, 25]
    low, _, high = statistics.quantiles([30, 10, 20, 60], n=4, method="inclusive")
    assert cells[1].iqr_ms == high - low
    assert [cell.rounds_ms for cell in cells] == [[3, 3], [20, 40]]
    assert "round 1 of 2, about 13 s left" in said[0]


def test_a_slow_cell_has_one_turn():
    order: list[str] = []
    cells = [recorded(order, "slow", [SLOW_MS + 1, 40_000]), recorded(order, "quick", [1] * 9)]
    take_turns(cells, 2)
    assert order == ["slow", "quick", "slow"] + ["quick"] * 8
    assert (cells[0].median_ms, cells[0].iqr_ms, cells[0].rounds_ms) == (40_000, 0, [40_000])


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float32", 494e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5p", "bfloat16", 459e12),
        ("TPU v5", "bfloat16", 459e12),
        ("NVIDIA H200", "float16", None),
        ("cpu", "float32", None),
        ("NVIDIA X9000", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA GB200", "bfloat16", None),
        ("NVIDIA H200 NVL", "bfloat16", None),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16", None),
    ],
)
def test_peaks_of_known_devices_and_none_of_others(kind, dtype, peak):
    assert peak_flops(kind, dtype) == peak


def test_a_line_records_the_commit_and_whether_the_code_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "x.py"))
    assert provenance("NVIDIA H200")["git"] is None
    git = lambda *words: subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)
    git("init")
    (tmp_path / "x.py").write_text("1")
    git("add", "x.py")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "x")
    line = provenance("NVIDIA H200")
    assert (line["device"], len(line["git"]), line["dirty"]) == ("NVIDIA H200", 12, False)
    assert "jax " in line["versions"] and "python 3." in line["versions"]
    (tmp_path / "x.py").write_text("2")
    assert provenance("cpu")["dirty"] is True
    assert provenance("cpu")["device"] != "cpu"


def test_equal_configs_have_one_hash():
    assert config_hash({"a": 1, "b": (2,)}) == config_hash({"b": [2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_a_pivot_has_holes_where_there_is_no_line():
    lines = [{"f": "x", "n": 512, "v": 1.0}, {"f": "x", "n": 1024, "v": 2.0}, {"f": "y", "n": 1024, "v": 3.0}]
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in pivot(lines, "f", "n", "v", "{:.0f}", 10).split("\n")
    ]
    assert rows[0] == ["f", "512", "1,024"] and rows[2:] == [["x", "10", "20"], ["y", "", "30"]]


def test_step_times_are_shown_with_what_did_not_fit(tmp_path):
    about = {"size": "small", "task": "causal_lm", "dtype": "float32", "device": "a CPU", "tokens_per_step": 8192}
    lines = [
        about
        | {
            "family": "flash",
            "length": n,
            "median_ms": n,
            "temp_bytes": 10**6,
            "speedup": 2.0,
            "peak_fraction": "unknown",
        }
        for n in (512, 1024)
    ]
    lines.append(about | {"family": "aft_full", "length": 1024, "temp_bytes": 10**12, "does_not_fit": "1000 GB"})
    text = step_time_tables(lines)
    assert "| flash  | 512 | 1,024 |" in text and "1000 GB" in text
    assert "peak" not in text  # nothing is told of a device whose peak nobody knows
    plot_step_times(lines, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_two_sessions_has_the_code_of_both():
    now = {"git": "b", "dirty": False, "device": "cpu"}
    assert joined({}, now) == now == joined(now, now)
    assert joined({"git": "a", "dirty": True, "device": "cpu"}, now) == {"git": "a, b", "dirty": True, "device": "cpu"}
    assert joined({"git": None, "dirty": None}, now | {"git": None, "dirty": None})["git"] is None
