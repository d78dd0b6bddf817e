"""A study of trunks: each is made once, whoever works at it, and its lines have all that is reported."""

import itertools
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import small_config, write_corpus

from flash_lm.cli.load import load_config, load_module
from flash_lm.config.changes import apply_changes
from flash_lm.errors import InputError, NonfiniteError, RunError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.runs.provenance import hash_of_files
from flash_lm.sweeps.jobs import RATES, JobFolder, finish, make_jobs, read_job_lines, try_lock
from flash_lm.timing import step_times
from flash_lm.training.train_loop import train
from studies.quality import __main__ as quality_program
from studies.quality import data, run
from studies.quality.run import (
    Part,
    list_jobs,
    list_trunks,
    rate_job,
    read_best_rates,
    schedules,
    select_parts,
    trunk_job,
)

pytestmark = pytest.mark.usefixtures("usual_promotion")

FAMILY = "linear_transformer"
DATA = "abc"  # hash of the texts
MODELS = {FAMILY: {}, f"{FAMILY}/wide": {"model.mlp_dim": 40}}


def make_config_in(folder):
    config = small_config(write_corpus(folder / "text"), folder / "cache", FAMILY)
    config.model.update(max_length=64, absolute_positions="none", rotary=True)
    config.data.length = 32
    config.train.update(warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0, log_every=5)
    return config


def run_trunks(trunks, job_folder, texts=DATA):
    """Makes the jobs of trunks whose rate is known; returns the trunks that are left."""
    left = make_jobs(
        lambda: [trunk_job(x, read_best_rates(job_folder.out).get(x.tuned_as), texts) for x in trunks], job_folder
    )
    return [trunk for trunk in trunks if trunk.name in left]


def parts(**options):
    return [Part("first", MODELS, {}, seeds=(0, 1), steps=20, **options)]


@pytest.mark.slow("trains several runs")
def test_a_trunk_and_its_decays_are_scored_and_removed(tmp_path):
    trunks = list_trunks(make_config_in(tmp_path), parts(shares=(0.5, 1.0), lengths=(64, 128), slices=("positions",)))
    out, runs = tmp_path / "out", tmp_path / "runs"
    job_folder = JobFolder(out, runs, bool)
    write_best_rate(out, 2e-3)
    assert [trunk.name for trunk in trunks[:3]] == [
        "first_linear_transformer_seed_0",
        "first_linear_transformer_wide_seed_0",
        "first_linear_transformer_seed_1",
    ]
    assert run_trunks(trunks[:1], job_folder) == []
    lines = read_job_lines(out)
    assert [(x["split"], x["share"], x["length"], x["step"], x.get("slice")) for x in lines] == [
        ("validation", 0.5, 32, 10, None),
        ("test", 0.5, 32, 10, None),
        ("validation", 1.0, 32, 20, None),
        ("test", 1.0, 32, 20, None),
        ("test", 1.0, 32, 20, "0–31"),
        ("test", 1.0, 64, 20, None),  # and not 128: it has 64 positions
        ("test", 1.0, 64, 20, "0–63"),
    ]
    assert all((x["part"], x["run"], x["seed"], x["rate"]) == ("first", FAMILY, 0, 2e-3) for x in lines)
    full, sliced = lines[3], lines[4]
    assert sliced["loss"] == pytest.approx(full["loss"], rel=1e-5)
    for line in (full, sliced):
        assert sum(line["nll_blocks"]) == pytest.approx(line["nll"], abs=0.1)
        assert sum(line["tokens_blocks"]) == line["tokens"]
    curves = read_jsonl(out / "curves" / f"{trunks[0].name}.jsonl")
    assert {(x["schedule"], x["split"]) for x in curves if x["step"] in (10, 16, 20)} == {
        *(("stable", split) for split in ("train", "validation")),
        *((name, split) for name in ("0.5", "1") for split in ("train", "validation")),
    }
    assert not [path for path in runs.iterdir() if path.is_dir()]
    # The decay of a budget equals a full run of that budget.
    alone = trunks[0]._replace(part=trunks[0].part._replace(shares=(1.0,)))
    full = schedules(alone, 2e-3, tmp_path)["1"]
    train(apply_changes(trunks[0].config, full), tmp_path / "alone")
    assert evaluate(tmp_path / "alone", "test")[0]["loss"] == lines[3]["loss"]
    # Finished runs are not made again; another config is another study.
    assert run_trunks(trunks[:1], job_folder) == [] and read_job_lines(out) == lines
    other = trunks[0]._replace(config=apply_changes(trunks[0].config, {"train.clip": 7.0}))
    fewer = trunks[0]._replace(part=trunks[0].part._replace(slices=()))
    for wrong, texts in ((other, DATA), (fewer, DATA), (trunks[0], "other texts")):
        with pytest.raises(InputError, match="first_linear_transformer_seed_0.jsonl is of another config"):
            run_trunks([wrong], job_folder, texts)
    write_best_rate(out, 3e-3)  # a search that was made again
    with pytest.raises(InputError, match="first_linear_transformer_seed_0.jsonl is of another config"):
        run_trunks(trunks[:1], job_folder)


