"""Commands of the transfer study; its design, set before the runs, is in studies/transfer/README.md.

python -m studies.transfer data $DATA/imdb --out=runs/transfer/data
python -m studies.transfer run --data=runs/transfer/data --workdir=runs/transfer --out=runs/transfer/results
python -m studies.transfer baselines --data=runs/transfer/data --out=runs/transfer/results
python -m studies.transfer table --out=runs/transfer/results

`run` can be started several times at once, on one core each. `baselines` needs scikit-learn.
"""

import argparse
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flash_lm.cli.run import run
from flash_lm.cli.types import local_path
from flash_lm.config.changes import apply_changes
from flash_lm.data.splits import load_splits
from flash_lm.data.tokenizers import train_sentencepiece
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import Line, write_jsonl
from flash_lm.runs.provenance import hash_of_files
from flash_lm.sweeps.jobs import JobFolder, finish
from flash_lm.training.interrupt import stop_on_signal
from studies.transfer import config as design
from studies.transfer.report import BASELINE, write_transfer
from studies.transfer.run import Transfer, run_transfer

_TENTH = 10  # one in ten labelled texts is for validation
_TEST, _PRETRAINING_VALIDATION = 5000, 500  # texts
_TOKENIZER = "tokenizer.model"
_TOKENIZER_TEXTS = 20_000


def make_data(arguments: argparse.Namespace) -> None:
    """Writes OUT/labelled, OUT/unlabelled and OUT/tokenizer.model: no text is in two splits."""
    try:
        tables = {name: pq.read_table(arguments.imdb / f"{name}.parquet") for name in ("train", "test", "unlabelled")}
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{arguments.imdb} must have train, test and unlabelled.parquet: {str(error).splitlines()[0]}"
        ) from None
    for name, table in tables.items():
        needed = ["text"] if name == "unlabelled" else ["text", "label"]
        if missing := [column for column in needed if column not in table.column_names]:
            raise InputError(f"{arguments.imdb}/{name}.parquet must have a column {' and a column '.join(missing)}")
    seen: set[str] = set()
    # Scored texts come first, so that duplicates of them are not trained on.
    test = _take_evenly(_drop_seen(tables["test"], seen), _TEST)
    train = _drop_seen(tables["train"], seen)
    chosen = np.arange(len(train)) % _TENTH == 0
    unlabelled = _drop_seen(tables["unlabelled"], seen)
    is_held_out = np.isin(
        np.arange(len(unlabelled)), np.linspace(0, len(unlabelled) - 1, _PRETRAINING_VALIDATION).astype(int)
    )
    splits = {
        "labelled": {"train": train.filter(~chosen), "validation": train.filter(chosen), "test": test},
        "unlabelled": {"train": unlabelled.filter(~is_held_out), "validation": unlabelled.filter(is_held_out)},
    }
    for corpus, parts in splits.items():
        folder = arguments.out / corpus
        folder.mkdir(parents=True, exist_ok=True)
        for split, table in parts.items():
            pq.write_table(table, folder / f"{split}.parquet")
            print(f"{corpus} {split}: {len(table):,} texts")
    texts = splits["unlabelled"]["train"]["text"].slice(0, _TOKENIZER_TEXTS).to_pylist()
    config: Any = design.get_config()
    (arguments.out / _TOKENIZER).write_bytes(train_sentencepiece(texts, config.data.vocab_size).model_bytes())


def _drop_seen(table: pa.Table, seen: set[str]) -> pa.Table:
    """Returns the rows whose text is not in `seen`, and adds their texts to it."""
    new = [not (text in seen or seen.add(text)) for text in table["text"].to_pylist()]
    return table.filter(np.array(new))


def _take_evenly(table: pa.Table, count: int) -> pa.Table:
    """Returns `count` rows, evenly spread."""
    return table.take(np.linspace(0, len(table) - 1, min(count, len(table))).astype(int))


