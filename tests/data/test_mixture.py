"""Mixtures of corpora: shares over time, the order of each part, resume, and scores of each part."""

import collections
import json
from typing import Any

import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.data.batches import IndexedBatches
from flash_lm.data.packing import StreamRows
from flash_lm.data.share import Share, single_host_share
from flash_lm.data.splits import load_splits
from flash_lm.errors import InputError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.setup import build_experiment
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")

SHARES = (0.5, 0.3, 0.2)


@pytest.fixture
def config(tmp_path):
    """Three corpora whose documents use different letters."""
    for name in "abc":
        for number in range(8):
            file = tmp_path / name / f"{number}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{number} {name * (30 + 100 * 'abc'.index(name))}\n" * 4)
    mixture = tuple((str(tmp_path / name), share) for name, share in zip("abc", SHARES, strict=True))
    return apply_changes(small_config("", tmp_path / "cache"), {"data.path": None, "data.mixture": mixture})


class Numbers:
    """Rows whose only value is their index."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return {"number": np.array([row])}


RANGES = [range(10), range(10, 17), range(17, 117)]


def numbers(share, start=0, seed=0, batches=1, transform=None):
    mixture = list(zip(RANGES, SHARES, strict=True))
    actual = IndexedBatches(Numbers(117), share, seed=seed, start_step=start, mixture=mixture, transform=transform)
    return [int(x) for _ in range(batches) for x in next(actual)["number"][:, 0]]


def test_each_part_has_its_share_at_any_time():
    """For every n, the first n rows have each part's share to within one and a half rows."""
    rows = numbers(single_host_share(10), batches=60)
    part = np.array([next(i for i, r in enumerate(RANGES) if row in r) for row in rows])
    for i, share in enumerate(SHARES):
        ahead = np.cumsum(part == i) - share * np.arange(1, len(rows) + 1)
        assert np.abs(ahead).max() < 1.5
        mine = [row for row, p in zip(rows, part, strict=True) if p == i]
        size = len(RANGES[i])
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(RANGES[i]), "every row once an epoch"
        if len(mine) >= 2 * size:
            assert mine[:size] != mine[size : 2 * size], "each epoch has another order"


