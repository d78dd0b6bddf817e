"""Grids, ablations and sweeps: which runs they have, skip and report."""

import json
import pathlib

import numpy as np
import pytest
from small import override_flags, small_config, write_corpus

from flash_lm import sweep
from flash_lm.cli.load import load_module
from flash_lm.configs import flash_base, quickstart
from flash_lm.errors import InputError, NonfiniteError
from flash_lm.runs.jsonl import append_jsonl, read_jsonl
from flash_lm.sweeps import grid
from flash_lm.sweeps.grid import check_runs, grid_runs, run_study
from studies.defaults.configs import decays, optimizers, stability

pytestmark = pytest.mark.usefixtures("usual_promotion")

ROOT = pathlib.Path(__file__).parent.parent
ABLATIONS = sorted((ROOT / "configs" / "ablations").glob("*.py"))
OTHERS = [pathlib.Path(module.__file__) for module in (decays, optimizers, stability)]


def one_device(config):
    """A batch large enough for the eight fake devices."""
    config.data.tokens_per_batch = 8 * config.model.max_length
    return config


def test_a_grid_is_a_product_of_typed_values():
    grid = ["model.chunks.size=64,128", "mesh.shape=(8,1,1),(-1,1,1)"]
    runs, impossible = grid_runs(one_device(quickstart.get_config()), grid)
    assert list(runs) == [f"chunks.size={n},shape={shape}" for n in (64, 128) for shape in ("(8,1,1)", "(-1,1,1)")]
    assert runs["chunks.size=64,shape=(8,1,1)"] == {"model.chunks.size": 64, "mesh.shape": (8, 1, 1)}
    assert impossible == []


def test_impossible_combinations_are_left_out_and_reported():
    parts = [f"model.chunks.{part}_attention=true,false" for part in ("local", "global")]
    runs, (sentence,) = grid_runs(one_device(quickstart.get_config()), parts)
    assert len(runs) == 3
    assert (
        "chunks.local_attention=false,chunks.global_attention=false is left out" in sentence
        and "both false" in sentence
    )


def test_keys_that_vary_together_are_a_grid():
    """An open key, and values that are valid only with each other."""
    config = one_device(quickstart.get_config())
    runs, _ = grid_runs(config, ["model.gau.expanded_dim=128,256", "model.norm=rms"])
    assert list(runs.values()) == [{"model.gau.expanded_dim": n, "model.norm": "rms"} for n in (128, 256)]
    runs, impossible = grid_runs(config, ["model.max_length=512,4096", "data.tokens_per_batch=4096,32768"])
    assert len(runs) == 3 and "max_length=4096,tokens_per_batch=4096 is left out" in impossible[0]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["model.chunks.sise=64"], "did you mean model.chunks.size"),
        (["model.chunks.size=64,x"], "chunks.size=x must be of type int"),
        (["model.chunks.size=64,-1"], "chunks.size=-1 must be"),
        (["model.family=flash,flsh"], "flsh"),
        (["model.chunks.size"], "model.chunks.size"),
        (["model.chunks.size=64", "model.chunks.size=128"], "is given twice"),
    ],
)
def test_a_wrong_key_or_value_ends_the_sweep(grid, message):
    with pytest.raises(InputError, match=message):
        grid_runs(one_device(quickstart.get_config()), grid)


@pytest.mark.slow("trains five runs")
def test_decays_branch_off_one_run(tmp_path, monkeypatch):
    """Each equals, up to rounding, an uninterrupted run with its schedule: a constant rate compiles differently."""
    monkeypatch.setattr(decays, "BUDGETS", (10, 20))
    config = small_config(write_corpus(tmp_path / "corpus"), tmp_path)
    schedule = {"train.schedule": "constant", "train.warmup_steps": 2, "train.learning_rate": 0.01}
    config = grid.apply_changes(config, schedule | {"train.log_every": 1})
    runs = grid.resolve_workdir(decays.get_runs(config), tmp_path)
    run_study(config, runs, tmp_path, "test", lambda: False)
    lines = lambda folder: read_jsonl(folder / "metrics.jsonl")
    rates = {name: [x["learning_rate"] for x in lines(tmp_path / name) if x["split"] == "train"] for name in runs}
    assert np.allclose(rates["sqrt_10"], [0.01, 0.01 * (1 - np.sqrt(0.5))])
    assert np.allclose(rates["linear_20"], [0.01, 0.0075, 0.005, 0.0025])
    full = {key: x for key, x in runs["sqrt_20"].items() if key != "train.branch_from"}
    grid.train(grid.apply_changes(config, full), tmp_path / "uninterrupted")
    losses = lambda name: [x["loss"] for x in lines(tmp_path / name) if x["split"] == "train"]
    assert len(losses("sqrt_20")) == 4 and np.allclose(losses("sqrt_20"), losses("uninterrupted")[-4:], rtol=1e-6)


