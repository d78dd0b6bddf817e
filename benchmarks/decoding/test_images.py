"""Images per second, of a few pixels."""

import pytest

from benchmarks.decoding import images
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = [f"--config.model.{key}={value}" for key, value in {"num_layers": 1, "model_dim": 8, "num_heads": 2}.items()]


@pytest.mark.slow("times three ways to decode")
def test_images_a_second(tmp_path, monkeypatch, capsys):
    """Each method and batch; large batches are not recomputed."""
    out = tmp_path / "out"
    monkeypatch.setattr(images, "PIXELS", {"MNIST": 16})
    monkeypatch.setattr(images, "MOST_RECOMPUTED", 16)
    words = ["--batches=1 2", "--tokens=4", "--rounds=1", "--config.model.chunks.size=8", *SMALL]
    images.main([*words, f"--out={out}"])
    lines = {(line["way"], line["batch"]): line for line in read_jsonl(out / "images.jsonl")}
    assert set(lines) == {(images.RECOMPUTED, 1)} | {(way, n) for way in (images.LINEAR, images.CACHED) for n in (1, 2)}
    for (_, batch), line in lines.items():
        assert line["images_per_s"] == pytest.approx(batch * 1000 / (16 * line["ms_a_pixel"])) and line["turns"] == 2
    assert 1.5 < lines[images.CACHED, 2]["state_mb"] / lines[images.CACHED, 1]["state_mb"] < 2.5
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out
    with pytest.raises(InputError, match="must be among MNIST"):
        images.main(["--images=mnist", f"--out={tmp_path / 'none'}"])
    assert not (tmp_path / "none").exists()
