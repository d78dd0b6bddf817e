"""Design of the controls: its jobs can run, and rates, texts and verdicts follow from lines as the design says."""

import itertools
import pathlib

import pytest
from small import ROOT

from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.families.family import complete_config
from flash_lm.models.facts import facts
from flash_lm.sweeps.jobs import JobFolder, study_hash
from studies.controls import anchor, design, recall
from studies.controls.hypotheses import HYPOTHESES, anchor_verdict, recall_verdicts
from studies.controls.language import Candidate, Text, candidate_rates, find_best_rate, jobs, lines_at_best_rates
from studies.controls.report import write_controls
from studies.protocol.queue import MOST_HOURS, read_hashes, select_queued
from studies.protocol.verdict import FAILS, HOLDS, NOT_RUN, UNDECIDED
from studies.quality import config as study
from studies.quality.run import Part, list_trunks

DATA = design.Data(pathlib.Path("data"), "texts")
TEXTS = "abb55d181bad"  # the hash of what studies/quality/data.py writes
QUEUE_TEXTS = "7af168c3450e"  # the hash of the queue's texts


def positions(part, gain, rate):
    """Yields lines of a Transformer++ for the second halves of sequences of 512 and of 2048."""
    line = {"part": part, "run": "transformer_plus_plus", "seed": 0, "rate": rate, "share": 1.0, "length": 2048}
    yield {**line, "split": "validation", "loss": 4.0}
    line |= {"split": "test", "slices": "positions"}
    for length, positions_slice, perplexity in (
        (512, "256–511", 50.0 * gain),
        (2048, "256–511", 9.0),
        (2048, "1024–2047", 50.0),
    ):
        yield {**line, "length": length, "slice": positions_slice, "perplexity": perplexity}


def lines_with_gain(part, gain=1.03):
    return [*positions(part, gain, 0.0042 if part == "far_books" else 0.003)]


ALL = [
    *lines_with_gain("far_books", 1.01),
    *lines_with_gain("far_bigrams"),
]  # all possible jobs, except local and global on books


@pytest.mark.parametrize("lines", [[], ALL, lines_with_gain("far_books")])
def test_jobs_can_run_and_each_has_a_unique_name(lines):
    jobs_now = design.jobs_now(DATA, lines)
    names = [job.name for job in jobs_now]
    assert len({*names}) == len(names)
    for job in jobs_now:
        complete_config(parse(job.config))
        assert {"part", "run", "seed"} <= job.about.keys()
    long = [job.name for job in jobs_now if not bool(select_queued([job]))]
    assert long == [name for name in names if name.startswith("large_")] and len(long) == 6
    assert all(0 < job.hours <= MOST_HOURS for job in jobs_now if bool(select_queued([job])))


def test_what_differs_gives_another_hash():
    """Seeds, rates, models, texts: lines of one can never pass for those of another."""
    jobs_now = [job for job in design.jobs_now(DATA, ALL) if not job.name.startswith(("anchor", "mqar"))]
    assert len({job.study_hash for job in jobs_now}) == len(jobs_now)
    other = [job for job in design.jobs_now(DATA._replace(texts_hash="others"), ALL) if not job.name.startswith("mqar")]
    assert not {job.study_hash for job in jobs_now} & {job.study_hash for job in other}


def test_models_that_are_compared_have_one_size():
    part_of = lambda group: group.part.name
    for part, names in itertools.groupby(sorted(design.groups(ALL), key=part_of), key=part_of):
        sizes = {"tied": {}, "untied": {}}
        for group in names:
            for candidate in group.candidates:
                config = apply_changes(study.get_config(), {**candidate.changes, **group.part.changes})
                config.model.vocab_size = study.WORDS
                size = facts(config.model.family, config.model, (), ()).parameters
                sizes["tied" if config.model.tie_embeddings else "untied"][candidate.name] = size
        for sizes_of_form in sizes.values():
            assert not sizes_of_form or max(sizes_of_form.values()) / min(sizes_of_form.values()) <= 1.03, (
                part,
                sizes_of_form,
            )


