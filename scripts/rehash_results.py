"""Gives the lines of results/ the hashes of today, and writes studies/hashes.json: the former hash -> today's.

    RUNS=FOLDER python scripts/rehash_results.py    # the absolute path of the folder in which the runs were made

Until 29 November 2026 a run's hash left out keys at a value of older versions (`BEFORE`), and sections at their
defaults. Since then it has the keys that differ from their defaults (`run_hash`), and no key needs such a value. This
script computes both hashes of every config that a file of configs/ or a study gives, with the texts, rates and seeds of
the lines. A hash that no such config has stays as it is; the output counts these, file by file.

Lines of the queue of the studies (studies/controls/results/runs) stay as they are: the commit that makes them compares them
with its own hashes. `studies.protocol.queue` reads them through hashes.json, which also has the jobs that are not made yet.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from flax.traverse_util import flatten_dict

from flash_lm.cli.load import load_config, load_module
from flash_lm.cli.run import run
from flash_lm.config import keys
from flash_lm.config.experiment import BATCH_TOKENS, parse
from studies.quality import config
from flash_lm.data.splits import load_splits
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.runs.json_file import load_json
from flash_lm.runs.jsonl import Line, grouped, read_jsonl, read_lines, write_jsonl
from flash_lm.runs.provenance import config_hash
from flash_lm.runs.run_folder import run_hash
from studies.protocol.hypotheses import step_name
from studies.quality import run as quality
from studies.quality import step_times
from studies.recall.run import models_of
from studies.seq2seq import run as seq2seq
from studies.transfer import run as transfer
from flash_lm.sweeps.grid import Changes, changed, in_workdir
from flash_lm.sweeps.tuning import _shorter as shorter
from flash_lm.training import resolve
from studies.controls import design, language, recall

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"
QUEUE = RESULTS / "controls" / "runs"
HASHES = ("config_hash", "study_hash")
# Hashes of the texts of the study, of transfer and of the queue, which are in the hashes of their lines.
TEXTS, TRANSFER_TEXTS, QUEUE_TEXTS = "abb55d181bad", "146003afce75", "7af168c3450e"
# Where runs were made that began from another run: its place is in their configs, and so in their hashes.
RUNS = pathlib.Path(os.environ.get("RUNS", "runs"))
_MOST_RATES = 7  # of a model in the queue: three that are planned, and two below and above them

# The value of a key that the former hash left out; in these all were at it that a version did not know.
BEFORE: dict[str, Any] = {
    "plugins": (),
    "model.pattern": (),
    "model.num_kv_heads": None,
    "model.head": "softmax",
    "model.scale_init": "as_init",
    "model.residual_init": "as_init",
    "model.norm_epsilon": 1e-6,
    "model.query_key_norm": False,
    "model.rotary_base": 10_000.0,
    "model.short_convolution": 0,
    "model.divides": "weights",
    "model.kernels": "auto",
    "model.state_dtype": None,
    "model.aft.window": 32,
    "model.aft.bias_dim": 64,
    "model.aft.bias_rate": 1.0,
    "model.chunks.overlapping": False,
    "model.favor.redraw": False,
    "model.gau.heads": 1,
    "model.gau.query_key": "scale_offset",
    "model.logistics.mixtures": 10,
    "model.softmax.cap": 0.0,
    "data.mixture": (),
    "data.name": None,
    "data.config": None,
    "data.split": "train",
    "data.text_column": "text",
    "data.label_column": None,
    "data.pair_column": None,
    "data.label_share": 1.0,
    "data.streaming": False,
    "data.shuffle_buffer": 0,
    "data.masking.rate": 0.15,
    "train.tokens": None,
    "train.decay_steps": None,
    "train.boundaries": (),
    "train.clip_mode": "global",
    "train.label_smoothing": 0.0,
    "train.z_loss": 0.0,
    "train.ema": 0.0,
    "train.carry_state": False,
    "train.on_nonfinite": "stop",
    "train.log_groups": False,
    "train.stop_accuracy": None,
    "train.branch_from": None,
    "train.init_from": None,
    "train.init_positions": "refuse",
    "train.freeze": (),
}
# Changes of defaults: runs from before one had these values, whatever their config file says now.
STARTS: Sequence[Changes] = (
    {},
    {"model.scale_init": "as_init"},
    {"model.residual_init": "as_init", "model.divides": "weights"},
    {"model.scale_init": "as_init", "model.residual_init": "as_init", "model.divides": "weights"},
)


def former_hash(config: Mapping[str, Any]) -> str:
    """The hash that a config had; nested dicts, or flat."""
    flat: Any = flatten_dict(config, sep=".")
    is_at = lambda name, value: name not in flat or json.dumps(flat[name]) == json.dumps(value)
    left_out = {name for name, value in BEFORE.items() if is_at(name, value)}
    for own in sections():
        if all(is_at(name, default) for name, default in own.items()):
            left_out |= own.keys()
    kept = {name: value for name, value in flat.items() if name not in left_out}
    if kept.get("model.normalizer") == "length_everywhere":
        kept["model.normalizer"] = "paper"  # its former name
    if kept.get("data.tokens_per_batch") is None:
        kept["data.tokens_per_batch"] = BATCH_TOKENS
    if mixture := kept.get("data.mixture"):
        kept["data.mixture"] = [share for _, share in mixture]
    return config_hash({name: value for name, value in kept.items() if name not in ("data.path", "data.cache_dir")})


@functools.cache
def sections() -> list[dict[str, Any]]:
    """The defaults of each section, by full name."""
    return [{one.name: one.default for one in keys.keys(kind, f"{name}.")} for name, kind in keys.SECTIONS.items()]


def all_hashes() -> dict[str, str]:
    """The former hash -> today's, of all configs and studies that have lines."""
    found = {}
    for config in configs():
        flat: Any = flatten_dict(config.to_dict(), sep=".")
        for start in STARTS:
            own = {**flat, **start}
            found.setdefault(former_hash(own), run_hash(own))
            if own["model.divides"] == "scores":
                found.setdefault(former_hash(with_paper_n(own)), run_hash(own))
    first = {former: run_hash(config.to_dict()) for former, config in of_first_versions()}
    return found | first | both(study_hashes) | both(group_hashes)