@pytest.mark.parametrize("path", [*ABLATIONS, *OTHERS], ids=lambda path: path.stem)
def test_ablations_are_valid(path):
    module = load_module(str(path))
    config = one_device(module.get_config())
    runs = module.get_runs(config)
    check_runs(config, runs)
    assert len({json.dumps(changes) for changes in runs.values()}) == len(runs) >= 3
    assert path.stem in module.__doc__, "the docstring says how to run it"


@pytest.mark.parametrize("base", [quickstart, flash_base], ids=lambda base: base.__name__)
def test_expansions_have_about_the_same_size(base):
    """They have the expansion in their name."""
    config = base.get_config()
    runs, model = load_module(str(ROOT / "configs" / "ablations" / "expansion.py")).get_runs(config), config.model
    weights = lambda expanded: 3 * model.model_dim * expanded + model.model_dim * model.gau.shared_dim  # per unit
    usual = model.num_layers * weights(2 * model.model_dim)
    for name, changes in runs.items():
        expanded = changes["model.gau.expanded_dim"]
        assert name == f"expansion_{expanded // model.model_dim}"
        size = changes["model.num_layers"] * weights(expanded)
        assert abs(size - usual) <= weights(expanded) / 2, "the nearest integer number of layers"


@pytest.fixture
def config(tmp_path):
    config = small_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")
    config.train.update(steps=3, eval_every=0, checkpoint_every=0)
    return config


def test_a_run_is_done_when_all_lengths_are_scored(tmp_path):
    """On this split, after the last step; a score of other rows does not count."""
    line = lambda **more: {"split": "test", "step": 3, "length": 16} | more
    append_jsonl(tmp_path / "results.jsonl", [line(), line(split="validation", length=32), line(step=2, length=32)])
    assert grid.is_done(tmp_path, "test", 3, [16])
    assert not grid.is_done(tmp_path, "test", 3, [16, 32])
    append_jsonl(tmp_path / "results.jsonl", [line(length=32)])
    assert grid.is_done(tmp_path, "test", 3, [16, 32]) and not grid.is_done(tmp_path, "test", 4, [16])


@pytest.mark.slow("trains several runs")
def test_a_study_continues_where_it_stopped(config, tmp_path, monkeypatch, capsys):
    runs = {f"chunk_{n}": {"model.chunks.size": n} for n in (8, 16)}
    # Before the first run, after its three steps, at its end; before the second run, and after its first step.
    asked = iter([False] * 6 + [True] * 2)
    assert run_study(config, runs, tmp_path / "study", "validation", lambda: next(asked)) == {}
    assert (tmp_path / "study" / "chunk_8" / "results.jsonl").exists()
    assert not (tmp_path / "study" / "chunk_16" / "results.jsonl").exists()
    trained = []
    train = grid.train
    monkeypatch.setattr(
        grid, "train", lambda config, folder, stop: (trained.append(folder.name), train(config, folder, stop))
    )
    for _ in range(2):
        run_study(config, runs, tmp_path / "study", "validation", lambda: False)
    assert trained == ["chunk_16"]
    assert "chunk_8: already done" in capsys.readouterr().out
    for name in runs:
        (line,) = read_jsonl(tmp_path / "study" / name / "results.jsonl")
        assert line["run"] == name and line["step"] == 3
    steps = [
        line["step"]
        for line in read_jsonl(tmp_path / "study" / "chunk_16" / "metrics.jsonl")
        if line["split"] == "train"
    ]
    assert steps == [1, 2, 3]


