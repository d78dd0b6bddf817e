"""The page of claims: from made-up folders of a study, and recomputed from the committed results."""

import dataclasses
import json
import math
import pathlib
import re
import shlex
import statistics
import tomllib

import pytest

from flash_lm.cli.load import load_module, read_config
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.families.family import complete_config
from flash_lm.families.flash import GAUOptions
from flash_lm.layers.mixed_chunk_core import ChunkOptions
from studies.claims import page
from studies.claims.__main__ import main
from studies.claims.configs import aft, books, divisor, flash
from studies.claims.quality import trunks_rule

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (HERE / "CLAIMS.md").read_text()
TABLE = tomllib.loads((HERE / "claims.toml").read_text())


def parse_sections(text: str) -> dict[str, dict[str, str]]:
    """Parses the section of each claim; `verdict` includes its reasons."""
    sections = {}
    for section in re.split(r"^### ", text.partition("## The studies")[0], flags=re.MULTILINE)[1:]:
        claim, _, verdict, *facts = section.splitlines()
        lines = (re.fullmatch(r"- (.*?): (.*)", line) for line in facts)
        sections[claim] = {"verdict": verdict} | {line[1]: line[2] for line in lines if line}
    return sections


def write_run(folder: pathlib.Path, name: str, seed: int, perplexity: float, split: str = "test") -> None:
    workdir = folder / f"{name}_seed_{seed}"
    workdir.mkdir(parents=True)
    score = {
        "split": split,
        "length": 512,
        "trained_length": 512,
        "perplexity": perplexity,
        "corpus": "x",
        "bytes": 9,
        "step": 500,
    }
    score |= {"bits_per_byte": math.log2(perplexity), "parameters": 9, "tokens": 9, "batch_tokens": 2048}
    score |= {"trained_git": "c0ffee", "trained_dirty": False}
    curve = [{"split": "validation", "step": n, "loss": 1 / n, "tokens": 7, "train_seconds": n} for n in (50, 500)]
    (workdir / "results.jsonl").write_text(json.dumps(score) + "\n")
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve))


def test_finished_runs_get_a_verdict_and_the_others_say_so(tmp_path, capsys, monkeypatch):
    root, runs = tmp_path / "root", tmp_path / "runs"
    table = tmp_path / "claims.toml"  # without what is withdrawn of our own runs, whose verdict would not show
    table.write_text(re.sub("^withdrawn = .*\n", "", page.TABLE.read_text(), flags=re.MULTILINE))
    monkeypatch.setattr(page, "TABLE", table)
    for seed in range(3):
        write_run(runs, "simple", seed, 9.0)
        write_run(runs, "linear_transformer", seed, 9.1)
        for window in (8, 32, 128):
            write_run(runs, f"window_{window}", seed, 8.0)
        write_run(runs, "full", seed, 6.0 if seed else 9.0)
    main(["--study=aft", f"--workdir={runs}", f"--root={root}"])
    text = (root / "studies" / "claims" / "CLAIMS.md").read_text()
    claims = parse_sections(text)
    claim = claims["AFT-simple is as good as the Linear Transformer"]
    assert claim["verdict"] == "**holds**"
    rule = "bits a byte of simple between 0.9901 and 1.01 × that of linear_transformer, by the seeds alone"
    expected = "bits a byte of simple 0.995 (0.995–0.995, 3 seeds) × that of linear_transformer (95 %: 0.995 to 0.995)"
    assert (claim["rule"], claim["result"]) == (rule, expected)
    assert claim["models"] == "9 parameters, 500 steps, 1.02M tokens of training" and claim["what would change it"]
    assert claims["AFT-local is best with a window in the middle"]["verdict"] == "**undecided**"
    assert claims["AFT-local gains from longer rows"]["result"] == "no finished run of rows_of_1024 in aft"
    assert claims["FLASH's step time is flat in the length"]["verdict"] == "**not run**"
    assert "trained by commit c0ffee." in text and "seeds 0, 1, 2" in text
    assert list(claims) and len(claims) == len(TABLE["claims"])
    for row in TABLE["claims"]:
        (word,) = re.findall(
            rf"^\| {re.escape(row['text'])} \| {re.escape(row['source'])} \| (.*) \|$", text, re.MULTILINE
        )
        assert claims[row["text"]]["verdict"].startswith(f"**{word}**")
    assert text.strip() in capsys.readouterr().out
    main([f"--root={root}"])  # the page alone
    assert (root / "studies" / "claims" / "CLAIMS.md").read_text() == text