def build_study(data: pathlib.Path) -> Transfer:
    """Builds the study on a folder of data."""
    paths = {"data.path": str(data / "labelled"), "data.tokenizer_path": str(data / _TOKENIZER)}
    return Transfer(
        apply_changes(design.get_config(), {**paths, "task": "classify", "data.label_column": "label"}),
        design.FAMILIES,
        design.ARMS,
        {"unlabelled": {"data.path": str(data / "unlabelled")}, "own": {}},
        design.get_pretraining(),
        design.SHARES,
        design.SEEDS,
        design.TUNED_SHARE,
        design.TUNING_STEPS,
        hash_of_files(data, (".parquet", ".model")),
    )


def make_runs(arguments: argparse.Namespace) -> None:
    """Makes the missing runs."""
    with stop_on_signal() as should_stop:
        job_folder = JobFolder(arguments.out, arguments.workdir, should_stop)
        finish(run_transfer(build_study(arguments.data), job_folder), job_folder)


def make_baselines(arguments: argparse.Namespace) -> None:
    """Writes OUT/baselines.jsonl: the most frequent label, and logistic regressions on bags of words."""
    write_jsonl(arguments.out / "baselines.jsonl", baselines(build_study(arguments.data)))


def baselines(transfer: Transfer) -> list[Line]:
    """Returns accuracies with each share of the labels, on the texts of the runs: full, and cut at the sequence length.

    The strength of the regularisation is chosen on the validation split.
    """
    from sklearn.feature_extraction.text import CountVectorizer  # noqa: PLC0415 (of the test environment)
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    accuracies = []
    # For each share of the labels: the majority label, then two bags of words.
    for share in transfer.shares:
        config: Any = apply_changes(transfer.config, {"data.label_share": share})
        splits: Any = load_splits(config.data)
        labels = {name: split.labels for name, split in splits.splits.items()}
        often = np.bincount(labels["train"]).argmax()
        about = {"arm": BASELINE, "share": share}
        accuracies.append(
            {**about, "family": "most frequent label", "accuracy": float((labels["test"] == often).mean())}
        )
        for name, length in (
            ("bag of words, whole texts", None),
            ("bag of words, as long as rows", config.data.length),
        ):
            texts = {split: _texts(splits, split, length) for split in labels}
            words = CountVectorizer(binary=True, min_df=2)
            counts = {"train": words.fit_transform(texts["train"])}
            counts |= {split: words.transform(texts[split]) for split in ("validation", "test")}
            fitted = [
                LogisticRegression(C=c, max_iter=1000).fit(counts["train"], labels["train"])
                for c in (0.001, 0.01, 0.1, 1.0, 10.0)
            ]
            best = max(fitted, key=lambda model: model.score(counts["validation"], labels["validation"]))
            score = float(best.score(counts["test"], labels["test"]))
            accuracies.append(
                {**about, "family": name, "accuracy": score, "C": best.C, "words": len(words.vocabulary_)}
            )
            print(f"{name}, {share:.0%} of the labels: {score:.1%}", flush=True)
    return accuracies


def _texts(splits: Any, split: str, length: int | None) -> list[str]:
    """Returns the documents of a split; with `length`, only the first tokens of each."""
    text, decode = splits.splits[split], splits.tokenizer.decode
    spans = zip(text.starts[:-1], text.starts[1:], strict=True)
    return [decode(text.tokens[start:end][:length]) for start, end in spans]


def write_table(arguments: argparse.Namespace) -> None:
    """Writes table.md, summary.jsonl, verdicts.jsonl and accuracy.png, and prints the table."""
    print(write_transfer(design.TITLE, design.get_hypotheses(), design.SHARES, arguments.out))


def main(argv: list[str]) -> None:
    """Makes the data, the runs, the baselines or the table of the transfer study."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in {
        "data": make_data,
        "run": make_runs,
        "baselines": make_baselines,
        "table": write_table,
    }.items():
        command = commands.add_parser(name, help=function.__doc__)
        command.set_defaults(function=function)
        command.add_argument("--out", required=True, type=local_path, help="folder to write")
        if name == "data":
            command.add_argument("imdb", type=local_path, help="folder of train, test and unlabelled.parquet")
        if name in ("run", "baselines"):
            command.add_argument("--data", required=True, type=local_path, help="folder that `data` has written")
        if name == "run":
            command.add_argument("--workdir", required=True, type=local_path, help="folder for runs in progress")
    arguments = parser.parse_args(argv)
    arguments.function(arguments)


if __name__ == "__main__":
    run(main)