@pytest.mark.slow("trains several runs")
@pytest.mark.parametrize("stop", [5, 17])
def test_a_stopped_trunk_goes_on(tmp_path, stop):
    """The stop may save further checkpoints than those that decays branch off."""
    (trunk, *_) = list_trunks(make_config_in(tmp_path), parts(shares=(0.25, 0.5, 1.0)))
    out, runs = tmp_path / "out", tmp_path / "runs"
    write_best_rate(out, 2e-3)
    steps = itertools.count(1)
    with pytest.raises(KeyboardInterrupt):
        run_trunks([trunk], JobFolder(out, runs, lambda: next(steps) >= stop))
    assert not read_job_lines(out)
    assert run_trunks([trunk], JobFolder(out, runs, bool)) == []
    lines = read_job_lines(out)
    other = JobFolder(tmp_path / "full", tmp_path / "other", bool)
    assert run_trunks([trunk], other) == [trunk]  # it has no rate
    shutil.copytree(out / "rates", tmp_path / "full" / "rates")
    run_trunks([trunk], other)
    assert [x["loss"] for x in lines] == [x["loss"] for x in read_job_lines(tmp_path / "full")]


def write_best_rate(out, value, **more):
    (out / "rates").mkdir(parents=True, exist_ok=True)
    line = {"model": FAMILY, "round": 3, "value": value, "loss": 1.0, **more}
    write_jsonl(out / "rates" / f"{FAMILY}.jsonl", [line])


class Made(list):
    """Names and rates; `full`: not empty while the disk is full."""


@pytest.fixture
def stub_training(monkeypatch):
    """Replaces the training of trunks by a stub; seed 1 fails. Returns names and rates of the trunks made."""
    made, full = Made(), []
    made.full = full

    def run_trunk(trunk, rate, folder, should_stop):
        folder.mkdir(parents=True)
        made.append((trunk.name, rate))
        if trunk.seed == 1:
            raise NonfiniteError("loss nan")
        if full:
            raise RunError("the disk is full")
        return [trunk.about | {"share": 1.0, "rate": rate}]

    monkeypatch.setattr(run, "run_trunk", run_trunk)
    return made


def test_what_another_process_has_begun_is_left_to_it(tmp_path, stub_training):
    trunks, out, runs = list_trunks(make_config_in(tmp_path), parts()), tmp_path / "out", tmp_path / "runs"
    job_folder = JobFolder(out, runs, bool)
    assert run_trunks(trunks, job_folder) == trunks and not stub_training  # no rate is known yet
    write_best_rate(out, 1e-3)
    with try_lock(runs / f"{trunks[1].name}.lock") as free:
        assert free
        assert run_trunks(trunks, job_folder) == [trunks[1]]
    assert [name for name, _ in stub_training] == [trunks[i].name for i in (0, 2, 3)]
    assert run_trunks(trunks, job_folder) == []
    assert [name for name, _ in stub_training] == [trunks[i].name for i in (0, 2, 3, 1)]
    assert {rate for _, rate in stub_training} == {1e-3}  # the ablation has its model's
    failed = [line for line in read_job_lines(out) if line["seed"] == 1]
    assert [(line["run"], line["failed"]) for line in failed] == [(name, "loss nan") for name in MODELS]


