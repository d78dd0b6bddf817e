"""Step times as tables and as a plot."""

from benchmarks.steps.report import plot_step_times, step_time_tables


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
    assert "peak" not in text  # no fraction for a device with an unknown peak
    plot_step_times(lines, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