def test_flash_quad_has_the_bias_that_is_published_for_its_rows():
    toeplitz = [job for job in design.jobs_now(DATA, []) if "toeplitz" in job.name]
    assert len(toeplitz) == 10
    for job in toeplitz:
        with_bias = lambda bias, job=job: apply_changes(
            job.config, {"model.gau.relative_bias": bias, "model.vocab_size": study.WORDS}
        )
        sizes = [facts("flash_quad", with_bias(bias).model, (), ()).parameters for bias in (None, "toeplitz", "rope")]
        assert sizes[0] == sizes[1] != sizes[2] and job.config.data.length == 512
    assert {job.config.model.divides for job in toeplitz} == {"scores", "weights"}


def test_the_linear_transformer_and_transformer_plus_differ_by_softmax_alone():
    by_name = {c.name: c.changes for group in design.THEN for c in group.candidates}
    linear, plus = (
        apply_changes(study.get_config(), by_name[x]) for x in ("linear_transformer_rotary", "transformer_plus")
    )
    models = [complete_config(parse(apply_changes(x, {"data.path": "x"}))).model for x in (linear, plus)]
    same = [(x.rotary, x.absolute_positions, x.mlp_dim, x.norm, x.residual_init) for x in models]
    assert same[0] == same[1] and same[0][:2] == (True, "none")
    sized = [apply_changes(x, {"model.vocab_size": study.WORDS}).model for x in (linear, plus)]
    sizes = [facts(x.family, x, (), ()).parameters for x in sized]
    assert sizes[0] == sizes[1]


def test_runs_of_the_first_study_count_where_their_config_is_the_same():
    """Their hash is that of the study's config, texts, scores and rate."""
    lines = design.read_counted_lines(*design.folders(ROOT))
    taken = {(line["run"], line["seed"]) for line in lines if "study_commit" not in line}
    assert taken == {(run, seed) for run in ("transformer_plus_plus", "flash_scores") for seed in (0, 1, 2)}
    names = {job.name for job in design.jobs_now(DATA, [])}
    assert not names & {"rows_of_512_transformer_plus_plus_0.006_seed_0", "rows_of_512_flash_scores_0.012_seed_0"}
    config = apply_changes(study.get_config(), {"data.tokens_per_batch": 4096})
    config.data.mixture = study.mixture(pathlib.Path("elsewhere"))
    scored = [[*of] for of in (design.ROWS.shares, design.ROWS.lengths, design.ROWS.slices)]
    for candidate in (design.SOFTMAX, design.FLASH):
        trunks = list_trunks(config, [design.ROWS._replace(models={candidate.name: candidate.changes})])
        older = [line for line in lines if line["run"] == candidate.name and "study_commit" not in line]
        for trunk in trunks:
            (recorded,) = {line["study_hash"] for line in older if line["seed"] == trunk.seed}
            assert recorded == study_hash(trunk.config, TEXTS, scored, older[0]["rate"])


def test_what_the_queue_has_made_counts_under_the_hash_of_its_commit():
    """Each job that it may come to has a former hash: it is not made twice, whichever commit made it."""
    controls, quality = design.folders(ROOT)
    hashes = read_hashes()
    jobs_now = design.jobs_now(
        design.Data(pathlib.Path("data"), QUEUE_TEXTS), design.read_counted_lines(controls, quality)
    )
    assert {job.study_hash for job in jobs_now} <= {*hashes.values()}
    place = JobFolder(controls, pathlib.Path(), bool, hashes)
    jobs_by_name = [job for job in jobs_now if place.lines(job)]  # else it raises
    assert {job.about["run"] for job in jobs_by_name} >= {*anchor.FAMILIES}


SMALL = Part("part", {}, {}, (0, 1, 2), 200)
TWO = Candidate("flash", {"model.family": "flash"}, (0.01, 0.02, 0.04))


def scores(rate, loss, seed=0, **more):
    line = {"part": "part", "run": "flash", "seed": seed, "rate": rate, "split": "validation", "share": 1, "loss": loss}
    return line | more


def jobs_by_name(lines, taken=None):
    text = Text({"data.path": "x"}, "texts")
    return {job.name: job for job in jobs(SMALL, [TWO], text, lines, taken or {})}