def test_runs_of_another_machine_stay(tmp_path):
    root = tmp_path / "root"
    for seed, machine in enumerate(("one", "other")):
        write_run(tmp_path / machine, "simple", seed, 5.0)
    write_run(tmp_path / "other", "simple", 0, 4.0)  # a new line of a run replaces the old one
    for machine in ("one", "other"):
        main(["--study=aft", f"--workdir={tmp_path / machine}", f"--root={root}"])
    runs = page.read_evidence(root).studies["aft"]["simple"]
    assert {seed: run.line("test", None)["perplexity"] for seed, run in runs.items()} == {0: 4.0, 1: 5.0}
    curves = [json.loads(line) for line in (root / page.RESULTS / "aft" / "curves.jsonl").read_text().splitlines()]
    assert [(line["seed"], line["step"], line["tokens"]) for line in curves] == [
        (0, 50, 7),
        (0, 500, 7),
        (1, 50, 7),
        (1, 500, 7),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--study=books"], "--study and --runs go together"),
        (["--study=book", "--workdir=."], "--study=book must be one of books, "),
        (["--study=books", "--workdir=nowhere"], "nowhere has no finished run: train some first with `python -m"),
    ],
)
def test_bad_arguments(tmp_path, arguments, words):
    with pytest.raises(InputError, match=re.escape(words)):
        main([*arguments, f"--root={tmp_path}"])


def test_the_committed_page_is_that_of_the_committed_results():
    evidence = page.read_evidence(ROOT)
    assert page.render_page(evidence) + "\n" == PAGE
    written = [json.loads(line) for line in (HERE / "results" / "verdicts.jsonl").read_text().splitlines()]
    assert written == json.loads(json.dumps(page.verdict_lines(evidence)))


def test_the_lines_say_what_the_page_says():
    sections = parse_sections(PAGE)
    written = [json.loads(line) for line in (HERE / "results" / "verdicts.jsonl").read_text().splitlines()]
    assert [line["claim"] for line in written] == [row["text"] for row in TABLE["claims"]]
    for line in written:
        word = f"**{line['verdict']}**"
        assert sections[line["claim"]]["verdict"] == ": ".join(filter(None, [word, "; ".join(line["reasons"])]))


def test_the_sizes_of_the_arithmetic_are_those_of_its_config():
    (rule,) = (part for row in TABLE["claims"] for part in row["rules"] if part["rule"] == "arithmetic")
    model = complete_config(parse(read_config("configs/flash_base.py"))).model
    gau = model[GAUOptions]
    assert rule["over"] == [model[ChunkOptions].size, gau.shared_dim] and rule["under"] == [gau.expanded_dim]


def test_each_claim_says_what_would_change_its_verdict():
    changes = [row["change"] for row in TABLE["claims"]]
    assert all(changes)
    claims = parse_sections(PAGE).values()
    assert [claim["what would change it"] for claim in claims] == [row["change"] for row in sort_by_source()]


def sort_by_source() -> list[dict]:
    """Returns the rows in the order of the page, grouped by source."""
    sources = [*dict.fromkeys(row["source"] for row in TABLE["claims"])]
    return sorted(TABLE["claims"], key=lambda row: sources.index(row["source"]))


def perplexities(part: dict, run: str) -> tuple[dict[int, float], bool] | None:
    """Returns perplexities by seed, straight from the file, and whether they are of the test split; None: not run."""
    file = HERE / "results" / part["study"] / "runs.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not (lines := [line for line in lines if line["run"] == run]):
        return None
    lines = [line for line in lines if line["length"] == part.get("length", lines[0]["length"])]
    on_test = [line for line in lines if line["split"] == "test"]
    return {line["seed"]: line[part.get("metric", "perplexity")] for line in on_test or lines}, bool(on_test)


T_95 = {2: 12.706205, 3: 4.302653}  # the quantile 0.975 of Student's t, by the number of values
RATIOS = [row for row in TABLE["claims"] if {part["rule"] for part in row["rules"]} == {"ratio"}]


@pytest.mark.parametrize("row", RATIOS, ids=lambda row: row["text"])
def test_each_verdict_recomputed_from_the_files(row):
    """Without the code that made the page: the rule as it is printed, on the lines as they are."""
    claim = parse_sections(PAGE)[row["text"]]
    rules, verdict, figure = (claim.get(key, "") for key in ("rule", "verdict", "result"))
    scores = [[perplexities(part, part[name]) for name in ("first", "second")] for part in row["rules"]]
    if verdict == "**not run**":
        assert any(None in pair for pair in scores)
        return
    words = set()
    judged = [pair for pair, part in zip(scores, row["rules"], strict=True) if part.get("judged", True)]
    for pair, rule, ratio_text in zip(judged, rules.split("; "), figure.split("; "), strict=False):
        (first, on_test), (second, _) = pair
        ratios = [first[seed] / second[seed] for seed in sorted(first.keys() & second.keys())]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        spread = f"{min(ratios):.3f}–{max(ratios):.3f}, {len(ratios)} seeds" if len(ratios) > 1 else "one seed"
        assert f" {mean:.3f} ({spread}) ×" in ratio_text
        if between := re.search(r"between ([\d.]+) and ([\d.]+) ×", rule):
            low, high = map(float, between.groups())
        else:
            low, high = 0.0, float(re.search(r"at most ([\d.]+) ×", rule)[1])
        if len(ratios) == 1:
            words.add("undecided")
            continue
        half = T_95[len(ratios)] * statistics.stdev(map(math.log, ratios)) / len(ratios) ** 0.5
        ends = mean * math.exp(-half), mean * math.exp(half)
        assert "(95 %: {:.3f} to {:.3f})".format(*ends) in ratio_text
        decided = on_test and len(ratios) > 2 and (ends[1] < low or ends[0] > high or low < ends[0] < ends[1] < high)
        words.add(("holds" if low < mean < high else "does not hold") if decided else "undecided")
    expected = next((word for word in ("does not hold", "undecided") if word in words), "holds")
    expected = "undecided" if "withdrawn" in row else expected
    assert verdict.startswith(f"**{expected}**")


