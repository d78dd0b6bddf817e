"""The demo's sentences and picture, from lines made for it."""

import pytest

from flash_lm.report.demo import plot_demo, sentences, step_time_table


def curve(*points: tuple[float, float]) -> list[dict]:
    return [{"rated_seconds": seconds, "perplexity": perplexity} for seconds, perplexity in points]


def steps(**times: tuple[float, ...]) -> list[dict]:
    about = {"tokens_per_step": 8192, "device": "a CPU"}
    return [
        {"family": family, "length": 512 * 4**i, "step_ms": ms, **about}
        for family, of_lengths in times.items()
        for i, ms in enumerate(of_lengths)
    ]


CURVES = {"soft": curve((10, 400), (20, 100)), "slow": curve((20, 300), (40, 90)), "flash": curve((10, 420), (20, 121))}
STEPS = steps(soft=(100, 150, 400), slow=(150, 300, 900), flash=(120, 120, 100))


def test_sentences_say_who_is_ahead_and_where():
    quality, soft, slow, flash = sentences(CURVES, STEPS)
    assert "slow has the lowest validation perplexity after equal steps (slow 90.0, soft 100.0, flash 121.0)" in quality
    # All curves go to 20 s, where slow has its first point.
    assert "soft is ahead after equal time, 20 s (soft 100.0, flash 121.0, slow 300.0)" in quality
    assert soft == "Speed of soft: the fastest at 512; at 512 it is 1.20 times as fast as flash."
    assert slow.startswith("Speed of slow: at none of these lengths the fastest; at 512 its step takes 1.50 times")
    assert flash == "Speed of flash: the fastest at 2,048 to 8,192; at 8,192 it is 4.00 times as fast as soft."


def test_between_points_the_logarithm_of_perplexity_is_interpolated():
    curves = {"a": curve((0, 400), (20, 100)), "b": curve((0, 500), (10, 300))}
    quality, *_ = sentences(curves, steps(a=(1,), b=(2,)))
    assert "10 s (a 200.0, b 300.0)" in quality


def test_lengths_apart_are_named_apart():
    _, a, b = sentences({"a": CURVES["soft"], "b": CURVES["slow"]}, steps(a=(1, 3, 1), b=(2, 2, 2)))
    assert "the fastest at 512 and 8,192" in a and "the fastest at 2,048" in b


def test_the_table_and_the_picture(tmp_path):
    assert "| flash  | 120 |   120 |   100 |" in step_time_table(STEPS)
    plot_demo(CURVES, STEPS, 512, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError):
        sentences({}, STEPS)