def test_the_best_rate_on_the_validation_split_gets_the_other_seeds():
    names = [f"part_flash_{rate}_seed_0" for rate in (0.01, 0.02, 0.04)]
    waiting = ["part_flash_best_rate_seed_1", "part_flash_best_rate_seed_2"]
    jobs_by_rate = jobs_by_name([])
    assert (
        list(jobs_by_rate) == [*names, *waiting]
        and [job.is_ready for job in jobs_by_rate.values()] == [True] * 3 + [False] * 2
    )
    lines = [scores(0.01, 4.0), scores(0.02, 3.9), scores(0.04, 4.1)]
    lines += [scores(0.01, 1.0, split="test"), scores(0.01, 2.0, share=0.5)]
    later = jobs_by_name(lines)["part_flash_0.02_seed_2"]
    assert find_best_rate(lines, "part", TWO) == later.about["rate"] == later.config.train.learning_rate == 0.02
    assert (
        later.is_ready
        and later.config.seed == 2
        and lines_at_best_rates([*lines, scores(0.02, 3.8, 1)], "part", [TWO])[-1]["seed"] == 1
    )
    assert {line["rate"] for line in lines_at_best_rates(lines, "part", [TWO])} == {0.02}
    failed = [*lines[:2], {"part": "part", "run": "flash", "seed": 0, "rate": 0.04, "failed": "nan"}]
    assert find_best_rate(failed, "part", TWO) == 0.02
    assert find_best_rate(lines[:1], "part", TWO) is None and not lines_at_best_rates(lines[:1], "part", [TWO])


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({0.01: 4.0, 0.02: 3.9}, [0.01, 0.02, 0.04]),  # not all are tried
        ({0.01: 4.0, 0.02: 3.9, 0.04: 4.1}, [0.01, 0.02, 0.04]),
        ({0.01: 4.0, 0.02: 4.1, 0.04: 4.2}, [0.005, 0.01, 0.02, 0.04]),
        ({0.005: 3.9, 0.01: 4.0, 0.02: 4.1, 0.04: 4.2}, [0.0025, 0.005, 0.01, 0.02, 0.04]),
        ({0.0025: 3.8, 0.005: 3.9, 0.01: 4.0, 0.02: 4.1, 0.04: 4.2}, [0.0025, 0.005, 0.01, 0.02, 0.04]),  # no more
        ({0.01: 4.0, 0.02: 3.9, 0.04: 3.8}, [0.01, 0.02, 0.04, 0.08]),
    ],
)
def test_rates_go_on_while_the_best_is_at_an_end(losses, expected):
    lines = [scores(rate, loss) for rate, loss in losses.items()]
    assert candidate_rates(lines, "part", TWO) == expected
    tried = [name for name in jobs_by_name(lines) if name.endswith("seed_0")]
    assert tried == [f"part_flash_{rate:g}_seed_0" for rate in expected]
    assert (find_best_rate(lines, "part", TWO) is None) == (losses.keys() < {*expected})


def test_what_an_older_study_has_is_not_made_again():
    taken, names = {"flash": 0.02}, ["part_flash_0.01_seed_0", "part_flash_0.04_seed_0"]
    assert list(jobs_by_name([], taken)) == [*names, "part_flash_best_rate_seed_1", "part_flash_best_rate_seed_2"]
    assert list(jobs_by_name([scores(0.01, 4.0), scores(0.02, 3.9), scores(0.04, 4.0)], taken)) == names
    lines = [scores(0.005, 3.9), scores(0.01, 3.8), scores(0.02, 3.9), scores(0.04, 4.0)]
    assert "part_flash_0.01_seed_1" in jobs_by_name(lines, taken)