def test_a_full_disk_is_no_failed_run(tmp_path, stub_training):
    """The folder stays, and the run goes on when there is room."""
    trunks, out, runs = list_trunks(make_config_in(tmp_path), parts())[:1], tmp_path / "out", tmp_path / "runs"
    job_folder = JobFolder(out, runs, bool)
    write_best_rate(out, 1e-3)
    stub_training.full.append(True)
    with pytest.raises(RunError, match="the disk is full"):
        run_trunks(trunks, job_folder)
    (folder,) = runs.glob(f"{trunks[0].name}_*/")
    assert not read_job_lines(out)
    stub_training.full.clear()
    shutil.rmtree(folder)  # the stand-in makes it anew
    assert run_trunks(trunks, job_folder) == [] and len(read_job_lines(out)) == 1


def test_without_a_finite_rate_there_is_no_run(tmp_path, stub_training):
    trunks, out = list_trunks(make_config_in(tmp_path), parts()), tmp_path / "out"
    write_best_rate(out, 1e-3, failed="loss nan")
    assert run_trunks(trunks, JobFolder(out, tmp_path / "runs", bool)) == [] and not stub_training
    lines = read_job_lines(out)
    assert len(lines) == 4 and all(x["failed"] == "no learning rate stays finite: loss nan" for x in lines)


def test_each_model_is_tuned_once(tmp_path, monkeypatch):
    asked = []

    def tune(config, models, key, budget, workdir, should_stop):
        workdir.mkdir(parents=True)
        asked.append((*models, key, budget, config.train.schedule, config.train.decay_steps))
        return [
            {"model": model, "round": 3, "tokens": budget, "key": key, "value": x, "loss": abs(x - 2)}
            for model in models
            for x in (1.0, 2.0, 4.0)
        ]

    monkeypatch.setattr(run, "tune", tune)
    config, out = make_config_in(tmp_path), tmp_path / "out"
    job_folder = JobFolder(out, tmp_path / "runs", bool)
    tune_models = lambda names, steps: make_jobs(
        lambda: [rate_job(config, name, {}, steps, DATA) for name in names], job_folder
    )
    for _ in range(2):
        assert tune_models("ab", 50) == []
    tokens = 50 * config.data.tokens_per_batch
    assert asked == [(name, "train.learning_rate", tokens, "sqrt", 10) for name in "ab"]
    assert {model: (line["value"], line["bracketed"]) for model, line in read_best_rates(out).items()} == {
        "a": (2.0, True),
        "b": (2.0, True),
    }
    with pytest.raises(InputError, match="rates/a.jsonl is of another config"):
        tune_models("a", 100)
    with try_lock(tmp_path / "runs" / "rates_c.lock"):
        assert tune_models("c", 50) == ["rates_c"]
    assert len(asked) == 2


def test_schedules_of_several_budgets(tmp_path):
    (trunk, *_) = list_trunks(make_config_in(tmp_path), [Part("x", {FAMILY: {}}, {}, (0,), 400, (0.25, 0.5, 1.0))])
    runs = schedules(trunk, 1e-3, tmp_path)
    assert [*runs] == ["stable", "0.25", "0.5", "1"]
    assert runs["stable"]["train.steps"] == 320 and runs["stable"]["train.checkpoint_every"] == 80
    assert [runs[x]["train.branch_from"] for x in ("0.25", "0.5", "1")] == [
        f"{tmp_path}/stable@{step}" for step in (80, 160, 320)
    ]
    assert [runs[x]["train.decay_steps"] for x in ("0.25", "0.5", "1")] == [20, 40, 80]
    with pytest.raises(InputError, match="decays begin at steps .* which are no multiples of 88: change steps or"):
        schedules(trunk._replace(part=trunk.part._replace(shares=(0.275, 0.5, 1.0))), 1e-3, tmp_path)


