"""The transfer study: each job is made once, weights stay while they are needed, and reports of planted lines."""

import json
import pathlib
import re

import numpy as np
import pytest
from small import small_config

from flash_lm.errors import InputError, NonfiniteError
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.sweeps import grid
from flash_lm.sweeps.jobs import PRETRAINING, JobFolder, merge_job_files, read_job_lines, try_lock
from studies.protocol.verdict import FAILS, HOLDS, NOT_RUN, UNDECIDED
from studies.transfer import __main__ as transfer_program
from studies.transfer import run
from studies.transfer.report import NoWorse, summarize, transfer_table, write_transfer
from studies.transfer.run import Arm, Transfer, run_transfer

pytestmark = pytest.mark.usefixtures("usual_promotion")
FAMILIES = ("linear_transformer", "flash")
ARMS = (Arm("from scratch", None, {}), Arm("frozen", "plain", {"train.freeze": ("^(?!classifier)",)}))


def study_in(folder: pathlib.Path, **changes) -> Transfer:
    """Returns a study of texts with the label 1 if they end with a b."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 40), ("validation", 16), ("test", 16)):
        texts = ["".join(draw.choice(list("ab "), 12)) + "ab"[i % 2] for i in range(count)]
        lines = [{"text": text, "label": int(text[-1] == "b")} for text in texts]
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = small_config(str(folder / "data"), folder / "cache", FAMILIES[0])
    config.task = "classify"
    config.data.update(corpus="hf", path=str(folder / "data"), label_column="label")
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    pretraining = {"task": "masked_lm", "train.steps": 3}
    grid = Transfer(config, FAMILIES[:1], ARMS, {"plain": {}}, pretraining, (0.5, 1.0), (0, 1), 0.5, 80, "data")
    return grid._replace(**changes)


@pytest.fixture
def quick(monkeypatch):
    """Replaces training by empty folders and equal scores; `lost`: names of runs that fail."""

    class Quick:
        trained, scored, lost = [], [], ()

        def train(self, config, folder, should_stop):
            name = re.sub("_[0-9a-f]{12}$", "", folder.name)  # without the hash of its job
            self.trained.append(name)
            if config.train.init_from:
                assert pathlib.Path(config.train.init_from).is_dir()
            folder.mkdir(parents=True)
            if name in self.lost:
                raise NonfiniteError("loss nan")

        def evaluate(self, folder, split):
            self.scored.append((folder.name, split))
            return [{"split": split, "accuracy": 0.5, "macro_f1": 0.5, "matthews": 0.0}]

        def tune(self, config, models, key, budget, folder, should_stop):
            folder.mkdir()
            (name,) = models
            return [{"model": name, "round": 3, "value": 2e-3, "loss": 1.0}]

    stand_in = Quick()
    monkeypatch.setattr(grid, "train", stand_in.train)
    for name in ("evaluate", "tune"):
        monkeypatch.setattr(run, name, getattr(stand_in, name))
    return stand_in


def test_every_task_is_done_once_and_weights_go_at_the_end(quick, tmp_path):
    grid, out, runs = study_in(tmp_path, families=FAMILIES), tmp_path / "out", tmp_path / "runs"
    assert run_transfer(grid, JobFolder(out, runs, bool)) == []
    lines = read_job_lines(out)
    assert len(lines) == 2 * 2 * 2 * 2
    assert {(x["family"], x["arm"], x["share"], x["seed"], x["rate"]) for x in lines} == {
        (family, arm.name, share, seed, 2e-3)
        for family in FAMILIES
        for arm in ARMS
        for share in (0.5, 1.0)
        for seed in (0, 1)
    }
    assert ("linear_transformer_plain", "validation") in quick.scored
    assert {split for name, split in quick.scored if "seed" in name} == {"test"}
    assert not [path for path in runs.iterdir() if path.is_dir()]
    before = [*quick.trained]
    assert run_transfer(grid, JobFolder(out, runs, bool)) == [] and quick.trained == before
    longer = {"pretraining": {**grid.pretraining, "train.steps": 4}}
    for other, file in (
        (longer, "pretraining/linear_transformer_plain.jsonl "),
        ({"data": "other"}, "pretraining/linear_transformer_plain.jsonl "),
        ({"tuning_steps": 160}, "rates/linear_transformer_"),
    ):
        message = f"{file}.*is of another config, rate, texts or scores: write to another folder"
        with pytest.raises(InputError, match=message):
            run_transfer(grid._replace(**other), JobFolder(out, runs, bool))
    # A run belongs to the pretraining that it began with.
    for path in (out / "pretraining").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="rates/linear_transformer_frozen.jsonl is of another config"):
        run_transfer(grid._replace(**longer), JobFolder(out, runs, bool))


def test_lost_weights_are_made_again_if_a_run_needs_them(quick, tmp_path):
    grid, out, runs = study_in(tmp_path), tmp_path / "out", tmp_path / "runs"
    run_transfer(grid, JobFolder(out, runs, bool))
    (out / "runs" / "linear_transformer_frozen_1_seed_1.jsonl").unlink()
    quick.trained.clear()
    run_transfer(grid, JobFolder(out, runs, bool))
    assert quick.trained == ["linear_transformer_plain", "linear_transformer_frozen_1_seed_1"]
    (out / "runs" / "linear_transformer_from_scratch_1_seed_1.jsonl").unlink()
    quick.trained.clear()
    run_transfer(grid, JobFolder(out, runs, bool))
    assert quick.trained == ["linear_transformer_from_scratch_1_seed_1"]  # which needs no weights
    # The same with merged lines.
    job_folder = JobFolder(out, runs, bool)
    merge_job_files(job_folder)
    lost = lambda line: (line["arm"], line["share"], line["seed"]) == ("frozen", 1.0, 1)
    write_jsonl(out / "runs.jsonl", [line for line in read_job_lines(out) if not lost(line)])
    quick.trained.clear()
    assert run_transfer(grid, job_folder) == []
    assert quick.trained == ["linear_transformer_plain", "linear_transformer_frozen_1_seed_1"]
    assert len(read_job_lines(out)) == 8 and len(read_job_lines(out, PRETRAINING)) == 1
    # What needs them waits while another process makes them.
    (out / "runs" / "linear_transformer_frozen_1_seed_1.jsonl").unlink()
    quick.trained.clear()
    with try_lock(runs / "pretraining_linear_transformer_plain.lock"):
        left = run_transfer(grid, job_folder)
    assert left == ["pretraining_linear_transformer_plain", "linear_transformer_frozen_1_seed_1"]
    assert not quick.trained


def test_what_needs_another_process_is_left(quick, tmp_path):
    grid, out, runs = study_in(tmp_path), tmp_path / "out", tmp_path / "runs"
    with try_lock(runs / "pretraining_linear_transformer_plain.lock"):
        left = run_transfer(grid, JobFolder(out, runs, bool))
    assert len(left) == 1 + 1 + 4 and all("frozen" in name or "plain" in name for name in left)
    assert {line["arm"] for line in read_job_lines(out)} == {"from scratch"}
    assert run_transfer(grid, JobFolder(out, runs, bool)) == [] and len(read_job_lines(out)) == 8


def test_a_run_that_fails_has_a_line(quick, tmp_path):
    quick.lost = ("linear_transformer_frozen_1_seed_0",)
    out = tmp_path / "out"
    run_transfer(study_in(tmp_path), JobFolder(out, tmp_path / "runs", bool))
    (line,) = (x for x in read_job_lines(out) if "failed" in x)
    assert line["failed"] == "loss nan" and (line["arm"], line["share"], line["seed"]) == ("frozen", 1.0, 0)


def test_what_depends_on_a_pretraining_that_fails_has_lines_too(quick, tmp_path):
    quick.lost = ("linear_transformer_plain",)
    out = tmp_path / "out"
    assert run_transfer(study_in(tmp_path, families=FAMILIES), JobFolder(out, tmp_path / "runs", bool)) == []
    lines = read_job_lines(out)
    failed = [line for line in lines if "failed" in line]
    assert len(lines) == 16 and {line["failed"] for line in failed} == {"pretraining: loss nan"}
    assert {(line["family"], line["arm"]) for line in failed} == {("linear_transformer", "frozen")}
    rules = [NoWorse("frozen", "flash", "linear_transformer", 2.0)]
    assert "2 seeds failed" in write_transfer("A study", rules, (0.5, 1.0), out)


@pytest.mark.slow("trains the runs of a study")
def test_the_full_study_of_a_small_model(tmp_path):
    grid, out, runs = study_in(tmp_path, seeds=(0,)), tmp_path / "out", tmp_path / "runs"
    assert run_transfer(grid, JobFolder(out, runs, bool)) == []
    lines = read_job_lines(out)
    assert len(lines) == 4 and all(0 <= line["accuracy_low"] <= line["accuracy"] <= 1 for line in lines)
    assert {line["split"] for line in lines} == {"test"} and {line["tokens"] for line in lines} == {16}
    (pretrained,) = read_jsonl(out / "pretraining" / "linear_transformer_plain.jsonl")
    assert pretrained["task"] == "masked_lm" and pretrained["pretraining"] == "plain"
    assert "from scratch" in write_transfer("A study", [NoWorse("frozen", "flash", FAMILIES[0], 2.0)], (0.5, 1.0), out)
    assert (out / "accuracy.png").stat().st_size > 10_000
    assert {line["verdict"] for line in read_jsonl(out / "verdicts.jsonl")} == {NOT_RUN}


def score_line(family, seed, accuracy, arm="frozen", share=0.1):
    return {"family": family, "arm": arm, "share": share, "seed": seed, "rate": 1e-3, "accuracy": accuracy} | {
        "accuracy_low": accuracy - 0.01,
        "majority": 0.5,
        "macro_f1": accuracy,
        "matthews": 2 * accuracy - 1,
        "tokens": 5000,
    }


def judge(points, lines=(), over=None, base=0.8):
    """Returns the verdict on flash if it has these points more than attention, by seed."""
    rule = NoWorse("frozen", "flash", "attention", 2.0, over=over)
    scores = [score_line("attention", seed, base) for seed in range(len(points))]
    scores += [score_line("flash", seed, base + x / 100) for seed, x in enumerate(points)]
    return rule.verdict_line([*scores, *lines], [], 0.1)


@pytest.mark.parametrize(
    ("points", "verdict"),
    [  # 5000 texts and four in five right: one accuracy less another has ± 1.57 points
        ((-0.4, 0.0, 3.0), HOLDS),
        ((-0.5, 0.0, 3.0), UNDECIDED),
        ((-2.0, -2.0, -2.0), UNDECIDED),
        ((-3.7, -5.0, -9.0), FAILS),
        ((-3.6, -5.0, -9.0), UNDECIDED),
        ((-3.7, 0.0, 0.0), UNDECIDED),
        ((0.0, 0.0), UNDECIDED),
        ((), NOT_RUN),
    ],
)
def test_a_verdict_needs_three_seeds_that_agree(points, verdict):
    others = [score_line("flash", seed, 0.1, share=1.0) for seed in range(3)]
    others += [score_line("flash", seed, 0.1, arm="from scratch") for seed in range(3)]
    verdict_line = judge(points, others)
    assert verdict_line["verdict"] == verdict and verdict_line["figure"].startswith(
        ", ".join(f"{x:+.1f}" for x in points)
    )
    if points:
        assert re.fullmatch(r".* \(± 1\.[5-7]\)", verdict_line["figure"])
        failed = {"family": "flash", "arm": "frozen", "share": 0.1, "seed": 9, "rate": 1e-3, "failed": "loss nan"}
        assert judge(points, [*others, failed, score_line("attention", 9, 0.8)])["verdict"] == UNDECIDED


def test_the_error_is_that_of_texts_drawn_again():
    """The 95 % interval of a difference of gains, against accuracies that are drawn."""
    shares = {"flash": (0.8, 0.7), "attention": (0.85, 0.6)}
    lines = [
        score_line(family, seed, x, arm)
        for family, accuracies in shares.items()
        for arm, x in zip(("frozen", "from scratch"), accuracies, strict=True)
        for seed in range(3)
    ]
    rule = NoWorse("frozen", "flash", "attention", 2.0, over="from scratch")
    figure = rule.verdict_line(lines, [], 0.1)["figure"]
    drawn = {x: np.random.default_rng(int(100 * x)).binomial(5000, x, 100_000) / 50 for x in sum(shares.values(), ())}
    gaps = drawn[0.8] - drawn[0.7] - drawn[0.85] + drawn[0.6]
    low, high = np.quantile(gaps, (0.025, 0.975))
    assert figure == f"-15.0, -15.0, -15.0 (± {(high - low) / 2:.1f})"


def test_gains_are_compared_if_there_are_any():
    scratch = lambda attention, flash: [
        score_line(family, seed, x, arm="from scratch")
        for family, x in (("attention", attention), ("flash", flash))
        for seed in range(3)
    ]
    equal = (0.0, 0.0, 0.0)
    assert judge(equal, scratch(0.7, 0.7), "from scratch")["verdict"] == UNDECIDED  # ± 2.3: not within two points
    assert judge(equal, scratch(0.7, 0.69), "from scratch")["verdict"] == HOLDS
    assert judge(equal, scratch(0.7, 0.75), "from scratch")["verdict"] == FAILS
    nothing = judge(equal, scratch(0.79, 0.78), "from scratch")
    assert nothing["verdict"] == UNDECIDED and "attention gains too little: +1.0, +1.0, +1.0" in nothing["figure"]
    assert judge(equal, (), "from scratch")["verdict"] == NOT_RUN


def test_models_that_guess_decide_nothing():
    verdict_line = judge((0.5, 0.5, 0.5), base=0.505)
    assert (
        verdict_line["verdict"] == UNDECIDED and "the most frequent label: flash, attention" in verdict_line["figure"]
    )


def test_a_model_that_uses_no_context_decides_nothing():
    rule = NoWorse("frozen", "flash", "attention", 2.0, pretraining="plain", nats=5.5)
    lines = [score_line(family, seed, 0.8) for family in ("flash", "attention") for seed in range(3)]
    losses = lambda x, corpus="plain": [
        {"family": "attention", "pretraining": "plain", "loss": 4.0},
        {"family": "flash", "pretraining": corpus, "loss": x},
    ]
    assert rule.verdict_line(lines, losses(5.4), 0.1)["verdict"] == HOLDS
    for pretrained in (losses(5.5), losses(4.0, "own"), losses(4.0)[:1]):  # or if its loss is missing
        verdict_line = rule.verdict_line(lines, pretrained, 0.1)
        assert verdict_line["verdict"] == UNDECIDED and "context: flash" in verdict_line["figure"]


def test_the_table_has_means_and_spreads():
    lines = [score_line("flash", seed, accuracy) for seed, accuracy in enumerate((0.6, 0.7, 0.8))]
    failed = {"family": "flash", "arm": "frozen", "share": 1.0, "seed": 0, "rate": 1e-3, "failed": "loss nan"}
    first, second = summarize([*lines, failed])
    assert (first["accuracy"], first["lowest"], first["highest"]) == (pytest.approx(0.7), 0.6, 0.8)
    assert first["matthews"] == pytest.approx(0.4) and second["failed"] == 1 and "accuracy" not in second
    baseline = {"arm": "baseline", "family": "most frequent label", "share": 0.1, "accuracy": 0.501}
    _, _, row, other = transfer_table([first, second, baseline]).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["frozen", "flash", "70.0% (60.0%–80.0%)", "1 seeds failed", "0.001"]
    assert "50.1%" in other


def test_baselines_are_of_the_same_texts(tmp_path):
    """The word that gives the label comes after the first `length` tokens."""
    grid = study_in(tmp_path)
    for split, count in (("train", 40), ("validation", 16), ("test", 16)):
        of = lambda label: {"text": "words that say nothing " + ("good", "dull")[label], "label": label}
        lines = [json.dumps(of(i % 2 if i % 5 else 1)) + "\n" for i in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(lines))
    grid.config.data.length = len("words that say nothing")
    accuracies = transfer_program.baselines(grid)
    often = sum(i % 2 or not i % 5 for i in range(16)) / 16
    expected = {"most frequent label": often, "bag of words, whole texts": 1.0, "bag of words, as long as rows": often}
    for share in (0.5, 1.0):
        assert {line["family"]: line["accuracy"] for line in accuracies if line["share"] == share} == expected


def test_the_data_of_the_study_share_no_text(tmp_path, monkeypatch):
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    script = transfer_program
    texts = [f"review {i} was good and long enough to learn some words from it" for i in range(1200)]
    imdb = tmp_path / "imdb"
    imdb.mkdir()
    parts = {"test": texts[:100], "train": texts[90:400], "unlabelled": [*texts[390:1200], texts[0]]}
    for name, part_texts in parts.items():
        columns = {"text": part_texts} | (
            {} if name == "unlabelled" else {"label": [i % 2 for i in range(len(part_texts))]}
        )
        pq.write_table(pa.table(columns), imdb / f"{name}.parquet")
    monkeypatch.setattr(script.design, "get_config", small_vocabulary)
    script.main(["data", str(imdb), f"--out={tmp_path}/out"])
    read = lambda path: pq.read_table(tmp_path / "out" / f"{path}.parquet")["text"].to_pylist()
    names = [f"labelled/{x}" for x in ("train", "validation", "test")]
    splits = {name: read(name) for name in [*names, "unlabelled/train", "unlabelled/validation"]}
    everything = [text for part_texts in splits.values() for text in part_texts]
    assert len(everything) == len({*everything}) == 1200
    assert {name: len(part_texts) for name, part_texts in splits.items()} == {
        "labelled/train": 270,
        "labelled/validation": 30,
        "labelled/test": 100,
        "unlabelled/train": 300,
        "unlabelled/validation": 500,
    }
    pq.write_table(pa.table({"review": texts}), imdb / "unlabelled.parquet")
    with pytest.raises(InputError, match=r"unlabelled.parquet must have a column text$"):
        script.main(["data", str(imdb), f"--out={tmp_path}/other"])
    with pytest.raises(InputError, match="must have train, test and unlabelled.parquet"):
        script.main(["data", str(tmp_path), f"--out={tmp_path}/other"])
    assert (tmp_path / "out" / "tokenizer.model").stat().st_size > 1000


def small_vocabulary():
    config = small_config("text", pathlib.Path("cache"))
    config.data.vocab_size = 320
    return config
