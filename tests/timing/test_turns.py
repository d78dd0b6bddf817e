"""Turns of timed cells, and peak rates of devices."""

import statistics

import pytest

from flash_lm.timing.turns import SLOW_MS, Cell, take_turns
from flash_lm.training.chips import peak_flops


def make_cell(order: list[str], name: str, times: list[float]) -> Cell:
    """Returns a cell whose turns take these times, one after another."""
    remaining = iter(times)

    def turn() -> float:
        order.append(name)
        return next(remaining)

    return Cell.warm_up(name, turn)


def test_cells_take_turns_and_the_first_ones_after_a_wait_count_for_nothing():
    order, logged = [], []
    a, b = [900, 99, 99, 1, 5, 99, 99, 2, 4], [700, 99, 99, 30, 10, 99, 99, 20, 60]
    cells = [make_cell(order, "a", a), make_cell(order, "b", b)]
    take_turns(cells, 2, logged.append)
    assert order == ["a", "b"] + (["a"] * 4 + ["b"] * 4) * 2
    assert [cell.median_ms for cell in cells] == [3, 25]
    low, _, high = statistics.quantiles([30, 10, 20, 60], n=4, method="inclusive")
    assert cells[1].iqr_ms == high - low
    assert [cell.rounds_ms for cell in cells] == [[3, 3], [20, 40]]
    assert "round 1 of 2, about 13 s left" in logged[0]


def test_a_slow_cell_has_one_turn():
    order: list[str] = []
    cells = [make_cell(order, "slow", [SLOW_MS + 1, 40_000]), make_cell(order, "quick", [1] * 9)]
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
