"""What the tests cost: a plugin of pytest that measures each test, and a table of them by file and by kind.

`make test COSTS=FILE` writes a line for each test, and `python tests/costs.py FILE 10` prints a table with the ten most
expensive files. The kinds are

- processes: CPU seconds of the processes that a test started and waited for
- compilation: XLA, with reading and writing the cache of compiled functions
- tracing: from Python to a jaxpr, and from it to XLA's input
- rest: the other CPU seconds, which are arithmetic, Python and files

What a worker does before its first test is a row of its own in the table. JAX reports compilation and tracing by the
clock, so they are right while no other work keeps the cores busy.
"""

import collections
import json
import os
import pathlib
import sys
import threading
import time

import pytest

_COMPILATION = "/jax/core/compile/backend_compile_duration"
_TRACING = {"/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration"}
KINDS = ("compilation", "tracing", "processes", "rest")

_spent = collections.Counter()  # seconds of compilation and of tracing, and the number of compilations
_spans = threading.local()  # the outermost spans that have ended, in order of time
_lines = []


def _add_span(event, seconds, **_):
    """Counts a span that ends now, without the spans inside of it, which ended before and are counted."""
    if event == _COMPILATION:
        kind = "compilation"
        _spent["compilations"] += 1
    elif event in _TRACING:
        kind = "tracing"
    else:
        return
    ended = _spans.__dict__.setdefault("ended", [])
    start = time.time() - seconds
    inside = 0.0
    while ended and ended[-1][0] >= start:
        inside += ended.pop()[1]
    ended.append((start, seconds))
    _spent[kind] += seconds - inside


def _spent_until_now():
    used = os.times()
    return collections.Counter(
        cpu=used.user + used.system + used.children_user + used.children_system,
        processes=used.children_user + used.children_system,
        **_spent,
    )


def pytest_addoption(parser):
    parser.addoption("--costs", default="", metavar="FILE", help="write what each test costs to FILE")


def pytest_configure(config):
    import jax  # noqa: PLC0415 (the settings of conftest.py must stand before)

    jax.monitoring.register_event_duration_secs_listener(_add_span)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.spent_before = _spent_until_now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the costs of a test to its last report, which carries them out of a worker."""
    report = yield
    if call.when == "teardown":
        before, after = item.spent_before, _spent_until_now()
        params = item.callspec.params if hasattr(item, "callspec") else {}
        line = {"test": item.nodeid, "worker": os.environ.get("PYTEST_XDIST_WORKER", "one"), "begun": before["cpu"]}
        # A test of shared code costs the same whatever its families.
        line["family"] = None if item.get_closest_marker("representatives") else params.get("family")
        report.costs = line | {key: round(after[key] - before[key], 3) for key in after}
    return report


def pytest_runtest_logreport(report):
    if report.when == "teardown" and not os.environ.get("PYTEST_XDIST_WORKER"):
        _lines.append(report.costs)


def pytest_terminal_summary(terminalreporter, config):
    """Prints the sum, and what each family costs: in `make test` it may cost 8 CPU seconds."""
    if not _lines:
        return
    if path := config.getoption("--costs"):
        pathlib.Path(path).write_text("".join(json.dumps(line) + "\n" for line in _lines))
    total = sum_by(_lines, lambda line: "all")["all"]
    kinds = [f"{kind} {total[kind]:.0f}" for kind in KINDS]
    terminalreporter.write_line(f"CPU seconds: {', '.join(kinds)}, imports {import_seconds(_lines):.0f}")
    families = collections.Counter()
    for line in _lines:
        if line["family"]:
            families[line["family"]] += line["cpu"]
    if families:
        costs = ", ".join(f"{family} {seconds:.0f}" for family, seconds in families.most_common())
        terminalreporter.write_line(f"CPU seconds of each family's tests: {costs}")


def sum_by(lines, key):
    """Sums the kinds of cost, the number of tests and of compilations of the lines with the same key."""
    sums = collections.defaultdict(collections.Counter)
    for line in lines:
        row = sums[key(line)]
        row["tests"] += 1
        row["rest"] += line["cpu"]
        for kind in KINDS[:-1]:
            row[kind] += line.get(kind, 0)
            row["rest"] -= line.get(kind, 0)
        row["compilations"] += line.get("compilations", 0)
    return sums


def import_seconds(lines):
    """Returns the CPU seconds of the workers before their first tests, for imports and the collection of the tests."""
    first = {}
    for line in lines:
        first.setdefault(line["worker"], line["begun"])
    return sum(first.values())


def sum_kinds(row):
    """Returns all CPU seconds of a row."""
    return sum(row[kind] for kind in KINDS)


def sort_by_cost(sums):
    """Returns pairs of a name and its row, the largest cost first."""
    return sorted(sums.items(), key=lambda pair: -sum_kinds(pair[1]))


def print_table(lines, files):
    """Prints the largest costs by file, the sum of the others, what the workers import, and the sum of all."""
    rows = sort_by_cost(sum_by(lines, lambda line: line["test"].split("::")[0]))
    others, total = collections.Counter(), collections.Counter()
    for _, row in rows[files:]:
        others.update(row)
    imports = collections.Counter(rest=import_seconds(lines))
    table = [*rows[:files], (f"{len(rows[files:])} other files", others), ("imports, collection", imports)]
    for _, row in table:
        total.update(row)
    columns = ("tests", "CPU s", *KINDS, "compilations")
    print("| file | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for name, row in [*table, ("all", total)]:
        numbers = [row["tests"], sum_kinds(row), *(row[kind] for kind in KINDS), row["compilations"]]
        print(f"| {name.removeprefix('tests/')} | " + " | ".join(f"{number:,.0f}" for number in numbers) + " |")


if __name__ == "__main__":
    print_table([json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()], int(sys.argv[2]))