def test_shares_stay_exact():
    """Also for shares that are no small ratio, and after many rows, where a run may resume."""
    shares = (0.7, 0.2999, 0.0001)
    ranges = [range(1000), range(1000, 2000), range(2000, 3000)]
    mixture = list(zip(ranges, shares, strict=True))
    for start in (0, 10**6, 10**9):
        batches = IndexedBatches(Numbers(3000), single_host_share(10), seed=0, start_step=start // 10, mixture=mixture)
        rows = np.array([int(x) for _ in range(2000) for x in next(batches)["number"][:, 0]])
        for r, share in zip(ranges, shares, strict=True):
            mine = (rows >= r.start) & (rows < r.stop)
            assert abs(mine.sum() - 20_000 * share) <= 2, (start, share)
    # Of the rows after 10⁹: each part has used its share of the rows before.
    epochs = []
    note = lambda row, seed, epoch, number: epochs.append((number // 1000, epoch)) or row
    batches = IndexedBatches(
        Numbers(3000), single_host_share(10), seed=0, start_step=10**8, mixture=mixture, transform=note
    )
    for _ in range(2000):
        next(batches)
    for part, share in enumerate(shares):
        assert abs(min(epoch for x, epoch in epochs if x == part) - 10**9 * share / 1000) <= 1


def test_a_step_and_any_number_of_hosts_determine_the_rows():
    full = numbers(single_host_share(10), batches=30)
    assert numbers(single_host_share(10), start=17, batches=13) == full[170:]
    halves = [numbers(Share(10, mine), batches=30) for mine in (range(0, 5), range(5, 10))]
    joined = [x for i in range(30) for half in halves for x in half[5 * i : 5 * i + 5]]
    assert joined == full
    assert numbers(single_host_share(10), seed=1, batches=30) != full


def test_random_choices_differ_by_part_and_epoch():
    seen = []
    note = lambda row, seed, epoch, number: seen.append((number, epoch)) or row
    numbers(single_host_share(10), batches=30, transform=note)
    assert len(set(seen)) == len(seen) and max(epoch for _, epoch in seen) > 5


def test_a_mixture_is_the_text_of_its_parts(config):
    """Tokens, documents and splits of each part equal those of the corpus alone."""
    corpus = load_splits(parse(config).data)
    assert corpus.name == "a-b-c" and corpus.parts == ("a", "b", "c")
    experiment = build_experiment(parse(config))
    for split in ("train", "validation", "test"):
        actual: Any = experiment.evaluation_rows(split)
        start = 0
        for number, (index, _) in enumerate(config.data.mixture):
            alone = load_splits(parse(apply_changes(config, {"data.mixture": (), "data.path": index})).data)
            rows = StreamRows(alone.splits[split], 32, alone.tokenizer.begin)
            assert actual.ranges[number] == range(start, start + len(rows))
            for i in range(len(rows)):
                for name, x in rows[i].items():
                    assert np.array_equal(actual[start + i][name], x), name
            start += len(rows)
        assert len(actual) == start


@pytest.mark.slow("draws fifty batches of text")
def test_batches_of_text_have_the_shares(config):
    experiment = build_experiment(parse(config))
    batches = experiment.training_batches(single_host_share(8))
    letters = collections.Counter()
    for _ in range(50):
        for row in next(batches)["inputs_BxL"]:
            text = bytes(experiment.corpus.tokenizer.decode(row.tolist()), "utf-8")
            letters[max("abc", key=lambda x, text=text: text.count(x.encode()))] += 1
    assert all(abs(letters[name] - 400 * share) < 2 for name, share in zip("abc", SHARES, strict=True))


@pytest.mark.slow("trains a run, stops it and resumes it")
def test_a_run_resumes_and_scores_each_part(config, tmp_path):
    train(config, tmp_path / "uninterrupted")
    steps = iter([False] * 4 + [True])
    train(config, tmp_path / "run", should_stop=lambda: next(steps))
    train(config, tmp_path / "run")
    actual = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("uninterrupted", "run")]
    losses = [{(x["step"], x["split"]): x["loss"] for x in lines} for lines in actual]
    assert losses[0] == losses[1]
    line = [x for x in actual[0] if x["split"] == "validation"][-1]
    results = evaluate(tmp_path / "run", "validation", slices=("parts",))
    assert [x["slice"] for x in results] == ["a", "b", "c"]
    for result in results:
        assert np.isclose(line[f"loss/{result['slice']}"], result["loss"], rtol=1e-6)
    (uninterrupted,) = evaluate(tmp_path / "run", "validation")
    assert np.isclose(line["loss"], uninterrupted["loss"], rtol=1e-6)
    assert np.isclose(sum(x["nll"] for x in results), uninterrupted["nll"], rtol=1e-6)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["data"]["mixture"][0][1] == 0.5
    with pytest.raises(InputError, match=r"data.mixture=.* there"):
        train(apply_changes(config, {"data.mixture": config.data.mixture[:2]}), tmp_path / "run")


@pytest.mark.slow("trains a run")
def test_masked_models_learn_from_mixtures(config, tmp_path):
    train(apply_changes(config, {"task": "masked_lm", "data.masking.rate": 0.3}), tmp_path / "run")
    line = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert {"loss/a", "loss/b", "loss/c"} <= line.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.mixture": (("x", 1.0),)}, "must be pairs of different places and positive shares"),
        ({"data.mixture": (("x", 1.0), ("y", 0))}, "must be pairs of different places"),
        ({"data.mixture": (("x", 1.0), ("x", 2.0))}, "must be pairs of different places"),
        ({"data.mixture": (("x", 1.0), ("y", "many"))}, "must be pairs of different places"),
        ({"data.path": "x"}, "leave data.path and data.name open"),
        ({"data.corpus": "stdlib"}, "data.mixture needs data.corpus=text or hf, not stdlib"),
        ({"data.corpus": "hf", "data.streaming": True}, "data.mixture needs data.streaming=False"),
        ({"data.corpus": "hf", "data.label_column": "label"}, "data.mixture has no labels"),
        ({"train.carry_state": True}, "leave data.mixture out"),
    ],
)
def test_impossible_mixtures_are_refused(config, changes, message):
    with pytest.raises(InputError, match=message):
        parse(apply_changes(config, changes))


def test_a_part_without_text_is_named(config, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "one.txt").write_text("x")
    with pytest.raises(InputError, match=r"corpus text is too small|corpus d is too small"):
        load_splits(
            parse(apply_changes(config, {"data.mixture": (*config.data.mixture, (str(tmp_path / "d"), 1))})).data
        )
    missing = (*config.data.mixture, (str(tmp_path / "nowhere"), 1))
    with pytest.raises(InputError, match="no file matches data.path=.*nowhere"):
        load_splits(parse(apply_changes(config, {"data.mixture": missing})).data)


@pytest.mark.slow("tokenizes two more corpora")
def test_paths_with_the_same_name_stay_separate(config, tmp_path):
    other = write_corpus(tmp_path / "more" / "a")
    mixture = ((str(tmp_path / "a"), 1), (str(tmp_path / "more" / "a"), 1))
    corpus = load_splits(parse(apply_changes(config, {"data.mixture": mixture})).data)
    assert other and corpus.parts == tuple(path for path, _ in mixture)
    assert corpus.name == "a-a" and {x.name for x in tmp_path.iterdir()} == {*"abc", "more", "cache"}
    assert {x.name for x in (tmp_path / "a").iterdir()} == {f"{i}.txt" for i in range(8)}, "nothing but the text"
