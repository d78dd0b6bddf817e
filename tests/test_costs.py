"""Costs of tests, from events with a fixed clock."""

import collections
import threading
from types import SimpleNamespace

import costs


def test_a_span_is_counted_without_the_spans_inside_of_it(monkeypatch):
    spent, clock = collections.Counter(), SimpleNamespace(now=0.0)
    monkeypatch.setattr(costs, "_spent", spent)
    monkeypatch.setattr(costs, "_spans", threading.local())
    monkeypatch.setattr(costs, "time", SimpleNamespace(time=lambda: clock.now))
    lower, trace = sorted(costs._TRACING)
    # Ended at this time, after so many seconds. The third contains the first two, and the last one nothing.
    events = [(10, trace, 1), (13, costs._COMPILATION, 2), (14, trace, 8), (15, "/jax/other", 14), (17, lower, 2)]
    for clock.now, event, seconds in events:
        costs._add_span(event, seconds, fun_name="f")
    assert spent == {"tracing": 1 + (8 - 1 - 2) + 2, "compilation": 2, "compilations": 1}


def test_the_table_adds_up(capsys):
    line = {"worker": "gw0", "begun": 5.0, "family": None, "cpu": 3.0, "compilation": 1.5, "tracing": 0.5}
    lines = [
        line | {"test": "tests/ops/test_a.py::test_x[1]", "compilations": 7},
        line | {"test": "tests/ops/test_a.py::test_y", "begun": 9.0},
        line | {"test": "studies/test_b.py::test_z", "worker": "gw1", "cpu": 10.0, "processes": 7.0},
        line | {"test": "tests/test_c.py::test_z", "cpu": 1.0, "compilation": 0, "tracing": 0},
    ]
    costs.print_table(lines, 2)
    # The imports of a worker are those before its first test.
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| studies/test_b.py | 1 | 10 | 2 | 0 | 7 | 1 | 0 |",
        "| ops/test_a.py | 2 | 6 | 3 | 1 | 0 | 2 | 7 |",
        "| 1 other files | 1 | 1 | 0 | 0 | 0 | 1 | 0 |",
        "| imports, collection | 0 | 10 | 0 | 0 | 0 | 10 | 0 |",
        "| all | 4 | 27 | 4 | 2 | 7 | 14 | 7 |",
    ]
