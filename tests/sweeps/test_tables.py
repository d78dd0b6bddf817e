"""Tables of the papers: valid runs, the commands that train them, and a full table at a tiny size."""

import shlex

import pytest
from small import ROOT, small_config, write_corpus

from flash_lm.cli.load import load_config, load_module
from flash_lm.config.overrides import apply_overrides
from flash_lm.reproduce import TABLES, main, set_corpus
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.sweeps import grid
from flash_lm.sweeps.grid import check_runs

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture
def config(tmp_path):
    config = small_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")
    config.train.update(steps=3, eval_every=0, checkpoint_every=0)
    return config


@pytest.mark.parametrize("scale", ["paper", "small"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_valid(name, scale):
    module = load_module(str(TABLES[name]))
    runs, config = module.get_runs(scale), module.get_config(scale)
    config.update_from_flattened_dict({"data.tokens_per_batch": 2**18, "train.accumulate": 1})  # for eight devices
    check_runs(config, runs)
    if scale == "paper":
        assert set(module.get_figures(scale)) <= set(runs)
    if hasattr(module, "baseline"):
        assert {module.baseline(name) for name in runs} <= set(runs)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("more", [[], ["--scale=small", "--corpus=stdlib"]], ids=["paper", "small"])
def test_the_commands_of_a_table_are_its_runs(name, more, tmp_path, capsys):
    """For several hosts; the table's command accepts the runs that these commands train."""
    overrides = ["--config.mesh.shape=2,2,2", "--config.data.cache_dir=/a disk"]
    main([f"--table={name}", f"--out={tmp_path}", "--commands=launch it", *more, *overrides])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line[:2] == ["launch", "it"] for line in lines)
    path = TABLES[name].relative_to(ROOT)
    table, scale = load_module(str(path)), "small" if more else "paper"
    for train, score, (run, changes) in zip(lines[::2], lines[1::2], table.get_runs(scale).items(), strict=True):
        workdir = f"--workdir={tmp_path / 'runs' / run}"
        assert train[2:5] == ["train", f"--config=tables/{name}", workdir]
        assert score[2:] == ["evaluate", workdir, "--split=test"]
        expected = table.get_config(scale)
        apply_overrides(expected, overrides)
        expected = grid.apply_changes(set_corpus(expected, "stdlib") if more else expected, changes)
        assert load_config(str(path), train[5:]).to_dict() == expected.to_dict()


def test_a_folder_is_a_data_set_or_text_by_its_files(tmp_path):
    config = load_config("quickstart", [])
    for name, kind in (("books/a.txt", "text"), ("tables/data/train.parquet", "hf")):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.touch()
        corpus = tmp_path / name.split("/")[0]
        data = set_corpus(config, str(corpus)).data
        assert (data.corpus, data.path) == (kind, str(corpus))
        assert set_corpus(config, str(file)).data.corpus == kind
    assert set_corpus(config, f"{tmp_path}/books/*.txt").data.corpus == "text"


@pytest.mark.slow("trains the runs of a table")
def test_a_table_is_reproduced_and_continues_after_a_stop(config, tmp_path, capsys):
    out = tmp_path / "out"
    sizes = {"model.num_layers": 1, "model.model_dim": 16, "train.steps": 2, "train.warmup_steps": 0}
    sizes |= {"train.eval_every": 0, "data.tokens_per_batch": 8192, "data.cache_dir": str(tmp_path / "cache")}
    argv = ["--table=enwik8_length", "--scale=small", f"--corpus={config.data.path}", "--rounds=2", f"--out={out}"]
    argv += [f"--config.{key}={value}" for key, value in sizes.items()]
    main(argv)
    lines = read_jsonl(out / "results.jsonl")
    assert [(line["run"], line["paper"]) for line in lines] == [
        ("length_256", 1.154),
        ("length_512", 1.135),
        ("length_1024", 1.134),
    ]
    assert lines[0]["speedup"] == 1 and all(line["microbatch_ms"] > 0 for line in lines)
    assert "1.154" in (out / "table.md").read_text()
    assert (out / "quality.png").exists() and (out / "curves.png").exists()
    for line in lines + read_jsonl(out / "validation.jsonl"):  # all steps at the rate that was timed
        a_step = next(other["microbatch_ms"] for other in lines if other["run"] == line["run"]) / 1000
        assert line["rated_seconds"] == pytest.approx(line["step"] * a_step)
    assert main([*argv, "--split=validation"]) is None
    assert {line["split"] for line in read_jsonl(out / "results.jsonl")} == {"validation"}
    before = (out / "step_times.jsonl").read_text()
    capsys.readouterr()
    main(argv)
    assert capsys.readouterr().out.count("already done") == 3
    assert (out / "step_times.jsonl").read_text() == before
    main([*argv, "--rounds=1"])
    times = read_jsonl(out / "step_times.jsonl")
    assert [line["rounds"] for line in times] == [len(line["rounds_ms"]) for line in times] == [2] * 3 + [1] * 3