@pytest.mark.slow("trains a run")
def test_a_study_of_another_config_is_another_study(config, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "evaluate", lambda folder, split, lengths: [{"split": split, "step": 3}])
    runs = {"chunk_8": {"model.chunks.size": 8}}
    run_study(config, runs, tmp_path / "study", "validation", lambda: False)
    config.train.learning_rate = 1e-4
    with pytest.raises(InputError, match="learning_rate"):
        run_study(config, runs, tmp_path / "study", "validation", lambda: False)


def test_a_run_that_fails_does_not_stop_the_others(config, tmp_path, monkeypatch):
    def train(config, folder, stop):
        if config.model.chunks.size == 8:
            raise NonfiniteError("loss nan at step 2")

    monkeypatch.setattr(grid, "train", train)
    monkeypatch.setattr(
        grid, "evaluate", lambda folder, split, lengths: [{"run": folder.name, "split": split, "step": 3}]
    )
    runs = {f"chunk_{n}": {"model.chunks.size": n} for n in (8, 16)}
    failures = run_study(config, runs, tmp_path, "validation", lambda: False)
    assert failures == {"chunk_8": "loss nan at step 2"}
    assert (tmp_path / "chunk_16" / "results.jsonl").exists()


@pytest.mark.slow("trains several runs")
def test_the_sweep_ends_with_a_table_and_a_plot(config, tmp_path, capsys):
    out = tmp_path / "sweep"
    grid = ["--grid=model.chunks.local_attention=true,false", "--grid=model.chunks.global_attention=true,false"]
    sweep.main(["--config=configs/quickstart.py", *grid, f"--workdir={out}", *override_flags(config)])
    printed = capsys.readouterr().out
    assert "chunks.local_attention=false,chunks.global_attention=false is left out" in printed
    table = (out / "table.md").read_text()
    assert table.strip() in printed and table.count("global_attention=") == 3
    assert (out / "curves.png").exists()


@pytest.mark.slow("trains two programs and a single run, and scores seven runs")
def test_a_sweep_trains_seeds_and_rates_as_one_program(config, tmp_path, capsys):
    """Also those of a search for a rate; the same command skips what is done."""
    axes = ["--seeds=2", "--grid=train.learning_rate=1e-3,2e-3"]
    words = ["--config=quickstart", *axes, f"--workdir={tmp_path / 'sweep'}", "--vmap", *override_flags(config)]
    sweep.main(words)
    capsys.readouterr()
    runs = [f"learning_rate={rate},seed={seed}" for rate in ("1e-3", "2e-3") for seed in (0, 1)]
    lines = [read_jsonl(tmp_path / "sweep" / name / "results.jsonl") for name in runs]
    assert [line["vmapped_runs"] for (line,) in lines] == [4] * 4 and len({line["loss"] for (line,) in lines}) == 4
    table = (tmp_path / "sweep" / "table.md").read_text()
    assert "runs at once" in table and "ratio to learning_rate=1e-3" in table
    sweep.main(words)
    assert capsys.readouterr().out.count("already done") == 4
    # A search: five rates in the first round, and so on.
    search = ["--tune=train.learning_rate", "--budget=10240", f"--workdir={tmp_path / 'search'}", "--vmap=3"]
    flags = [flag for flag in override_flags(config) if "train.steps" not in flag]
    sweep.main(["--config=quickstart", *search, *flags])
    lines = read_jsonl(tmp_path / "search" / "tuning.jsonl")
    together = [
        read_jsonl(tmp_path / "search" / line["run"] / "results.jsonl")[0].get("vmapped_runs") for line in lines
    ]
    assert together[:5] == [3, 3, 3, 2, 2] and all(line["loss"] > 0 for line in lines)


def test_a_sweep_keeps_out_of_a_run(config, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="a single run"):
        words = ["--config=configs/quickstart.py", "--grid=seed=0,1", f"--workdir={tmp_path}"]
        sweep.main([*words, *override_flags(config)])


def test_a_config_that_names_no_runs_needs_a_grid(tmp_path):
    with pytest.raises(InputError, match="--grid"):
        sweep.main(["--config=configs/quickstart.py", f"--workdir={tmp_path}"])
