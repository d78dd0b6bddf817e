"""Profiler traces of a run."""

import gzip
import json

import pytest
from small import small_config, write_corpus

from flash_lm.errors import InputError
from flash_lm.training.profile import check_span, parse_span
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.mark.parametrize("text", ["5", "5:", ":5", "a:b", "5:5", "6:5", "-1:5", "1:2:3", ""])
def test_invalid_spans(text):
    with pytest.raises(InputError, match="such as 20:25"):
        parse_span(text)


def test_the_span_must_lie_within_the_run(tmp_path):
    """Otherwise nothing is written."""
    assert parse_span("20:25") == (20, 25)
    check_span((20, 25), 25)
    config = small_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")
    with pytest.raises(InputError, match="12 steps"):
        train(config, tmp_path / "run", profile=(11, 13))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow("trains two runs, one under the profiler")
def test_the_trace_has_the_steps_of_the_span_and_changes_no_loss(tmp_path):
    """Repeated on the finished run, the command does nothing, as without a trace."""
    config = small_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")
    config.train.update(steps=3, eval_every=0, checkpoint_every=0)
    losses = []
    for name, span in (("plain", None), ("traced", (1, 3)), ("traced", (1, 3))):
        train(config, tmp_path / name, profile=span)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines])
    assert losses[0] == losses[1] == losses[2]
    assert not (tmp_path / "plain" / "profile").exists()
    assert list((tmp_path / "traced" / "profile").rglob("*.xplane.pb"))
    (perfetto,) = (tmp_path / "traced" / "profile").rglob("perfetto_trace.json.gz")
    assert json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