def test_the_texts_of_the_study_have_an_identity(tmp_path):
    """No text is in two splits; other texts have another hash, and another folder has not."""
    script, hashes = data, []
    for number, (source, out) in enumerate([("a", "one"), ("b", "two"), ("c", "other")]):
        for corpus, splits in script.SPLITS.items():
            for name in {name for name, _, _ in splits.values()}:
                (tmp_path / source / corpus).mkdir(parents=True, exist_ok=True)
                texts = [f"{corpus} {name} {i}" for i in range(3)] + ["twice", f"ä\n{number // 2}"]
                pq.write_table(pa.table({"text": texts}), tmp_path / source / corpus / f"{name}.parquet")
        script.main([str(tmp_path / source), f"--out={tmp_path / out}"])
        hashes.append(hash_of_files(tmp_path / out, (".jsonl",)))
    assert hashes[0] == hashes[1] != hashes[2]
    (tmp_path / "one" / "notes.txt").write_text("x")
    assert hash_of_files(tmp_path / "one", (".jsonl",)) == hashes[0]
    splits = [read_jsonl(tmp_path / "one" / "books" / f"{name}.jsonl") for name in ("validation", "test", "train")]
    texts = [line["text"] for lines in splits for line in lines]
    assert len(set(texts)) == len(texts) == 3 * 3 + 2 and "ä\n0" in texts
    with pytest.raises(InputError, match="has no file that ends in .jsonl"):
        hash_of_files(tmp_path / "a", (".jsonl",))


def test_each_run_is_made_after_the_rate_of_its_model(tmp_path, stub_training, monkeypatch):
    """Parts in their order: the full protocol, with the files merged at the end."""

    def tune(config, models, key, budget, workdir, should_stop):
        (model,) = models
        stub_training.append(("rate", model))
        return [{"model": model, "round": 3, "key": key, "value": 1e-3, "loss": 1.0}]

    monkeypatch.setattr(run, "tune", tune)
    config, out, models = make_config_in(tmp_path), tmp_path / "out", {"a": {}, "b": {}}
    two = [Part("first", {"b/x": {}}, {}, (0, 2), 50), Part("second", {"a": {}, "b": {}}, {}, (0,), 50)]
    make_all = lambda parts: make_jobs(lambda: list_jobs(config, parts, models, 50, DATA, out), job_folder)
    job_folder = JobFolder(out, tmp_path / "runs", bool)
    wrong = two[0]._replace(changes={"model.family": "nonsense"})
    with pytest.raises(InputError, match="nonsense"):
        make_all([*two, wrong])
    assert not stub_training
    assert make_all(two) == []
    made = [name for name, _ in stub_training if name != "rate"]
    assert made == ["first_b_x_seed_0", "first_b_x_seed_2", "second_a_seed_0", "second_b_seed_0"]
    assert [x for x in stub_training if x[0] == "rate"] == [("rate", "b"), ("rate", "a")]
    lines, searched = read_job_lines(out), read_job_lines(out, RATES)
    finish([], job_folder)
    assert {path.name for path in out.iterdir()} == {"runs.jsonl", "rates.jsonl"}
    assert read_job_lines(out) == lines == read_jsonl(out / "runs.jsonl") and read_job_lines(out, RATES) == searched
    before = [*stub_training]
    assert make_all(two) == [] and stub_training == before  # merged jobs are not made again
    make_all([*two, two[0]._replace(seeds=(0, 2, 3))])
    assert [name for name, _ in stub_training[len(before) :]] == ["first_b_x_seed_3"]
    assert len(read_job_lines(out)) == len(lines) + 1
    with pytest.raises(InputError, match="second_a_seed_0 in .*runs.jsonl is of another config"):
        make_jobs(lambda: list_jobs(apply_changes(config, {"train.clip": 7.0}), two, models, 50, DATA, out), job_folder)