def test_the_others_recomputed_from_the_files():
    """The loss of one pair of runs of a study over that of another pair, and the ratios of the benchmarks."""
    sections = parse_sections(PAGE)
    scores = {
        name: perplexities({"study": "books"}, name)[0]
        for name in ("transformer_plus_plus", "mc_tfm", "flash_quad", "flash")
    }
    cost = [
        (scores["mc_tfm"][seed] / scores["transformer_plus_plus"][seed])
        / (scores["flash"][seed] / scores["flash_quad"][seed])
        for seed in (0, 1, 2)
    ]
    row = sections["Mixed chunks cost a Transformer++ more than they cost FLASH-Quad"]
    assert (
        min(cost) > 1.02 and "more than 1.02 ×" in row["rule"] and row["verdict"].startswith("**undecided")
    )  # not the test split
    for text, first, second, least, most in (
        ("FLASH's step time is flat in the length", ("flash", 8192), ("flash", 512), 0, 1.15),
        ("FLASH trains up to 4.9 times as fast", ("transformer_plus_plus", 8192), ("flash", 8192), 4.9, math.inf),
    ):
        ratios = []
        for path in ("steps/results/flash", "steps/results/papers", "gpu/results/step_time"):
            lines = [json.loads(line) for line in (ROOT / "benchmarks" / path / "steps.jsonl").read_text().splitlines()]
            ms = {(line["family"], line["length"]): line["median_ms"] for line in lines}
            ratios.append(ms[first] / ms[second])
        (row,) = (row for name, row in sections.items() if name.startswith(text))
        held = [least <= ratio <= most for ratio in ratios]
        word = "holds" if all(held) else "undecided" if any(held) else "does not hold"
        assert row["verdict"] == f"**{word}**"
        assert all(f"{ratio:.2f}" in row["result"] for ratio in ratios)


def flags(command: str) -> dict[str, str]:
    return dict(
        word.lstrip("-").split("=", 1) for word in shlex.split(command) if word.startswith("--") and "=" in word
    )


def test_the_command_under_a_figure_makes_its_file():
    """A benchmark's --out is the folder of the file; a sweep's --workdir is what the page takes over."""
    for row in TABLE["claims"]:
        made = {flags(TABLE["commands"][name])["out"] for name in row.get("commands", ())}
        folders = {str(pathlib.Path(path).parent) for part in row["rules"] for path in part.get("files", ())}
        assert folders == made or not folders, row["text"]
    sweeps = [x for claim in page.read_table()[1] for x in claim.commands if "--study=" in x]
    for command in sweeps:
        sweep, study, runs = re.fullmatch(r"`([^`]+)`.* --study=(\S+) --workdir=([^`]+)`", command).groups()
        assert flags(sweep)["workdir"] == runs == f"runs/{study}" and flags(sweep)["split"] == "test"
        assert pathlib.Path(ROOT, flags(sweep)["config"]).exists()


@pytest.mark.parametrize("study", [books, aft, flash], ids=["books", "aft", "flash"])
def test_the_runs_of_a_study_are_possible(study):
    config = study.get_config()
    runs = study.get_runs(config)
    for changes in runs.values():
        complete_config(parse(apply_changes(config, changes)))
    seeds = {int(name.rpartition("_")[2]) for name in runs}
    assert seeds <= set(books.SEEDS) and len(seeds) >= 2 and len(runs) % len(seeds) == 0


def test_rules_on_the_study_are_its_hypotheses():
    asked = [dataclasses.replace(x, number=0) for x in load_module("studies/quality/config.py").get_hypotheses()]
    rules = [part for row in TABLE["claims"] for part in row["rules"] if part["rule"] == "trunks"]
    assert rules and all(trunks_rule(**{k: v for k, v in x.items() if k != "rule"}).hypothesis in asked for x in rules)


def test_each_run_of_a_rule_is_one_of_its_study():
    names = {
        "books": set(books.RUNS),
        "aft": set(aft.RUNS),
        "flash": {name.rpartition("_seed_")[0] for name in flash.get_runs(flash.get_config())},
        "divisor": {
            name.rpartition("_seed_")[0]
            for task in ("causal_lm", "masked_lm")
            for name in divisor.get_runs(apply_changes(divisor.get_config(), {"task": task}))
        },
    }
    for row in TABLE["claims"]:
        for part in row["rules"]:
            if "study" in part:
                asked = [part.get("first"), part.get("second"), *part.get("of", ()), *part.get("than", ())]
                assert set(filter(None, asked)) <= names[part["study"].partition("/")[0]]