def with_paper_n(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose scores are divided, as it was for an hour: by a value of model.normalizer, and without divides."""
    length = flat["data.length"] or flat["model.max_length"]
    return {**flat, "model.normalizer": f"paper_{length}", "model.divides": "weights"}


def queue_hashes() -> dict[str, str]:
    """The former hash -> today's, of the jobs of the queue, at every rate that they may come to."""
    return both(lambda: [job.known for job in queue_jobs()])


def both(hashes: Callable[[], Iterable[str]]) -> dict[str, str]:
    """What `hashes` makes of configs by the former hash -> what it makes of them by today's."""
    with contextlib.ExitStack() as stack:
        for module in (quality, transfer, recall, step_times):
            stack.enter_context(mock.patch.object(module, "run_hash", former_hash))
        former = list(hashes())
    return dict(zip(former, hashes(), strict=True))


def configs() -> Iterator[Any]:
    """Configs of runs that have lines."""
    quickstart = load_config("quickstart", [])
    for family in ("transformer_plus_plus", "flash_quad", "flash"):
        yield changed(quickstart, {"model.family": family})
    yield changed(quickstart, {"model.family": "flash", "data.corpus": "text", "train.steps": 500})
    for family in ("flash", "flash_quad"):
        yield from sweep("studies/first_scales", {"model.family": family})
    yield from sweep("studies/masked_linear", {})
    for changes in ({}, {"data.length": 2048}, {"data.pack": "documents"}, {"task": "masked_lm"}):
        for config in sweep("studies/divisor", {"data.corpus": "hf", **changes}):
            yield config
            usual = "512" if config.task == "masked_lm" else "count"
            yield changed(config, {"model.normalizer": usual})  # which the runs named
    for task in ("listops", "image", "text"):
        yield from lra(task)
    books = load_module("tables/families")
    for changes in books.get_runs("small").values():
        local = {"data.corpus": "hf", "data.streaming": False, "data.name": None, "data.config": None}
        yield changed(books.get_config("small"), local | changes)
    yield from of_rates_and_seeds()
    yield from of_study()
    yield from of_transfer()
    yield from of_checks()


def of_first_versions() -> Iterator[tuple[str, Any]]:
    """The hash of a line from before 26 November, which had all keys of its version, and the config of its run.

    That it is this config was checked once: the code of each commit gives the hash for the run of this name, and its
    config differs from this one in mesh.rules alone, and in keys at the value that its version did not know.
    """
    table: Any = load_module("recall/mqar_as_measured")
    models: dict[Any, Any] = {(x.name, x.width): x for x in models_of(table.get_config(), table.MODELS, table.WIDTHS)}
    for line in read_jsonl(RESULTS / "recall" / "mqar" / "runs.jsonl"):
        yield line["config_hash"], models[line["model"], line["width"]].of_run(line["rate"], line["seed"])
    text = {"data.corpus": "hf"}
    for file, name, changes in (
        ("claims/aft/runs", "studies/aft", text),
        ("claims/flash/rows_of_512/runs", "studies/flash", text),
        ("claims/flash/rows_of_2048/runs", "studies/flash", text | {"data.length": 2048}),
        ("claims/flash/documents/runs", "studies/flash", text | {"data.pack": "documents"}),
        ("carry/positions", "studies/carry", {**text, **STARTS[-1]}),
    ):
        config = changed(load_config(name, []), changes)
        runs = load_module(name).get_runs(config)
        for line in read_jsonl(RESULTS / f"{file}.jsonl"):
            own = line["run"] if line["run"] in runs else f"{line['run']}_seed_{line['seed']}"
            yield line["config_hash"], changed(config, runs[own])


def sweep(name: str, changes: Changes) -> Iterator[Any]:
    """The configs of the runs of a file of configs/."""
    config = changed(load_config(name, []), changes)
    for own in load_module(name).get_runs(config).values():
        yield changed(config, own)


def lra(task: str) -> Iterator[Any]:
    """The configs of the runs of a stand-in of Long Range Arena; training closed keys of those that are pretrained."""
    name = f"lra/{task}_short"
    config = load_config(name, [])
    place = RUNS / (name if task == "listops" else f"lra/{task}")
    runs = in_workdir(load_module(name).get_runs(config), place)
    corpus: Any = load_splits(parse(config).data) if task == "listops" else None
    tokenizer = corpus.tokenizer if corpus else ByteTokenizer()
    for run_, changes in runs.items():
        own = changed(config, changes)
        parent = run_.replace("_pretrained", "_masked")
        yield own if parent == run_ else like_parent(own, changed(config, runs[parent]), tokenizer)


def like_parent(config: Any, parent: Any, tokenizer: Any) -> Any:
    """`resolve.like_parent` of a run whose folder is gone."""
    folder = types.SimpleNamespace(workdir=pathlib.Path(), config=parent)
    found: Any = {"downloaded": folder, "RunFolder": folder, "load_tokenizer": tokenizer}
    with contextlib.ExitStack() as stack:
        for name, it in found.items():
            stack.enter_context(mock.patch.object(resolve, name, lambda _, it=it: it))
        return resolve.like_parent(config, "")


def of_rates_and_seeds() -> Iterator[Any]:
    """The configs of the studies of recall, and of prefixes and encoders."""
    table: Any = load_module("recall/mqar_longer")
    models: dict[str, Any] = {x.name: x for x in models_of(table.get_config(), table.MODELS, table.WIDTHS)}
    for line in read_jsonl(RESULTS / "recall" / "longer" / "runs.jsonl"):
        yield models[line["model"]].of_run(line["rate"], line["seed"])
    for name, of, changes in (
        ("copy", "copy", {}),
        ("reverse", "copy", {"data.copy.reverse": True}),
        ("couplets", "couplets", {}),
    ):
        table = load_module(f"seq2seq/{of}")
        models = {x.name: x for x in seq2seq.models_of(changed(table.get_config(), changes), table.MODELS)}
        for line in read_jsonl(RESULTS / "seq2seq" / name / "runs.jsonl"):
            yield models[line["model"]].of_run(line["rate"], line["seed"])


def of_checks() -> Iterator[Any]:
    """The configs of single runs beside the controls: of recall, and of candidates at the budget of the search."""
    measured: Any = load_module("recall/mqar_as_measured").get_config()
    candidates = [x for group in [*design.FIRST, *design.THEN] for x in group.candidates]
    longest, _ = tuned(study_config({}))
    for line in read_jsonl(RESULTS / "controls" / "checks.jsonl"):
        if line["check"] == "recall":
            for steps in (600, 2400):
                (model,) = models_of(changed(measured, {"train.steps": steps}), [line["what"]], [line["width"]])
                yield model.of_run(line["rate"], line["seed"])
        else:
            at = {"train.learning_rate": line["rate"], "train.steps": config.TUNING_STEPS}
            yield from (changed(longest, {**x.changes, **at}) for x in candidates)


STUDIES = {  # the folder of a study's lines -> what differs in its config
    "study": {},
    "study_as_init": {"model.residual_init": "as_init"},
    "study_depth": {"model.residual_init": "depth"},
}


def study_config(changes: Changes) -> Any:
    """What the runs of the study of quality start from; the places of the texts are in no hash."""
    config: Any = config.get_config()
    config.data.mixture = config.mixture(pathlib.Path("data"))
    return changed(config, changes)


def tuned(config: Any) -> tuple[Any, int]:
    """What the longest runs of the study's search of rates start from, and their tokens."""
    decay = {"train.schedule": "sqrt", "train.decay_steps": config.TUNING_STEPS // quality.DECAY}
    budget = config.TUNING_STEPS * parse(config).data.tokens_per_batch
    return changed(config, {**decay, "train.warmup_steps": None}), budget


def of_study() -> Iterator[Any]:
    """The configs of the runs of the study of quality: of the search of rates, and trunks with their decays."""
    for folder, changes in STUDIES.items():
        config = study_config(changes)
        longest, budget = tuned(config)
        files = [*(RESULTS / folder).glob("rates/*.jsonl"), *(RESULTS / folder).glob("flash.jsonl")]
        for line in itertools.chain.from_iterable(map(read_jsonl, files)):
            own = config.MODELS[line["model"]] | (changes if folder == "study_depth" else {})
            yield of_search(changed(longest, own), budget, line)
        for trunk, rate in trunks(folder, config):
            for place in STUDIES:
                schedules = quality.schedules(trunk, rate, RUNS / place / trunk.name)
                yield from (changed(trunk.config, own) for own in schedules.values())


def of_search(config: Any, budget: int, line: Line) -> Any:
    """The config of a run of a search of rates, from its line."""
    part = round(budget / line["tokens"])
    return changed(config, {**shorter(config, budget, part), "train.learning_rate": line["value"]})


def trunks(folder: str, config: Any) -> Iterator[tuple[quality.Trunk, float]]:
    """The trunks of a study whose rate is known, with that rate."""
    rates = quality.rates(RESULTS / folder)
    for trunk in quality.trunks_of(config, config.get_parts()):
        if trunk.tuned_as in rates:
            yield trunk, rates[trunk.tuned_as]["value"]


def of_transfer() -> Iterator[Any]:
    """The configs of the study of transfer: of pretraining, of the search of rates, and of the runs."""
    whole, runs = transfer_study(), RUNS / "transfer"
    shared: Any = whole.config
    tokenizer = types.SimpleNamespace(vocab_size=shared.data.vocab_size, mask=0)
    arms = {arm.name: arm for arm in whole.arms}
    parents = {
        (family, corpus): changed(whole.config, whole.pretrained(family, corpus))
        for family, corpus in itertools.product(whole.families, whole.corpora)
    }
    yield from parents.values()

    def closed(family: str, arm: transfer.Arm, share: float, seed: int = 0) -> Any:
        own = whole.of(family, arm, runs, share, seed)
        return like_parent(own, parents[family, arm.corpus], tokenizer) if arm.corpus else own

    for family, arm in itertools.product(whole.families, whole.arms):
        config = changed(closed(family, arm, whole.tuned_share), {"train.warmup_steps": None})
        budget = whole.tuning_steps * parse(config).data.tokens_per_batch
        name = f"{family}_{arm.name}".replace(" ", "_").replace("-", "_")
        for line in read_jsonl(RESULTS / "transfer" / "rates" / f"{name}.jsonl"):
            if "tokens" in line:
                yield of_search(config, budget, line)
    for line in itertools.chain.from_iterable(map(read_jsonl, (RESULTS / "transfer" / "runs").glob("*.jsonl"))):
        if "rate" in line:
            own = closed(line["family"], arms[line["arm"]], line["share"], line["seed"])
            yield changed(own, {"train.learning_rate": line["rate"]})


def transfer_study() -> transfer.Transfer:
    """The study of transfer, with the texts where they were."""
    script = load_script("transfer")
    with mock.patch.object(script, "hash_of_files", lambda *_: TRANSFER_TEXTS):
        return script.study(RUNS / "transfer" / "data")


def study_hashes() -> Iterator[str]:
    """Hashes of the tasks of the studies of quality and of transfer."""
    peers = load_script("train_peers")
    for folder, changes in STUDIES.items():
        config = study_config(changes)
        longest, budget = tuned(config)
        for own in config.MODELS.values():
            yield quality.study_hash(changed(longest, own), TEXTS, budget)
        for trunk, rate in trunks(folder, config):
            scored = [[*of] for of in (trunk.part.shares, trunk.part.lengths, trunk.part.slices)]
            yield quality.study_hash(trunk.config, TEXTS, scored, rate)
            beside = [peer for peer, ours in peers.PEERS.items() if ours == trunk.model]
            for peer, factor in itertools.product(beside, (0.5, 1, 2)):
                yield peers.Task(peer, trunk, rate * factor).known(TEXTS)
    whole = transfer_study()
    for family in whole.families:
        yield from (task.known for task in transfer._tasks(whole, family, RESULTS / "transfer", RUNS, bool))


def group_hashes() -> Iterator[str]:
    """Hashes of the groups of models whose steps were timed side by side."""
    for folder, changes in STUDIES.items():
        config = study_config(changes)
        runs = {step_name(part.name, x): own for part in config.get_parts() for x, own in part.runs.items()}
        for group in grouped(read_lines(RESULTS / folder / "step_times.jsonl"), "config_hash").values():
            names = dict.fromkeys(line["run"] for line in group)
            yield step_times.hash_of_group({name: changed(config, runs[name]) for name in names})


def queue_jobs() -> Iterator[Any]:
    """The jobs that the queue of the studies may come to: whichever text is found, and whichever rates are best."""
    data = design.Data(pathlib.Path("data"), QUEUE_TEXTS)
    yield from design.jobs_ever(data)
    of_seed_0 = lambda lines, part, candidate: possible_rates(part, candidate)
    for number in range(_MOST_RATES):
        of_others = lambda lines, part, candidate, n=number: (own := possible_rates(part, candidate))[n % len(own)]
        with mock.patch.multiple(language, rates_of=of_seed_0, best_rate=of_others):
            yield from design.jobs_ever(data)


def possible_rates(part: str, candidate: language.Candidate, rates_of: Any = language.rates_of) -> list[float]:
    """The rates that a candidate may come to: the planned ones, and those if the lowest or the highest is best."""
    found = {*candidate.rates}
    for sign in (1, -1):
        rates = sorted(candidate.rates)
        for _ in range(_MOST_RATES):
            of_seed_0 = {"part": part, "run": candidate.name, "seed": 0, "split": "validation", "share": 1}
            rates = rates_of([of_seed_0 | {"rate": rate, "loss": sign * rate} for rate in rates], part, candidate)
        found |= {*rates}
    return sorted(found)


def load_script(name: str) -> Any:
    """A file of scripts/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: list[str]) -> None:
    """Rewrites the lines, writes hashes.json, and prints how many hashes of each file are mapped, and how many not."""
    today, file_of_hashes = all_hashes(), RESULTS / "hashes.json"
    used = (load_json(file_of_hashes) if file_of_hashes.exists() else {}) | queue_hashes()
    for file in sorted(RESULTS.rglob("*.jsonl")):
        lines = read_jsonl(file)
        named = [(line, key) for line in lines for key in HASHES if line.get(key)]
        if not named or file.parent == QUEUE:
            continue
        known = {former: today[former] for line, key in named if (former := line[key]) in today}
        left = {line[key] for line, key in named} - known.keys() - {*today.values()}
        used |= {former: now for former, now in known.items() if former != now}
        for line, key in named:
            line[key] = known.get(line[key], line[key])
        write_jsonl(file, lines)
        print(f"{file.relative_to(RESULTS)}: {len(known)} hashes mapped, {len(left)} left as they are")
    text = json.dumps(dict(sorted(used.items())), indent=1)
    file_of_hashes.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
