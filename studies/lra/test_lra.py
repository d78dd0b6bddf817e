"""The table and the picture of sweeps of Long Range Arena's stand-ins, from planted runs."""

import gzip
import shutil
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import ROOT

from flash_lm.config.changes import apply_changes
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.runs.run_folder import run_hash
from studies.lra import __main__ as lra_program
from studies.lra import data, models, published
from studies.lra.configs import listops_short


def run(folder, accuracy: float, **more) -> None:
    about = {"majority": 0.25, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1, "split": "test"}
    folder.mkdir(parents=True)
    write_jsonl(folder / "results.jsonl", [about | {"accuracy": accuracy} | more])


def test_the_table_has_both_arms_and_the_published_figures(tmp_path, capsys):
    runs, out = tmp_path / "runs", tmp_path / "out"
    run(runs / "listops" / "flash_scratch", 0.5)
    run(runs / "listops" / "flash_pretrained", 0.625)
    run(runs / "listops" / "flash_masked", 0.9)  # no classifier
    run(runs / "image" / "transformer_scratch", 0.75)
    run(runs / "image" / "mega_scratch", 0.1, split="validation")
    lra_program.main([f"--workdir={runs}", f"--out={out}"])
    accuracies = [(x["lra"], x["family"], x["arm"], x["accuracy"]) for x in read_jsonl(out / "runs.jsonl")]
    assert accuracies == [
        ("listops", "flash", "pretrained", 0.625),
        ("listops", "flash", "scratch", 0.5),
        ("image", "transformer", "scratch", 0.75),
    ]
    rows = {row[1]: row[2:] for row in (line.split("|") for line in (out / "table.md").read_text().splitlines()[2:])}
    cells = {name.strip(): [x.strip() for x in row[:-1]] for name, row in rows.items()}
    assert cells["family"] == [
        f"{task}, {x}" for task in ("listops", "image") for x in ("scratch", "pretrained", "published")
    ]
    assert cells["flash"] == ["50.0", "62.5", "", "", "", ""]
    assert cells["transformer"] == ["", "", "36.4", "75.0", "", "42.4"]
    assert cells["most frequent label"] == ["25.0", "25.0", "", "25.0", "", ""]
    assert (out / "lra.png").stat().st_size > 10_000
    shutil.rmtree(runs / "listops")
    run(runs / "text" / "flash_scratch", 0.25)
    lra_program.main([f"--workdir={runs}", f"--out={out}"])
    assert [x["lra"] for x in read_jsonl(out / "runs.jsonl")] == ["listops", "listops", "text", "image"]


def test_no_sweep(tmp_path):
    with pytest.raises(InputError, match="has no scored sweep: make one with --workdir="):
        lra_program.main([f"--workdir={tmp_path}", f"--out={tmp_path / 'out'}"])


def test_a_sweep_is_the_one_that_was_measured_and_a_run_by_itself_is_of_today():
    """Models start otherwise now (studies/quality/README.md): the runs of the sweep say how they started then."""
    config = listops_short.get_config()
    assert (config.model.residual_init, config.model.divides) == (get_config().model.residual_init, None)
    runs = listops_short.get_runs(config)
    lines = [
        line for line in read_jsonl(ROOT / "studies" / "lra" / "results" / "runs.jsonl") if line["lra"] == "listops"
    ]
    scratch = {line["run"]: line["config_hash"] for line in lines if line["arm"] == "scratch"}
    assert len(scratch) == len(models.FAMILIES)
    assert {name: run_hash(apply_changes(config, runs[name]).to_dict()) for name in scratch} == scratch


def test_the_families_are_those_of_the_published_table_and_ours():
    assert set(published.ACCURACY) == set(models.FAMILIES) - {"flash", "flash_quad"}
    assert all(len(figures) == len(published.TASKS) for figures in published.ACCURACY.values())


@pytest.mark.parametrize("more", [[], ["--test=3"]])
def test_a_copy_has_fewer_test_rows(more, tmp_path):
    """For images and texts; the other splits are the same bytes."""
    corpus, out, count = tmp_path / "corpus", tmp_path / "out", 3 if more else 9
    corpus.mkdir()
    images = np.arange(9 * 4, dtype=np.uint8).reshape(9, 2, 2)
    for name, shape in {
        "train-images-idx3": images,
        "t10k-images-idx3": images,
        "t10k-labels-idx1": images[:, 0, 0],
    }.items():
        head = bytes([0, 0, 8, shape.ndim]) + struct.pack(f">{shape.ndim}I", *shape.shape)
        (corpus / f"{name}-ubyte.gz").write_bytes(gzip.compress(head + shape.tobytes()))
    for name in ("train", "test"):
        pq.write_table(
            pa.table({"text": [str(i) for i in range(9)], "label": list(range(9))}), corpus / f"{name}.parquet"
        )
    data.main([str(corpus), f"--out={out}", *more])
    for name in ("train-images-idx3-ubyte.gz", "train.parquet"):
        assert (out / name).read_bytes() == (corpus / name).read_bytes()
    kept = [0, 4, 8] if more else list(range(9))
    assert pq.read_table(out / "test.parquet").to_pydict() == {"text": [str(i) for i in kept], "label": kept}
    copied = gzip.decompress((out / "t10k-images-idx3-ubyte.gz").read_bytes())
    assert copied[:4] == bytes([0, 0, 8, 3]) and struct.unpack(">3I", copied[4:16]) == (count, 2, 2)
    np.testing.assert_array_equal(np.frombuffer(copied[16:], np.uint8).reshape(-1, 2, 2), images[kept])
    labels = gzip.decompress((out / "t10k-labels-idx1-ubyte.gz").read_bytes())
    assert list(labels[8:]) == [4 * i for i in kept]


def test_a_corpus_without_a_test_split_is_not_copied(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "train.parquet")
    with pytest.raises(InputError, match="has no test split: expected"):
        data.main([str(tmp_path), f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