@pytest.mark.parametrize(
    ("lines", "text", "searched", "chunked"),
    [
        ([], None, {"far_books"}, set()),
        (lines_with_gain("far_books"), "far_books", {"far_books"}, {"far_books"}),
        (lines_with_gain("far_books", 1.019), None, {"far_books", "far_bigrams"}, set()),
        (ALL, "far_bigrams", {"far_books", "far_bigrams"}, {"far_bigrams"}),
        (
            [*lines_with_gain("far_books", 1.0), *lines_with_gain("far_bigrams", 1.0)],
            None,
            {"far_books", "far_bigrams"},
            set(),
        ),
    ],
)
def test_the_text_on_which_far_tokens_matter_is_the_first_with_a_gain(lines, text, searched, chunked):
    assert design.far_text(lines) == text
    jobs_now = [job for job in design.jobs_now(DATA, lines) if job.about["part"] in design.FAR]
    parts = lambda of: {job.about["part"] for job in jobs_now if job.about["run"].startswith(of)}
    assert parts("transformer") == searched and parts("flash") == chunked
    assert all(job.config.data.length == 2048 for job in jobs_now)
    seeds = {job.about["seed"] for job in jobs_now if job.about["run"].startswith("flash")}
    assert not chunked or len(seeds) == (3 if text == "far_books" else 5)


def test_hypotheses_are_on_models_of_their_parts():
    models = {
        (group.part.name, x.name)
        for lines in (ALL, lines_with_gain("far_books"))
        for group in design.groups(lines)
        for x in group.candidates
    }
    for hypothesis in HYPOTHESES:
        assert {(hypothesis.part, hypothesis.first), (hypothesis.part, hypothesis.second)} <= models, hypothesis.text


def recalls(rates):
    """Yields lines of FLASH: accuracies of three seeds on the test split and on the validation split, by rate."""
    for rate, (accuracies, validation_accuracies) in rates.items():
        for seed, (accuracy, validation) in enumerate(zip(accuracies, validation_accuracies, strict=True)):
            at = {"part": recall.PART, "run": "flash", "rate": rate, "seed": seed}
            yield at | {"accuracy": accuracy, "validation_accuracy": validation}


@pytest.mark.parametrize(
    ("accuracies", "verdict"), [((0.9, 0.8, 0.6), HOLDS), ((0.9, 0.8, 0.4), UNDECIDED), ((0.1, 0.2, 0.0), FAILS)]
)
def test_recall_is_judged_at_the_rate_with_the_best_median(accuracies, verdict):
    lucky = ((1.0, 0.0, 0.0), (1.0, 0.0, 0.0))  # one seed chooses nothing
    lines = [*recalls({0.003: lucky, 0.001: (accuracies, (0.05,) * 3), 0.0003: lucky})]
    verdicts = {line["hypothesis"].split()[1]: line for line in recall_verdicts(lines)}
    assert verdicts["flash"]["verdict"] == verdict and "rate 0.001" in verdicts["flash"]["figure"]
    assert verdicts["gated_deltanet"]["verdict"] == NOT_RUN
    (line, _) = recall_verdicts(lines[:-1])  # not all are made
    assert line["verdict"] == NOT_RUN


def test_the_anchor_is_the_published_loss():
    line = lambda run, loss: {"part": anchor.PART, "run": run, "seed": 0, "loss": loss}
    assert anchor_verdict([])["verdict"] == NOT_RUN
    assert anchor_verdict([line("transformer", 1.92)] * 2)["verdict"] == UNDECIDED
    assert anchor_verdict([line("transformer", 1.94)] * 3)["verdict"] == FAILS
    losses = [line("transformer", loss) for loss in (1.8, 1.88, 1.96)]  # 1.88 in the mean
    verdict = anchor_verdict([*losses, line("flash", 1.5)])
    assert verdict["verdict"] == HOLDS and verdict["figure"] == "transformer 1.880, flash 1.500"


def test_the_text_of_the_anchor_is_split_as_the_recipe_does(tmp_path):
    (tmp_path / "input.txt").write_text("abcdefghij" * 10)
    anchor.write_text(tmp_path / "input.txt", tmp_path / "out")
    parts = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert parts == {"train.txt": "abcdefghij" * 9, "valid.txt": "abcdefghij", "test.txt": "abcdefghij"}
    with pytest.raises(InputError, match="must be the text of Shakespeare: No such file"):
        anchor.write_text(tmp_path / "none.txt", tmp_path / "out")


def test_the_report_follows_from_the_lines(tmp_path):
    """With the first study's lines alone: nothing is decided, since not all rates are tried."""
    text = write_controls(tmp_path, design.folders(ROOT)[1])
    assert text.count("| not run |") > 20
    assert {path.name for path in tmp_path.iterdir()} >= {"table.md", "verdicts.jsonl", "rates.jsonl"}