def test_parts_are_chosen_by_name(tmp_path):
    parts = load_module("studies/quality/config.py").get_parts()
    assert select_parts(["peers", "rows_of_512"], parts) == parts[:5]
    with pytest.raises(InputError, match="no part rows: must be among rows_of_512, peers, "):
        select_parts(["peers", "rows"], parts)
    other = "--parts and --config.… change what --runs makes or --time times: give one of them, too"
    for wrong, message in (
        ("--parts=peers", other),
        ("--config.seed=1", other),
        ("--time", "reads the folder that python -m studies.quality.data has written: give it as --corpus"),
        ("--config.train.accumulate=2", "leave --config.train.accumulate at 1"),
    ):
        with pytest.raises(InputError, match=message):
            quality_program.main([wrong, f"--out={tmp_path}"])


def test_the_command_makes_and_times_the_parts_that_it_names(tmp_path, monkeypatch, capsys):
    """The steps of each part's models that have lines take turns; what was timed is not timed again."""
    script, made, timed = quality_program, [], []

    def time_group(group, baseline, rounds):
        timed.append((baseline, *group))
        return [{"run": name, "microbatch_ms": 1.0} for name in group]

    monkeypatch.setattr(script, "list_jobs", lambda config, parts, *more: made.extend(x.name for x in parts) or [])
    monkeypatch.setattr(step_times, "time_group", time_group)
    (tmp_path / "runs").mkdir()
    runs = [("rows_of_2048", "flash_scores"), ("rows_of_2048", "transformer_plus_plus"), ("large", "flash_scores/5M")]
    write_jsonl(tmp_path / "runs" / "a.jsonl", [{"part": part, "run": run} for part, run in runs])
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text("{}")
        argv = [f"--corpus={tmp_path / folder}", f"--out={tmp_path}", "--parts=rows_of_2048 large"]
        script.main([*argv, f"--workdir={tmp_path}", "--time"])
    assert {*made} == {"rows_of_2048", "large"} and "all jobs are done" in capsys.readouterr().out
    long = [f"rows_of_2048 {name}" for name in ("transformer_plus_plus", "flash_scores")]
    large = ["large flash_scores/5M"]
    assert timed == [(long[0], *long), (large[0], *large)]
    assert [line["run"] for line in read_jsonl(tmp_path / "step_times.jsonl")] == [*long, *large]


def test_times_of_another_softmax_attention_are_not_reused(tmp_path, monkeypatch):
    """The hash of a run is the same for each; lines without the field were made by blocks, as `auto` is on a CPU."""
    timed = []

    def time_group(group, baseline, rounds):
        timed.append(group[baseline].model.quadratic.implementation)
        return [{"run": name, "microbatch_ms": 1.0} for name in group]

    def time(implementation, platform):
        timed.clear()
        monkeypatch.setattr(step_times.jax, "default_backend", lambda: platform)
        step_times.time_steps(config, {"x": {"model.quadratic.implementation": implementation}}, {"x": "x"}, 1, file)
        return timed

    monkeypatch.setattr(step_times, "time_group", time_group)
    config, file = load_config("configs/tiny.py", []), tmp_path / "step_times.jsonl"
    assert time("blocked", "gpu") == ["blocked"] and time("blocked", "gpu") == []
    write_jsonl(file, [{key: x for key, x in line.items() if key != "softmax"} for line in read_jsonl(file)])
    assert time("blocked", "gpu") == time("auto", "cpu") == time("blocked", "cpu") == []
    assert time("auto", "gpu") == ["auto"] and time("auto", "gpu") == []
    assert len({line["config_hash"] for line in read_jsonl(file)}) == 1
